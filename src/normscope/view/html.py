"""An analysis of one or both sides as a self-contained page: no network, no fonts, no scripts but its own."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from normscope.analysis import Analysis, EncoderDecoderAnalysis
from normscope.files import atomic
from normscope.view.labels import BEYOND, CIVIDIS, model_label, visible, worst_completeness

ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def write(analysis: Analysis | EncoderDecoderAnalysis, path: str | os.PathLike[str]) -> Path:
    """Write the page with every map of the analysis."""
    with atomic(path) as temporary:
        temporary.write_text(page(analysis), encoding="utf-8")
    return Path(path)


def page(analysis: Analysis | EncoderDecoderAnalysis) -> str:
    """The page's source; of an encoder-decoder the decoder comes first."""
    if isinstance(analysis, EncoderDecoderAnalysis):
        parts = list(reversed(analysis.sides.items()))
        data = f'{{"sides":[{",".join(_data(part, side) for side, part in parts)}]}}'
    else:
        parts = [("", analysis)]
        data = _data(analysis, "")
    counts = (f"{side} {len(part.rows)} tokens, {len(part.layers)} layers".strip() for side, part in parts)
    title = f"{model_label(analysis)}: {'; '.join(counts)}"
    # The data goes in last: nothing in it is taken for a place to fill in.
    head, tail = PAGE.replace("@articles@", ARTICLE * len(parts)).split("@data@")
    return head.replace("@title@", html.escape(title)) + data + tail


def _data(analysis: Analysis, side: str) -> str:
    """The analysis as JSON that no HTML parser can mistake for markup."""
    error, scope, layer = worst_completeness(analysis)
    facts: dict[str, Any] = {
        "model": model_label(analysis),
        "side": side,
        "family": str(analysis.info.get("family") or ""),
        "completeness": f"{error:.1e} ({scope}, layer {layer + 1})",
        "rows": [[visible(label.token), label.side, label.position] for label in analysis.rows],
        "columns": [[visible(label.token), label.side, label.position] for label in analysis.columns],
        "layers": analysis.layers,
        "colours": CIVIDIS,
        "beyond": BEYOND,
    }
    scopes = ",".join(
        f'{json.dumps(scope)}:{{"map":{_numbers(measured.map)},"mixing":{_numbers(measured.mixing)},'
        f'"remainder":{_numbers(measured.remainder)}}}'
        for scope, measured in analysis.measured.items()
    )
    # Plain ASCII: half a surrogate pair in a token cannot be encoded otherwise.
    text = f'{json.dumps(facts, ensure_ascii=True, separators=(",", ":"))[:-1]},"scopes":{{{scopes}}}}}'
    return text.translate(ESCAPES)


def _numbers(tensor: Tensor) -> str:
    """(layers, ...) as one flat list per layer, 5 significant digits; what is not finite becomes null."""
    lists = []
    for layer in tensor.detach().cpu().double().flatten(1).tolist():
        text = ",".join([f"{value:.5g}" for value in layer])
        lists.append(text.replace("nan", "null").replace("-inf", "null").replace("inf", "null"))
    return f"[[{'],['.join(lists)}]]"


ARTICLE = """<article>
<header><h1 class="title"></h1><span class="quiet facts"></span></header>
<form>
<label>scope <select class="scope"></select></label>
<label>layer <select class="layer"></select></label>
<label><input type="checkbox" class="own"> colour scale includes own tokens</label>
</form>
<div class="panes">
<div class="left">
<div class="frame"><div class="map" role="img"></div></div>
<div class="bar"><span>0</span><b></b><u></u><span class="end"></span></div>
<div class="quiet note"></div>
<p class="said" aria-live="polite"></p>
</div>
<div>
<section><h2>Mixing ratio</h2>
<div class="quiet">share of other tokens in an output, mean over outputs, %</div><table class="means"></table></section>
<section><h2>Strongest cells between different tokens</h2><table class="top"></table></section>
</div>
</div>
</article>
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>normscope: @title@</title>
<style>
:root { --paper: #fff; --ink: #1c1e21; --quiet: #666a70; --rule: #dcdee2; --accent: #0b57a4; --soft: #f4f5f7 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15171a; --ink: #e4e6e9; --quiet: #9a9fa7; --rule: #33373d; --accent: #7db4f0; --soft: #1e2126 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 16px 20px 40px; max-width: 1180px; background: var(--paper); color: var(--ink);
  font: 13px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums }
header { display: flex; flex-wrap: wrap; gap: 2px 20px; align-items: baseline; border-bottom: 1px solid var(--rule);
  padding-bottom: 8px }
h1 { font-size: 15px; font-weight: 600; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 13px; font-weight: 600; margin: 0 0 4px }
.quiet, th, label { color: var(--quiet); font-weight: 400 }
form { display: flex; flex-wrap: wrap; gap: 8px 18px; align-items: center; margin: 12px 0 }
select { font: inherit; color: inherit; background: var(--soft); border: 1px solid var(--rule); border-radius: 4px;
  padding: 3px 6px; max-width: 100% }
.panes { display: flex; flex-wrap: wrap; gap: 24px 36px; align-items: flex-start }
.token { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; unicode-bidi: isolate;
  white-space: pre }
.left { max-width: min(100%, 660px) }
.frame { overflow: auto; max-width: 100% }
.map { position: relative }
.map canvas { position: absolute; image-rendering: pixelated; cursor: crosshair }
.map span { position: absolute; line-height: 1.3; color: var(--quiet); white-space: pre }
.map span.on { color: var(--accent); z-index: 1; background: var(--paper) }
.map .up { writing-mode: vertical-rl; transform: rotate(180deg) }
.map i { position: absolute; background: var(--accent); opacity: .75 }
.map span.other { color: var(--accent) } .map .seam { background: var(--paper); opacity: 1; pointer-events: none;
  box-shadow: 0 0 0 1px var(--ink) }
.map .track { background: var(--soft); opacity: 1 }
.map .cross { background: none; outline: 2px solid #fff; box-shadow: 0 0 0 3px #000; opacity: 1;
  pointer-events: none }
.said { min-height: 2.9em; margin: 8px 0 0; overflow-wrap: anywhere }
.bar { display: flex; gap: 6px; align-items: center; margin-top: 6px }
.bar b { width: 140px; height: 9px } .bar u { width: 12px; height: 9px }
table { border-collapse: collapse }
td, th { padding: 1px 7px; text-align: right; vertical-align: baseline }
.means tr:first-child th { vertical-align: bottom; white-space: pre-line; line-height: 1.2; font-size: 11px }
.top td { max-width: 190px; overflow: hidden; text-overflow: ellipsis }
.top td:not(:last-child), .top th:not(:last-child) { text-align: left }
.means button { font: inherit; color: inherit; background: none; border: 0; border-radius: 3px; padding: 0 3px;
  cursor: pointer } .means button:hover { background: var(--rule) }
.means [aria-current] { background: var(--accent); color: var(--paper) }
section + section { margin-top: 20px }
article + article { margin-top: 36px }
</style>
</head>
<body>
<main>
@articles@</main>
<noscript>The maps are drawn by a script inside this page; allow scripts to see them.</noscript>
<script type="application/json" id="data">@data@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
document.querySelectorAll("article").forEach((root, k) => show(root, (data.sides ?? [data])[k]));

function show(root, D) {
const $ = name => root.querySelector("." + name);
const names = Object.keys(D.scopes), n = D.rows.length, m = D.columns.length;
const add = (parent, tag, text, kind) => {
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  if (kind) e.className = kind;
  parent.append(e);
  return e;
};
const rgb = D.colours.map(c => [1, 3, 5].map(k => parseInt(c.slice(k, k + 2), 16)));
const over = [1, 3, 5].map(k => parseInt(D.beyond.slice(k, k + 2), 16));
const shade = s => {
  const p = Math.min(Math.max(s, 0), 1) * (rgb.length - 1), k = Math.min(Math.floor(p), rgb.length - 2);
  return rgb[k].map((a, c) => a + (rgb[k + 1][c] - a) * (p - k));
};
const number = v => v === null ? "not a number" : v === 0 || v >= 1e-3 && v < 1e5 ? String(+v.toPrecision(4))
  : v.toExponential(2);
const cut = token => {
  const letters = [...token];
  return letters.length > 16 ? [...letters.slice(0, 8), "…", ...letters.slice(-7)].join("") : token;
};
const count = (k, thing) => `${k} ${thing}${k === 1 ? "" : "s"}`;
const own = (i, j) => D.rows[i][1] === D.columns[j][1] && D.rows[i][2] === D.columns[j][2];
const current = () => {
  const name = $("scope").value, place = +$("layer").value, s = D.scopes[name];
  return { name, place, map: s.map[place], mixing: s.mixing[place], remainder: s.remainder[place] };
};

$("title").textContent = D.side ? `${D.model}, ${D.side}` : D.model;
$("facts").textContent = [D.family, count(n, "token"), `${count(D.layers.length, "layer")} (counted from 1)`,
  `worst completeness error ${D.completeness}`].filter(Boolean).join(" · ");
for (const name of names) add($("scope"), "option", name).value = name;
D.layers.forEach((layer, k) => add($("layer"), "option", layer + 1).value = k);
$("scope").value = names[names.length - 1];
$("layer").value = D.layers.length - 1;
$("bar").querySelector("b").style.background = `linear-gradient(to right, ${D.colours.join(",")})`;
$("bar").querySelector("u").style.background = D.beyond;

const box = $("map"), canvas = add(box, "canvas"), cross = add(box, "i", undefined, "cross");
canvas.width = m;
canvas.height = n;
canvas.tabIndex = 0;
const labels = (list, kind) => list.map(([token, side, position]) => {
  const e = add(box, "span", cut(token), kind);
  e.title = `${token} (${side} token ${position + 1})`;
  return e;
});
const left = labels(D.rows, "token"), below = labels(D.columns, "token up");
const track = add(box, "i", undefined, "track"), bars = D.rows.map(() => add(box, "i"));
const heading = add(box, "span", "mixing, 0-1");
const starts = D.columns.map((c, j) => j).filter(j => j === 0 || D.columns[j][1] !== D.columns[j - 1][1]);
const two = starts.length > 1, home = D.rows[0][1], seams = starts.slice(1).map(() => add(box, "i", undefined, "seam"));
const kind = j => D.columns[j][1] === home ? "" : "other";
const sides = two ? starts.map(j => add(box, "span", `${D.columns[j][1]} tokens`, kind(j))) : [];
below.forEach((e, j) => e.classList.toggle("other", D.columns[j][1] !== home));
const input = j => two ? `${D.columns[j][1]} input ${D.columns[j][2] + 1}` : `input ${D.columns[j][2] + 1}`;
let size = 0, gutter = 0;

function layout() {
  const longest = list => Math.max(...list.map(r => [...cut(r[0])].length));
  const room = Math.min(document.body.clientWidth - 40, 660), top = 18;
  gutter = longest(D.rows) * 7.3 + 8;
  size = Math.max(4, Math.min(30, Math.floor((room - gutter - 80) / m)));
  const font = Math.min(12, Math.max(9, size - 2)), step = Math.ceil((font + 1) / size);
  const right = gutter + size * m, bottom = top + size * n, put = (e, css) => {
    for (const name in css) e.style[name] = typeof css[name] === "number" ? css[name] + "px" : css[name];
  };
  put(box, { width: right + 80, height: bottom + longest(D.columns) * 7.3 + 10 });
  put(canvas, { left: gutter, top, width: size * m, height: size * n });
  const label = (e, k, css) => {
    put(e, { ...css, fontSize: font });
    e.dataset.thin = k % step ? 1 : "";
    e.hidden = k % step > 0;
  };
  left.forEach((e, i) => label(e, i, { right: size * m + 85, top: top + size * (i + .5) - font * .65 }));
  below.forEach((e, j) => label(e, j, { top: bottom + 5, left: gutter + size * (j + .5) - font * .65 }));
  sides.forEach((e, k) => put(e, { left: gutter + size * starts[k] + 3 * (k > 0), top: 0, fontSize: 11,
    width: size * ((starts[k + 1] ?? m) - starts[k]), overflow: "hidden" }));
  seams.forEach((e, k) => put(e, { left: gutter + size * starts[k + 1] - 1, top: 0, width: 2, height: bottom + 12 }));
  put(heading, { left: right + 10, top: 0, fontSize: 11 });
  put(track, { left: right + 10, top, width: 64, height: size * n });
  const gap = Math.floor(size / 6);
  bars.forEach((e, i) => put(e, { left: right + 10, top: top + size * i + gap, height: Math.max(1, size - 2 * gap) }));
}

function draw() {
  const { name, place, map, mixing } = current();
  let top = 0, others = 0;
  map.forEach((v, k) => {
    top = Math.max(top, v);
    if (!own(Math.floor(k / m), k % m)) others = Math.max(others, v);
  });
  const end = ($("own").checked || !(others > 0 && 2 * others < top) ? top : others) || 1, beyond = top > end;
  const context = canvas.getContext("2d"), image = context.createImageData(m, n);
  map.forEach((v, k) => image.data.set([...(v > end ? over : shade(v / end)), v === null ? 0 : 255], 4 * k));
  context.putImageData(image, 0, 0);
  $("end").textContent = number(end);
  $("bar").querySelector("u").hidden = !beyond;
  $("note").textContent = (name.endsWith("-W") ? "attention weight" : "norm of the contribution")
    + (beyond ? `; own tokens reach ${number(top)}, beyond the scale` : "");
  bars.forEach((e, i) => e.style.width = 64 * mixing[i] + "px");
  box.setAttribute("aria-label", `${name}, layer ${D.layers[place] + 1}: rows are outputs, columns inputs`);
  for (const b of $("means").querySelectorAll("button"))
    b.toggleAttribute("aria-current", b.dataset.scope === name && +b.dataset.place === place);
  const cells = map.map((v, k) => k).filter(k => map[k] !== null && !own(Math.floor(k / m), k % m))
    .sort((a, b) => map[b] - map[a]).slice(0, 10);
  $("top").replaceChildren();
  const titles = add($("top"), "tr");
  for (const text of cells.length ? ["output", "input", "value"] : ["none"]) add(titles, "th", text);
  for (const k of cells) {
    const row = add($("top"), "tr");
    add(row, "td", D.rows[Math.floor(k / m)][0], "token");
    add(row, "td", D.columns[k % m][0] + (two ? ` (${D.columns[k % m][1]})` : ""), "token");
    add(row, "td", number(map[k]));
  }
  point();
}

let lit = [], here = null;
function point(i, j) {
  here = i === undefined ? null : [i, j];
  for (const e of lit) { e.classList.remove("on"); e.hidden = e.dataset.thin > 0; }
  lit = [];
  cross.hidden = !here;
  if (!here) {
    $("said").textContent = "Rows are outputs, columns are inputs. Point at a cell, or move with the arrow keys.";
    return;
  }
  lit = [left[i], below[j]];
  for (const e of lit) { e.classList.add("on"); e.hidden = false; }
  Object.assign(cross.style, { left: gutter + size * j + "px", top: 18 + size * i + "px", width: size + "px",
    height: size + "px" });
  const { map, mixing, remainder } = current(), row = map.slice(i * m, i * m + m);
  const sum = row.reduce((a, v) => a + v, 0);
  const v = row[j], said = $("said");
  said.textContent = "";
  add(said, "span", D.columns[j][0], "token");
  said.append(` (${input(j)}) → `);
  add(said, "span", D.rows[i][0], "token");
  said.append(` (output ${D.rows[i][2] + 1}): ${number(v)}`);
  if (sum > 0) said.append(`, ${(100 * v / sum).toFixed(1)} % of the row`);
  add(said, "br");
  const share = mixing[i] === null ? "undefined" : `${(100 * mixing[i]).toFixed(1)} %`;
  add(said, "span", `this output: mixing ratio ${share}, remainder ${number(remainder[i])}`, "quiet");
}
canvas.addEventListener("mousemove", e => {
  const r = canvas.getBoundingClientRect();
  point(Math.min(n - 1, Math.max(0, Math.floor((e.clientY - r.top) / size))),
    Math.min(m - 1, Math.max(0, Math.floor((e.clientX - r.left) / size))));
});
canvas.addEventListener("mouseleave", () => point());
canvas.addEventListener("blur", () => point());
canvas.addEventListener("keydown", e => {
  const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[e.key];
  if (!move) return;
  e.preventDefault();
  const [i, j] = here ? [here[0] + move[0], here[1] + move[1]] : [0, 0];
  point(Math.min(n - 1, Math.max(0, i)), Math.min(m - 1, Math.max(0, j)));
});

const line = add($("means"), "tr");
add(line, "th", "layer");
for (const name of names) add(line, "th", name.replace(/(X?ATTN|RES|LN|FF)(?=.)/g, "$1\\n"));
D.layers.forEach((layer, place) => {
  const row = add($("means"), "tr");
  add(row, "th", layer + 1);
  for (const name of names) {
    const list = D.scopes[name].mixing[place];
    const b = add(add(row, "td"), "button", (100 * list.reduce((a, v) => a + v, 0) / list.length).toFixed(1));
    b.dataset.scope = name;
    b.dataset.place = place;
    b.title = `show ${name}, layer ${layer + 1}`;
    b.addEventListener("click", () => { $("scope").value = name; $("layer").value = place; draw(); });
  }
});
for (const id of ["scope", "layer", "own"]) $(id).addEventListener("change", draw);
addEventListener("resize", () => { layout(); point(...here ?? []); });
layout();
draw();
}
</script>
</body>
</html>
"""
