/** The scores of a target: sums, and the row that it is read from. */

import type { Figure, Flow, Label, Side } from "../data/header";
import { placeOf } from "../data/header";

const sizeOf = (value: Figure | undefined): number => Math.abs(value ?? 0);

export const largestOf = (values: readonly Figure[]): number => values.reduce<number>((most, value) => Math.max(most, sizeOf(value)), 0);

export const sumOf = (values: readonly Figure[]): number => values.reduce<number>((sum, value) => sum + (value ?? NaN), 0);

/** Whether biases, which are attributed to no token, weigh more than the scores of all tokens, for and against. */
export const mostlyRemainder = ({ remainder, scores }: Flow): boolean => sizeOf(remainder) > scores.reduce<number>((sum, score) => sum + sizeOf(score), 0);

/** The score of a token as a place from -1 to 1; null where it has none. */
export function placesOf(flow: Flow): (label: Label) => number | null {
  const top = largestOf(flow.scores);
  const known = new Map(flow.columns.map((label, k) => [`${label.side}:${label.position}`, flow.scores[k]]));
  return (label) => {
    const score = known.get(`${label.side}:${label.position}`);
    return typeof score === "number" ? (top > 0 ? score / top : 0) : null;
  };
}

/** The scores of the tokens of a side before each of its layers and after the last, where they fit these layers. */
export function layersOf(flow: Flow | null | undefined, side: Side): Figure[][] | null {
  const found = flow?.layers[side.side];
  const fits = found && side.layers[0] === 0 && found.length === side.layers.length + 1 && found[0].length === side.rows.length;
  return fits ? found : null;
}

/** The row that a path starts at unless one is chosen: where the target is read, else the last token of a causal model
 *  and the first of others. */
export function rowRead(flow: Flow | null | undefined, side: Side): number {
  const last = layersOf(flow, side)?.at(-1);
  const top = last ? largestOf(last) : 0;
  if (last && top > 0) return last.findIndex((value) => sizeOf(value) === top);
  const here = flow && flow.columns[0]?.side === side.side; // a target is read on the side whose tokens come first
  const read = here && flow.position !== null ? placeOf(side.rows, side.side, flow.position) : -1;
  return read >= 0 ? read : side.causal ? side.rows.length - 1 : 0;
}
