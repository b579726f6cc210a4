/** The visible part of a map: its rows and columns, normalised as chosen. */

import type { Label } from "../data/header";

export type Norm = "raw" | "row" | "column";

/** The rows and columns shown; `own` is the index of each row's own token among the shown columns, or -1. */
export interface Picks {
  rows: Int32Array;
  columns: Int32Array;
  own: Int32Array;
  whole: boolean;
}

export interface Plane {
  rows: number;
  columns: number;
  cells: Float32Array;
  own: Int32Array; // as in Picks
}

/** The rows and columns to show: `special` keeps special tokens, `band` limits columns to those of one side. */
export function picksOf(rows: readonly Label[], columns: readonly Label[], special: boolean, band?: string): Picks {
  const shown = (label: Label) => special || !label.special;
  const keep = (labels: readonly Label[], test: (label: Label) => boolean) => {
    const kept = labels.flatMap((label, k) => (test(label) ? [k] : []));
    return Int32Array.from(kept);
  };
  const inBand = (label: Label) => band === undefined || label.side === band;
  let down = keep(rows, shown);
  let across = keep(columns, (label) => inBand(label) && shown(label));
  if (!down.length) down = keep(rows, () => true); // only special tokens: show them anyway
  if (!across.length) across = keep(columns, inBand);
  const place = new Map<string, number>();
  across.forEach((j, k) => place.set(`${columns[j].side}|${columns[j].position}`, k));
  const own = down.map((i) => place.get(`${rows[i].side}|${rows[i].position}`) ?? -1);
  return { rows: down, columns: across, own, whole: down.length === rows.length && across.length === columns.length };
}

/** The sums of the rows or columns of a map with `width` columns. */
export function sums(values: Float32Array, width: number, norm: "row" | "column"): Float64Array {
  const height = values.length / width;
  const found = new Float64Array(norm === "row" ? height : width);
  for (let i = 0, k = 0; i < height; i++)
    for (let j = 0; j < width; j++, k++) found[norm === "row" ? i : j] += values[k];
  return found;
}

/** The visible part of a map with `width` columns. Shares are of the whole row or column, including hidden tokens. */
export function planeOf(values: Float32Array, width: number, picks: Picks, norm: Norm = "raw"): Plane {
  const { rows, columns, own, whole } = picks;
  const plane = { rows: rows.length, columns: columns.length, own };
  if (norm === "raw" && whole) return { ...plane, cells: values };
  const cells = new Float32Array(rows.length * columns.length);
  const by = norm === "raw" ? null : sums(values, width, norm).map((sum) => (sum > 0 ? 1 / sum : 0));
  let k = 0;
  for (let r = 0; r < rows.length; r++) {
    const start = rows[r] * width;
    if (by && norm === "column") for (let c = 0; c < columns.length; c++) cells[k++] = values[start + columns[c]] * by[columns[c]];
    else {
      const factor = by ? by[rows[r]] : 1;
      for (let c = 0; c < columns.length; c++) cells[k++] = values[start + columns[c]] * factor;
    }
  }
  return { ...plane, cells };
}
