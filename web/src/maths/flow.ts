/** Where a token comes from and where it goes: its row and its column in a map. */

import { largest } from "./strongest";

export interface Flow {
  place: number; // column (sources) or row (targets) of the map
  value: number;
  share: number; // of the row's sum
}

type Keep = (place: number) => boolean;

export function rowSum(values: Float32Array, width: number, row: number): number {
  let sum = 0;
  for (let j = 0; j < width; j++) sum += values[row * width + j];
  return sum;
}

/** A cell divided by the sum of its row. */
export function shareOfRow(values: Float32Array, width: number, row: number, column: number): number {
  const sum = rowSum(values, width, row);
  return sum > 0 ? values[row * width + column] / sum : 0;
}

/** The inputs with the largest absolute contributions to output `row`, among those kept. */
export function sources(values: Float32Array, width: number, row: number, count: number, keep: Keep): Flow[] {
  const at = (j: number) => values[row * width + j];
  const sum = rowSum(values, width, row);
  const found = largest(width, (j) => (keep(j) ? Math.abs(at(j)) : 0), count);
  return found.map((place) => ({ place, value: at(place), share: sum > 0 ? at(place) / sum : 0 }));
}

/** The outputs to which input `column` contributes most, among those kept; `share` is its share of each output. */
export function targets(values: Float32Array, width: number, column: number, count: number, keep: Keep): Flow[] {
  const at = (i: number) => values[i * width + column];
  const found = largest(values.length / width, (i) => (keep(i) ? Math.abs(at(i)) : 0), count);
  return found.map((place) => ({ place, value: at(place), share: shareOfRow(values, width, place, column) }));
}
