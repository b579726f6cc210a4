/** The current view as SVG: every map with its labels, title and colour scale. */

import type { Label } from "../data/header";
import { cssOfPixel } from "../look/colours";
import { CHARACTER } from "../look/frame";
import { number } from "../look/numbers";
import { pixelOf, type Ink } from "../look/paint";
import { glyphs, shortened, thinned } from "../look/tokens";
import type { Plane } from "../maths/plane";
import { valueAt } from "../maths/scale";

export interface Panel {
  title: string;
  rows: Label[];
  columns: Label[];
  plane: Plane;
  ink: Ink;
  seam: number;
  image?: string; // the map as a PNG data URL, if it has too many cells for rectangles
}

export interface Colours {
  paper: string;
  ink: string;
  quiet: string;
  soft: string;
}

export const MOST = 72; // up to this many rows or columns, cells are drawn as rectangles
const LONGEST = 18;
const FONT = 11;

export const escaped = (text: string): string =>
  text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

const longest = (labels: Label[]): number => labels.reduce((most, label) => Math.max(most, glyphs(shortened(label.token, LONGEST)).length), 1);

const r = (x: number): number => Math.round(x * 100) / 100;

/** The content of an SVG, and its size. */
export interface Drawn {
  svg: string;
  width: number;
  height: number;
}

export interface Picture {
  text: string;
  width: number;
  height: number;
}

function panel(one: Panel, colours: Colours): Drawn {
  const { plane, ink } = one;
  const left = longest(one.rows) * FONT * CHARACTER + 10;
  const top = 30 + longest(one.columns) * FONT * CHARACTER * 0.79 + 8;
  const cell = Math.min(30, Math.max(560 / Math.max(plane.rows, plane.columns), 1));
  const width = cell * plane.columns;
  const height = cell * plane.rows;
  const step = thinned(cell, FONT + 1);
  const parts: string[] = [];
  const text = (x: number, y: number, words: string, more = "") => parts.push(`<text x="${r(x)}" y="${r(y)}"${more}>${escaped(words)}</text>`);
  text(0, 14, one.title, ` font-family="Georgia, serif" font-size="14" fill="${colours.ink}"`);
  parts.push(`<rect x="${r(left)}" y="${r(top)}" width="${r(width)}" height="${r(height)}" fill="${colours.soft}"/>`);
  if (one.image) parts.push(`<image x="${r(left)}" y="${r(top)}" width="${r(width)}" height="${r(height)}" preserveAspectRatio="none" style="image-rendering:pixelated" href="${one.image}"/>`);
  else
    for (let i = 0; i < plane.rows; i++)
      for (let j = 0; j < plane.columns; j++) {
        const pixel = pixelOf(plane.cells[i * plane.columns + j], plane.own[i] === j, ink);
        if (pixel === null) continue;
        const gap = cell >= 9 ? 1 : 0;
        parts.push(`<rect x="${r(left + j * cell)}" y="${r(top + i * cell)}" width="${r(cell - gap)}" height="${r(cell - gap)}" fill="${cssOfPixel(pixel)}"/>`);
      }
  if (one.seam > 0) parts.push(`<rect x="${r(left + one.seam * cell - 1.5)}" y="${r(top)}" width="3" height="${r(height)}" fill="${colours.ink}"/>`);
  const style = ` font-family="monospace" font-size="${FONT}" fill="${colours.quiet}"`;
  one.rows.forEach((label, i) => i % step || text(left - 6, top + (i + 0.5) * cell + 4, shortened(label.token, LONGEST), `${style} text-anchor="end"`));
  one.columns.forEach((label, j) => {
    const x = left + (j + 0.5) * cell + 3;
    if (j % step === 0) text(x, top - 5, shortened(label.token, LONGEST), `${style} transform="rotate(-52 ${r(x)} ${r(top - 5)})"`);
  });
  const { svg, tall } = key(ink, left, top + height + 14, colours);
  parts.push(svg);
  const lean = longest(one.columns) * FONT * CHARACTER * 0.62;
  return { svg: parts.join(""), width: left + width + Math.max(12, lean), height: top + height + 14 + tall };
}

/** The colour scale. */
function key(ink: Ink, x: number, y: number, colours: Colours): { svg: string; tall: number } {
  const table = ink.scale.signed ? ink.palette.diverging : ink.palette.sequential;
  const STEPS = 64;
  const WIDE = 200;
  const bars = Array.from({ length: STEPS }, (_, k) => {
    const colour = cssOfPixel(table[Math.round((k / (STEPS - 1)) * (table.length - 1))]);
    return `<rect x="${r(x + (k * WIDE) / STEPS)}" y="${r(y)}" width="${r(WIDE / STEPS + 0.3)}" height="8" fill="${colour}"/>`;
  });
  const ticks = ink.scale.signed ? [-1, 0, 1] : [0, 0.5, 1];
  const labels = ticks.map((tick) => {
    const at = ink.scale.signed ? (tick + 1) / 2 : tick;
    return `<text x="${r(x + at * WIDE)}" y="${r(y + 21)}" text-anchor="middle" font-family="sans-serif" font-size="10" fill="${colours.quiet}">${escaped(number(valueAt(tick, ink.scale), 2))}</text>`;
  });
  return { svg: bars.join("") + labels.join(""), tall: 28 };
}

export const svgOf = (panels: readonly Panel[], colours: Colours): Picture => sideBySide(panels.map((one) => panel(one, colours)), colours);

export function sideBySide(made: readonly Drawn[], colours: Colours): Picture {
  const PAD = 16;
  let x = PAD;
  const bodies = made.map((one) => {
    const body = `<g transform="translate(${r(x)} ${PAD})">${one.svg}</g>`;
    x += one.width + 2 * PAD;
    return body;
  });
  const width = Math.ceil(x - PAD);
  const height = Math.ceil(Math.max(...made.map((one) => one.height)) + 2 * PAD);
  const text = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"><rect width="100%" height="100%" fill="${colours.paper}"/>${bodies.join("")}</svg>`;
  return { text, width, height };
}
