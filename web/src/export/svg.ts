/** The current view as SVG: every map with its labels, title and colour scale. */

import type { Label } from "../data/header";
import { cssOfPixel } from "../look/colours";
import { CHARACTER } from "../look/frame";
import { tickText } from "../look/numbers";
import { pixelOf, type Ink } from "../look/paint";
import { discRadius, isDeep, LEGIBLE, minusAt } from "../look/shapes";
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
  legend: string; // what the colours mean
  share: boolean; // values are shares, written as percentages
  own: boolean; // own tokens are on a scale of their own
  image?: string; // the map as a PNG data URL, if it has too many cells for rectangles
}

export interface Colours {
  paper: string;
  ink: string;
  quiet: string;
  soft: string;
}

export const MOST = 62; // up to this number of rows or columns, cells are drawn as rectangles of at least LEGIBLE pixels
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
  const left = longest(one.rows) * FONT * CHARACTER + 24; // with the name of the axis
  const top = 30 + longest(one.columns) * FONT * CHARACTER * 0.79 + 8;
  const cell = Math.min(30, Math.max(560 / Math.max(plane.rows, plane.columns), 1));
  const width = cell * plane.columns;
  const height = cell * plane.rows;
  const step = thinned(cell, FONT + 1);
  const discs = one.own && cell >= LEGIBLE;
  const parts: string[] = [];
  const text = (x: number, y: number, words: string, more = "") => parts.push(`<text x="${r(x)}" y="${r(y)}"${more}>${escaped(words)}</text>`);
  text(0, 14, one.title, ` font-family="Georgia, serif" font-size="14" fill="${colours.ink}"`);
  parts.push(`<rect x="${r(left)}" y="${r(top)}" width="${r(width)}" height="${r(height)}" fill="${colours.soft}"/>`);
  if (one.image) parts.push(`<image x="${r(left)}" y="${r(top)}" width="${r(width)}" height="${r(height)}" preserveAspectRatio="none" style="image-rendering:pixelated" href="${one.image}"/>`);
  else
    for (let i = 0; i < plane.rows; i++)
      for (let j = 0; j < plane.columns; j++) {
        const value = plane.cells[i * plane.columns + j];
        const own = plane.own[i] === j;
        const spot = { x: left + j * cell, y: top + i * cell, side: cell - (cell >= LEGIBLE ? 1 : 0) };
        if (own && discs) parts.push(disc(value, ink, spot, colours));
        else {
          const pixel = pixelOf(value, own, ink);
          if (pixel === null) continue;
          parts.push(`<rect x="${r(spot.x)}" y="${r(spot.y)}" width="${r(spot.side)}" height="${r(spot.side)}" fill="${cssOfPixel(pixel)}"/>`);
          const place = cell >= LEGIBLE ? minusAt(value, ink.scale) : null;
          if (place !== null) parts.push(minus(spot, isDeep(place) ? colours.paper : colours.quiet));
        }
      }
  if (one.seam > 0) parts.push(`<rect x="${r(left + one.seam * cell - 1.5)}" y="${r(top)}" width="3" height="${r(height)}" fill="${colours.ink}"/>`);
  const style = ` font-family="monospace" font-size="${FONT}" fill="${colours.quiet}"`;
  one.rows.forEach((label, i) => i % step || text(left - 6, top + (i + 0.5) * cell + 4, shortened(label.token, LONGEST), `${style} text-anchor="end"`));
  one.columns.forEach((label, j) => {
    const x = left + (j + 0.5) * cell + 3;
    if (j % step === 0) text(x, top - 5, shortened(label.token, LONGEST), `${style} transform="rotate(-52 ${r(x)} ${r(top - 5)})"`);
  });
  text(left - 6, top - 5, "inputs j \u2192", `${SERIF} font-size="11" fill="${colours.quiet}" text-anchor="end"`);
  text(0, top + 11, "outputs i", `${SERIF} font-size="11" fill="${colours.quiet}" transform="rotate(-90 0 ${r(top + 11)}) translate(-50 9)"`);
  const { svg, tall, wide } = key(one, left, top + height + 14, discs, colours);
  parts.push(svg);
  const lean = longest(one.columns) * FONT * CHARACTER * 0.62;
  return { svg: parts.join(""), width: Math.max(left + width + Math.max(12, lean), left + wide), height: top + height + 14 + tall };
}

const SERIF = ' font-family="Georgia, serif" font-style="italic"';

interface Spot {
  x: number;
  y: number;
  side: number;
}

/** An own token on its own scale. */
function disc(value: number, ink: Ink, { x, y, side }: Spot, colours: Colours): string {
  if (value === 0 || Number.isNaN(value)) return "";
  const { diverging } = ink.palette;
  const fill = ink.scale.signed ? cssOfPixel(diverging[value < 0 ? 64 : diverging.length - 65]) : colours.quiet;
  const shape = `<circle cx="${r(x + side / 2)}" cy="${r(y + side / 2)}" r="${r(Math.max(1, discRadius(value, ink.scale) * side))}" fill="${fill}"/>`;
  return ink.scale.signed && value < 0 ? shape + minus({ x, y, side }, colours.paper) : shape;
}

const minus = ({ x, y, side }: Spot, fill: string): string => `<rect x="${r(x + 0.35 * side)}" y="${r(y + side / 2 - 0.5)}" width="${r(0.3 * side)}" height="1" fill="${fill}"/>`;

/** A text as lines of at most `width` characters. */
function linesOf(text: string, width: number): string[] {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines[lines.length - 1] && lines[lines.length - 1].length + word.length >= width) lines.push("");
    lines[lines.length - 1] += (lines[lines.length - 1] ? " " : "") + word;
  }
  return lines;
}

/** The colour scale, that of own tokens if they have one, and what the colours mean. */
function key({ ink, own, legend, share }: Panel, x: number, y: number, discs: boolean, colours: Colours): { svg: string; tall: number; wide: number } {
  const STEPS = 64;
  const WIDE = 200;
  const { scale, palette } = ink;
  const parts: string[] = [];
  const label = (at: number, words: string) => parts.push(`<text x="${r(at)}" y="${r(y + 25)}" text-anchor="middle" font-family="sans-serif" font-size="10" fill="${colours.quiet}">${escaped(words)}</text>`);
  const strip = (from: number, wide: number, table: Uint32Array) => {
    for (let k = 0; k < STEPS; k++) parts.push(`<rect x="${r(from + (k * wide) / STEPS)}" y="${r(y + 4)}" width="${r(wide / STEPS + 0.3)}" height="8" fill="${cssOfPixel(table[Math.round((k / (STEPS - 1)) * (table.length - 1))])}"/>`);
  };
  strip(x, WIDE, scale.signed ? palette.diverging : palette.sequential);
  for (const tick of scale.signed ? [-1, 0, 1] : [0, 0.5, 1]) label(x + (scale.signed ? (tick + 1) / 2 : tick) * WIDE, tickText(valueAt(tick, scale), share));
  let right = x + WIDE;
  if (!scale.signed && scale.top > scale.end * 1.005) {
    parts.push(`<rect x="${r(right + 4)}" y="${r(y + 4)}" width="8" height="8" fill="${cssOfPixel(palette.beyond)}"/>`);
    right += 12;
  }
  if (own && discs)
    for (const place of [0.1, 0.4, 1]) {
      const value = valueAt(place, scale, true);
      right += 36;
      parts.push(`<circle cx="${r(right)}" cy="${r(y + 4)}" r="${r(discRadius(value, scale) * 24)}" fill="${colours.quiet}"/>`);
      label(right, `${scale.signed ? "\u00b1" : ""}${tickText(value, share)}`);
    }
  else if (own && !scale.signed) {
    strip(right + 30, 64, palette.own);
    label(right + 30, tickText(valueAt(0, scale, true), share));
    label(right + 94, tickText(scale.ownEnd, share));
    right += 94;
  }
  const lines = linesOf(legend, 62);
  lines.forEach((line, k) => parts.push(`<text x="${r(x)}" y="${r(y + 42 + 13 * k)}" font-family="sans-serif" font-size="10" fill="${colours.quiet}">${escaped(line)}</text>`));
  return { svg: parts.join(""), tall: 42 + 13 * lines.length, wide: Math.max(right + 24 - x, 62 * 5.4) };
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
