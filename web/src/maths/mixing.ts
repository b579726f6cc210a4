/** Mixing ratios: the share of an output that comes from other tokens. */

import type { Figure } from "../data/header";

/** The mean of `values` (at the indices `at`, if given) without missing values; NaN if there are none. */
export function mean(values: readonly Figure[], at?: ArrayLike<number>): number {
  let sum = 0;
  let count = 0;
  const add = (value: Figure | undefined) => {
    if (typeof value === "number" && Number.isFinite(value)) {
      sum += value;
      count++;
    }
  };
  if (at) for (let k = 0; k < at.length; k++) add(values[at[k]]);
  else values.forEach(add);
  return count ? sum / count : NaN;
}

/** Maps with a completeness error of at least this are not exact; the same limit as in Python. */
export const INEXACT = 1e-4;

/** The largest error; NaN if any value is missing. */
export function worst(values: readonly Figure[]): number {
  let found = 0;
  for (const value of values) {
    if (typeof value !== "number" || !Number.isFinite(value)) return NaN;
    found = Math.max(found, value);
  }
  return found;
}
