/** One output of a vision model on the patch grid. */

import type { Side } from "../data/header";
import { sums, type Norm, type Plane } from "./plane";

/** The columns that are patches, in grid order; null if they do not fill the grid. */
export function patchColumns(side: Side): number[] | null {
  if (!side.grid) return null;
  const size = side.grid[0] * side.grid[1];
  const patches = side.columns.flatMap((label, j) => (label.special ? [] : [j]));
  if (patches.length === size) return patches;
  const rest = side.columns.length - size;
  return rest >= 0 ? Array.from({ length: size }, (_, k) => rest + k) : null;
}

/** The contribution of each patch to output `row`, on the patch grid; the output's own patch is the own cell. */
export function gridPlane(values: Float32Array, side: Side, row: number, norm: Norm): Plane {
  const [down, across] = side.grid ?? [1, side.columns.length];
  const columns = patchColumns(side) ?? side.columns.map((_, j) => j);
  const width = side.columns.length;
  const totals = norm === "raw" ? null : sums(values, width, norm);
  const own = new Int32Array(down).fill(-1);
  const cells = Float32Array.from(columns, (j) => {
    const total = totals ? totals[norm === "row" ? row : j] : 1;
    return total > 0 ? values[row * width + j] / total : 0;
  });
  const label = side.rows[row];
  const mine = columns.findIndex((j) => side.columns[j].position === label.position && side.columns[j].side === label.side);
  if (mine >= 0) own[Math.floor(mine / across)] = mine % across;
  return { rows: down, columns: across, cells, own };
}
