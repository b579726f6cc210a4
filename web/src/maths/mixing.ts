/** Mixing ratios: the share of the other tokens in an output. */

import type { Figure } from "../data/header";

/** The mean of the numbers among `values`, at the places `at` where given; NaN of none. */
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

/** The completeness error from which on maps are not exact, as in Python. */
export const INEXACT = 1e-4;

/** The largest of the numbers; what is no number counts as worse than any. */
export function worst(values: readonly Figure[]): number {
  let found = 0;
  for (const value of values) {
    if (typeof value !== "number" || !Number.isFinite(value)) return NaN;
    found = Math.max(found, value);
  }
  return found;
}
