/** Values to places on a colour scale; maps to be compared share one scale. */

import type { Plane } from "./plane";

export type Diagonal = "show" | "hide" | "own";

/** The largest absolute values off and on the diagonal, and the smallest non-zero value off the diagonal. */
export interface Extent {
  others: number;
  own: number;
  least: number;
}

export interface Scale {
  end: number; // the value at the end of the scale
  top: number; // the largest value; it may exceed `end`
  ownEnd: number; // the same for own tokens
  least: number; // where a logarithmic scale starts
  log: boolean;
  signed: boolean; // centred on zero
}

const DECADES = 1e-4; // a logarithmic scale starts at this fraction of its end or above
const SLACK = 1.5; // how far the end may exceed the median of the maxima

export function extentOf(plane: Plane): Extent {
  const { cells, columns, own } = plane;
  let others = 0;
  let ownTop = 0;
  let least = Infinity;
  for (let r = 0, k = 0; r < plane.rows; r++) {
    const mine = own[r];
    for (let c = 0; c < columns; c++, k++) {
      const size = Math.abs(cells[k]);
      if (c === mine) {
        if (size > ownTop && size < Infinity) ownTop = size;
        continue;
      }
      if (size > others && size < Infinity) others = size;
      if (size < least && size > 0) least = size;
    }
  }
  return { others, own: ownTop, least };
}

/** The end of a scale shared by maps with these maxima. A single outlier does not set it: values beyond the end get a
 *  colour of their own. */
export function sharedEnd(maxima: readonly number[]): number {
  const sizes = maxima.filter((size) => size > 0).sort((a, b) => a - b);
  if (!sizes.length) return 0;
  const middle = (sizes.length - 1) / 2;
  const median = (sizes[Math.floor(middle)] + sizes[Math.ceil(middle)]) / 2;
  return Math.min(sizes[sizes.length - 1], SLACK * median);
}

/** The scale of maps with these extents. The diagonal counts only if it is shown. */
export function scaleOf(extents: readonly Extent[], diagonal: Diagonal, log: boolean, signed = false): Scale {
  const shown = diagonal === "show";
  const sizes = extents.map((one) => (shown ? Math.max(one.others, one.own) : one.others));
  const own = sharedEnd(extents.map((one) => one.own));
  const end = sharedEnd(sizes) || own || 1;
  const smallest = extents.reduce((least, one) => Math.min(least, one.least), Infinity);
  const least = Math.min(Math.max(smallest, end * (signed ? 1e-2 : DECADES)), end / 2);
  return { end, top: Math.max(end, ...sizes), ownEnd: shown ? end : own || 1, least, log, signed };
}

/** The place of a value: 0 to 1, or -1 to 1 on a signed scale. */
export function placeOn(value: number, scale: Scale, own = false): number {
  const end = own ? scale.ownEnd : scale.end;
  const size = Math.abs(value);
  let place: number;
  if (!scale.log) place = size / end;
  else if (scale.signed) place = Math.log1p(size / scale.least) / Math.log1p(end / scale.least);
  else {
    const least = Math.min(scale.least, end / 2);
    place = size > 0 ? Math.log(size / least) / Math.log(end / least) : 0;
  }
  place = Math.min(1, Math.max(0, place));
  return scale.signed && value < 0 ? -place : place;
}

/** The value at a place of the scale, for its tick labels. */
export function valueAt(place: number, scale: Scale, own = false): number {
  const end = own ? scale.ownEnd : scale.end;
  const size = Math.abs(place);
  let value: number;
  if (!scale.log) value = size * end;
  else if (scale.signed) value = Math.expm1(size * Math.log1p(end / scale.least)) * scale.least;
  else {
    const least = Math.min(scale.least, end / 2);
    value = least * Math.exp(size * Math.log(end / least));
  }
  return place < 0 ? -value : value;
}
