/** Values to pixels. */

import type { Pooled } from "../maths/pool";
import { placeOn, type Diagonal, type Scale } from "../maths/scale";
import type { Palette } from "./colours";

const BEYOND = 1 + 0.5 / 255; // rounding to the table is not beyond the scale

/** The colours of a map. */
export interface Ink {
  palette: Palette;
  scale: Scale;
  diagonal: Diagonal;
}

/** The pixels of a map. Exact zeros (nothing can flow there) and a hidden diagonal are transparent. */
export function paint(map: Pooled, ink: Ink, out = new Uint32Array(map.cells.length)): Uint32Array {
  const { cells, ownAt, ownValues } = map;
  const { scale, palette } = ink;
  const table = scale.signed ? palette.diverging : palette.sequential;
  const last = table.length - 1;
  const half = last / 2;
  if (scale.log || scale.signed) {
    for (let k = 0; k < cells.length; k++) {
      const value = cells[k];
      if (value === 0 || value !== value) out[k] = 0;
      else if (scale.signed) out[k] = table[Math.round(half + half * placeOn(value, scale))];
      else out[k] = value > scale.end * BEYOND ? palette.beyond : table[Math.round(last * placeOn(value, scale))];
    }
  } else {
    const factor = last / scale.end;
    for (let k = 0; k < cells.length; k++) {
      const value = cells[k];
      const at = value * factor + 0.5;
      out[k] = value === 0 || value !== value ? 0 : at < last + 1 ? table[at | 0] : palette.beyond;
    }
  }
  for (let k = 0; k < ownAt.length; k++) {
    if (ink.diagonal === "hide" || ownValues[k] === 0) out[ownAt[k]] = 0;
    else if (scale.signed) out[ownAt[k]] = table[Math.round(half + half * placeOn(ownValues[k], scale, true))];
    else out[ownAt[k]] = palette.own[Math.round(255 * placeOn(ownValues[k], scale, true))];
  }
  return out;
}

/** The colour of a single cell, as in `paint`; null if it is transparent. */
export function pixelOf(value: number, own: boolean, ink: Ink): number | null {
  if (own && ink.diagonal === "hide") return null;
  const apart = own && ink.diagonal === "own";
  if (value === 0 || value !== value) return null;
  const place = placeOn(value, ink.scale, apart);
  const { diverging, sequential } = ink.palette;
  if (ink.scale.signed) return diverging[Math.round(((diverging.length - 1) / 2) * (1 + place))];
  if (!apart && value > ink.scale.end * BEYOND) return ink.palette.beyond;
  return apart ? ink.palette.own[Math.round(255 * place)] : sequential[Math.round((sequential.length - 1) * place)];
}
