/** The scores of a target: sums, and the row at which it is read. */

import type { Figure, Flow, Label, Side } from "../data/header";
import { placeOf } from "../data/header";

const sizeOf = (value: Figure | undefined): number => Math.abs(value ?? 0);

export const largestOf = (values: readonly Figure[]): number => values.reduce<number>((most, value) => Math.max(most, sizeOf(value)), 0);

export const sumOf = (values: readonly Figure[]): number => values.reduce<number>((sum, value) => sum + (value ?? NaN), 0);

/** Whether the remainder (biases, attributed to no token) exceeds the sum of the absolute scores. */
export const mostlyRemainder = ({ remainder, scores }: Flow): boolean => sizeOf(remainder) > scores.reduce<number>((sum, score) => sum + sizeOf(score), 0);

/** The score of a token scaled to -1 to 1; null if it has none. `counts`: the tokens that the scale is made for; the
 *  others stay within it. */
export function placesOf(flow: Flow, counts: (label: Label) => boolean = () => true): (label: Label) => number | null {
  const top = largestOf(flow.scores.filter((_, k) => counts(flow.columns[k]))) || largestOf(flow.scores);
  const known = new Map(flow.columns.map((label, k) => [`${label.side}:${label.position}`, flow.scores[k]]));
  return (label) => {
    const score = known.get(`${label.side}:${label.position}`);
    return typeof score === "number" ? (top > 0 ? Math.max(-1, Math.min(1, score / top)) : 0) : null;
  };
}

/** The scores of a side's tokens before each layer and after the last; null if they do not match its layers. */
export function layersOf(flow: Flow | null | undefined, side: Side): Figure[][] | null {
  const found = flow?.layers[side.side];
  const fits = found && side.layers[0] === 0 && found.length === side.layers.length + 1 && found[0].length === side.rows.length;
  return fits ? found : null;
}

/** The row at which a path starts by default: where the target is read, else the last token of a causal model and the
 *  first token of other models. */
export function rowRead(flow: Flow | null | undefined, side: Side): number {
  const last = layersOf(flow, side)?.at(-1);
  const top = last ? largestOf(last) : 0;
  if (last && top > 0) return last.findIndex((value) => sizeOf(value) === top);
  const here = flow && flow.columns[0]?.side === side.side; // the target is read on the side of the first column
  const read = here && flow.position !== null ? placeOf(side.rows, side.side, flow.position) : -1;
  return read >= 0 ? read : side.causal ? side.rows.length - 1 : 0;
}
