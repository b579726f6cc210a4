/** FF-amp: the change of each cell's share from one scope to another. */

import { sums } from "./plane";

export type Per = "output" | "input";

/** shares(after) - shares(before), where the cells of each output (or of each input) are scaled to sum to 1. */
export function difference(before: Float32Array, after: Float32Array, width: number, per: Per): Float32Array {
  const norm = per === "output" ? "row" : "column";
  const inverse = (values: Float32Array) => sums(values, width, norm).map((sum) => (sum > 0 ? 1 / sum : 0));
  const a = inverse(before);
  const b = inverse(after);
  const cells = new Float32Array(before.length);
  for (let k = 0, i = 0; k < cells.length; i++)
    for (let j = 0; j < width; j++, k++) {
      const at = norm === "row" ? i : j;
      cells[k] = after[k] * b[at] - before[k] * a[at];
    }
  return cells;
}
