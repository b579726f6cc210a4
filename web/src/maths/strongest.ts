/** The strongest cells of a map, rows or columns. */

import type { Plane } from "./plane";

export interface Cell {
  row: number; // index among the shown rows
  column: number;
  value: number;
}

/** The `count` largest of a stream of numbers, in order. */
class Best {
  readonly places: number[] = [];
  private readonly held: number[] = [];
  least = 0;

  constructor(private readonly count: number) {}

  add(value: number, place: number): void {
    if (value === Infinity) return;
    const { held, places, count } = this;
    let at = held.length;
    while (at > 0 && held[at - 1] < value) at--;
    held.splice(at, 0, value);
    places.splice(at, 0, place);
    if (held.length > count) {
      held.pop();
      places.pop();
    }
    if (held.length === count) this.least = held[count - 1];
  }
}

/** Indices of the `count` largest values, largest first. Only positive values count. */
export function largest(length: number, value: (k: number) => number, count: number): number[] {
  const best = new Best(count);
  for (let k = 0; k < length; k++) {
    const now = value(k);
    if (now > best.least) best.add(now, k);
  }
  return best.places;
}

/** The largest positive cells (sign 1) or the most negative cells (sign -1); own tokens only if `own`. */
export function strongest(plane: Plane, count: number, sign: 1 | -1 = 1, own = false): Cell[] {
  const { cells, columns, rows } = plane;
  const best = new Best(count);
  for (let r = 0, k = 0; r < rows; r++) {
    const mine = own ? -1 : plane.own[r];
    for (let c = 0; c < columns; c++, k++) if (sign * cells[k] > best.least && c !== mine) best.add(sign * cells[k], k);
  }
  return best.places.map((k) => ({
    row: Math.floor(k / columns),
    column: k % columns,
    value: cells[k],
  }));
}
