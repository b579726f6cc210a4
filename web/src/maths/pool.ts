/** Level of detail: a smaller map in which each block shows its strongest cell. */

import type { Plane } from "./plane";

/** A pooled map and, on request, the blocks that contain own tokens and the strongest of these. */
export interface Pooled {
  rows: number;
  columns: number;
  cells: Float32Array;
  ownAt: Int32Array;
  ownValues: Float32Array;
}

/** `plane` pooled into at most `height` x `width` blocks, keeping signs. `apart`: own tokens are pooled separately. */
export function pool(plane: Plane, height: number, width: number, apart: boolean): Pooled {
  const rows = Math.min(plane.rows, Math.max(1, Math.floor(height)));
  const columns = Math.min(plane.columns, Math.max(1, Math.floor(width)));
  const source = plane.cells;
  if (rows === plane.rows && columns === plane.columns) return unpooled(plane, apart);
  const across = new Int32Array(plane.columns);
  for (let c = 0; c < plane.columns; c++) across[c] = Math.floor((c * columns) / plane.columns);
  const cells = new Float32Array(rows * columns);
  const own = new Map<number, number>();
  for (let r = 0, k = 0; r < plane.rows; r++) {
    const start = Math.floor((r * rows) / plane.rows) * columns;
    const mine = apart ? plane.own[r] : -1;
    for (let c = 0; c < plane.columns; c++, k++) {
      const value = source[k];
      const at = start + across[c];
      if (c === mine) {
        if (!(Math.abs(own.get(at) ?? 0) > Math.abs(value))) own.set(at, value);
      } else {
        const held = cells[at];
        if ((value < 0 ? -value : value) > (held < 0 ? -held : held)) cells[at] = value;
      }
    }
  }
  return { rows, columns, cells, ownAt: Int32Array.from(own.keys()), ownValues: Float32Array.from(own.values()) };
}

/** The map unchanged, own tokens listed separately if `apart` (their cells stay and are painted over). */
function unpooled({ rows, columns, cells, own }: Plane, apart: boolean): Pooled {
  const at: number[] = [];
  if (apart) own.forEach((c, r) => c >= 0 && at.push(r * columns + c));
  const ownAt = Int32Array.from(at);
  return { rows, columns, cells, ownAt, ownValues: Float32Array.from(ownAt, (k) => cells[k]) };
}
