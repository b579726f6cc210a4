import { describe, expect, it } from "vitest";
import { isStep } from "../src/serve";
import { fromFragment, toFragment } from "../src/state/address";
import { Kept } from "../src/state/kept";
import { atScope, bandsOf, before, columnsOf, counterpart, following, nextDiagonal, nextNorm, opened, scopesOf, settled, sideOf, START, stepLayer, stepScope, toggleDifference, tokenPlaces, type View } from "../src/state/view";
import { header, label, POST_LN, side } from "./fake";

const doc = header();
const first = settled(START, doc);

describe("views", () => {
  it("begin with the attention's norms in the first layer", () => {
    expect([first.band, first.layer, first.scope]).toEqual(["encoder", 0, "ATTN-N"]);
  });
  it("replace what a document does not have", () => {
    const wild: View = { ...START, band: "nowhere", layer: 77, scope: "NO-N", against: "NO-N", head: 3, token: "encoder:99", cell: [99, 0] };
    expect(settled(wild, doc)).toEqual(first);
  });
  it("accept aliases of scopes", () => {
    expect(settled({ ...START, scope: "attention-block" }, doc).scope).toBe("ATTNRESLN-N");
  });
  it("step through scopes and layers, stopping at the ends", () => {
    expect(stepScope(first, doc, 1).scope).toBe("ATTNRES-W");
    expect(stepScope(first, doc, -1).scope).toBe("ATTN-W");
    expect(stepScope({ ...first, scope: "ATTN-W" }, doc, -1).scope).toBe("ATTN-W");
    expect(stepLayer(first, doc, 1).layer).toBe(1);
    expect(stepLayer(first, doc, -1).layer).toBe(0);
  });
  it("play scope by scope, then layer by layer, to the end", () => {
    let view: View | null = opened(first, doc);
    const seen: string[] = [];
    while (view) {
      seen.push(`${view.layer} ${view.scope}`);
      view = following(view, doc);
    }
    expect(seen).toEqual([0, 1, 2].flatMap((layer) => POST_LN.map((scope) => `${layer} ${scope}`)));
  });
  it("play differences too", () => {
    let view: View | null = toggleDifference(first, doc);
    let count = 0;
    while (view && count < 100) {
      expect(view.against).not.toBe(view.scope);
      view = following(view, doc);
      count++;
    }
    expect(view).toBeNull();
  });
  it("cycle through the options", () => {
    expect([nextNorm(first).norm, nextNorm(nextNorm(first)).norm, nextNorm(nextNorm(nextNorm(first))).norm]).toEqual(["raw", "column", "row"]);
    expect(nextDiagonal(first).diagonal).toBe("show");
  });
});

describe("the path", () => {
  const path = { ...first, path: true };
  it("is left when a map is selected", () => {
    for (const next of [stepScope(path, doc, 1), stepLayer(path, doc, 1), toggleDifference(path, doc), opened(path, doc), following(path, doc)]) expect(next?.path).toBe(false);
    expect(toggleDifference({ ...path, against: "ATTN-W" }, doc)).toMatchObject({ path: false, against: "ATTN-W" });
  });
  it("is not available if the document has none", () => {
    expect(settled(path, doc).path).toBe(true);
    expect(settled(path, header(side(["a", "b"], { layers: [0, 2] }))).path).toBe(false);
  });
});

describe("difference mode", () => {
  it("starts from the previous scope of the same kind", () => {
    expect(before(POST_LN, "ATTNRESLN-N")).toBe("ATTNRES-N");
    expect(before(POST_LN, "ATTNRES-W")).toBe("ATTN-W");
    expect(before(POST_LN, "ATTN-N")).toBeNull();
    const view = toggleDifference({ ...first, scope: "ATTNRESLNFF-N" }, doc);
    expect([view.against, view.scope]).toEqual(["ATTNRESLN-N", "ATTNRESLNFF-N"]);
    expect(toggleDifference(view, doc).against).toBeNull();
  });
  it("goes from the first scope to the next", () => {
    const view = toggleDifference(first, doc);
    expect([view.against, view.scope]).toEqual(["ATTN-N", "ATTNRES-N"]);
  });
  it("follows a step unless both scopes were selected", () => {
    const view = toggleDifference({ ...first, scope: "ATTNRESLN-N" }, doc);
    expect(atScope(view, doc, "ATTNRESLNFF-N").against).toBe("ATTNRESLN-N");
    expect(atScope({ ...view, against: "ATTN-N" }, doc, "ATTNRESLNFF-N").against).toBe("ATTN-N");
  });
});

describe("encoder and decoder", () => {
  const source = ["le", "feuilleton", "</s>"].map((token, k) => label(token, k));
  const own = ["<s>", "the", "soap"].map((token, k) => label(token, k, "decoder"));
  const scopes = ["ATTN-W", "ATTN-N", "ATTNRES-N", "XATTN-W", "XATTN-N", "ATTNRESXATTNRES-N"];
  const components = [
    { kind: "attention" as const, label: "ATTN", block: 0, branch: 0, norms: "ATTN-N", weights: "ATTN-W" },
    { kind: "residual" as const, label: "+RES", block: 0, branch: 0, norms: "ATTNRES-N", weights: null },
    { kind: "cross-attention" as const, label: "XATTN", block: 1, branch: 0, norms: "XATTN-N", weights: "XATTN-W" },
    { kind: "residual" as const, label: "+RES", block: 1, branch: 0, norms: "ATTNRESXATTNRES-N", weights: null },
  ];
  const both = header({ ...side([], { scopes }), side: "decoder", rows: own, columns: [...own, ...source], components }, { ...side(["a"]), rows: source, columns: source });
  it("have three bands, and show the decoder first", () => {
    expect(bandsOf(both)).toEqual(["encoder", "decoder", "cross"]);
    expect(settled(START, both).band).toBe("decoder");
    expect(bandsOf(doc)).toEqual(["encoder"]);
  });
  it("have a band cross: encoder tokens in the decoder's maps, from cross-attention on", () => {
    expect(sideOf(both, "cross").side).toBe("decoder");
    expect(columnsOf(both, "cross")).toBe("encoder");
    expect(columnsOf(both, "decoder")).toBeUndefined();
    expect(scopesOf(both, "cross")).toEqual(["XATTN-W", "XATTN-N", "ATTNRESXATTNRES-N"]);
    expect(settled({ ...START, band: "cross" }, both).scope).toBe("XATTN-N");
  });
  it("find a token on its own side", () => {
    expect(tokenPlaces(both.sides[0], "encoder:1")).toEqual({ row: -1, column: 4 });
    expect(tokenPlaces(both.sides[0], "decoder:1")).toEqual({ row: 1, column: 1 });
    expect(tokenPlaces(both.sides[0], null)).toEqual({ row: -1, column: -1 });
  });
});

describe("two models", () => {
  it("are compared at corresponding scopes", () => {
    const other = side(["a"], { scopes: ["ATTN-W", "LNATTN-N", "LNATTNRES-N"], aliases: { attention: "LNATTN-N", "attention-block": "LNATTNRES-N" } });
    expect(counterpart("ATTN-W", doc.sides[0], other)).toBe("ATTN-W");
    expect(counterpart("ATTN-N", doc.sides[0], other)).toBe("LNATTN-N");
    expect(counterpart("ATTNRESLN-N", doc.sides[0], other)).toBe("LNATTNRES-N");
    expect(other.scopes).toContain(counterpart("ATTNRESLNFF-N", doc.sides[0], other));
  });
});

describe("the URL fragment", () => {
  const full: View = {
    band: "encoder", layer: 2, scope: "ATTNRESLNFF-N", against: "ATTNRESLN-N", per: "input", heads: true, head: 4, norm: "column", log: true, diagonal: "hide",
    special: false, reach: "all", token: "encoder:2", cell: [1, 2], beside: { layer: 1, scope: "ATTN-N", linked: false }, matrix: true, path: true, least: 0.015,
  };
  it("contains the view", () => {
    expect(fromFragment(toFragment(full)).view).toEqual(full);
    expect(fromFragment(`#${toFragment(START)}`).view).toEqual(START);
  });
  it("counts from 1 and is readable", () => {
    expect(toFragment(first)).toBe("side=encoder&layer=1&scope=ATTN-N");
    expect(toFragment({ ...first, layer: 2, token: "encoder:0" })).toContain("layer=3&scope=ATTN-N&token=encoder%3A1");
  });
  it("contains the request to the server, with any text", () => {
    const request = { model: "a/b", text: "100 % & <b>#x</b> שלום\n", second: "two", target: null, generate: 12 };
    const { asked } = fromFragment(toFragment({ ...first, beside: { layer: 0, scope: "", linked: true } }, { request, other: { model: "c", text: "d" } }));
    expect(asked.request).toEqual({ model: "a/b", text: request.text, second: "two", generate: 12 });
    expect(asked.other).toEqual({ model: "c", text: "d" });
  });
  it("contains the target", () => {
    const aims = [
      { target: "top", against: null, position: null, method: "exact" },
      { target: "</script>&", against: " sad", position: 6, method: "decompx:norm" },
    ];
    for (const flow of aims) expect(fromFragment(toFragment(first, { request: { flow }, other: null })).asked.request).toEqual({ flow });
    expect(fromFragment("instead=x&at=3").asked.request).toEqual({});
  });
  it("contains the path and its threshold, rounded to a step", () => {
    expect(fromFragment("path=1&edges=1.4").view).toMatchObject({ path: true, least: 0.015 });
    for (const wild of ["0", "-1", "x", "1e9", "100.00000001"]) expect(fromFragment(`edges=${wild}`).view.least).toBeNull();
  });
  it("ignores what it does not understand", () => {
    const { view } = fromFragment("layer=-4&scope=%E0%A4&head=x&norm=huge&cell=0,0&token=encoder:0&beside=,&nonsense");
    expect([view.layer, view.head, view.norm, view.cell, view.token, view.beside]).toEqual([0, null, "row", null, null, null]);
    expect(() => fromFragment("%%%=&&&")).not.toThrow();
  });
});

describe("the cache", () => {
  it("computes results once and evicts the oldest", () => {
    const kept = new Kept<number>(2);
    let made = 0;
    const get = (key: string) => kept.get(key, () => ++made);
    expect([get("a"), get("b"), get("a"), get("c"), get("a"), get("b")]).toEqual([1, 2, 1, 3, 1, 4]);
  });
});

describe("the history", () => {
  const address = (part: Partial<View>, text = "a") => toFragment({ ...START, scope: "ATTN-N", ...part }, { request: { model: "toy", text }, other: null });
  it("has an entry for every other map or input", () => {
    expect(isStep(address({}), address({ layer: 1 }))).toBe(true);
    expect(isStep(address({}), address({ path: true }))).toBe(true);
    expect(isStep(address({}), address({}, "b"))).toBe(true);
  });
  it("has none for colours and selections, nor for the first view of a page", () => {
    expect(isStep(address({}), address({ log: true, token: "encoder:1" }))).toBe(false);
    expect(isStep("", address({}))).toBe(false);
  });
});
