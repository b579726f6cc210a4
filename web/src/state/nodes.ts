/** The colour of a node: the signed score of its hidden state if there is a target, else its share of the output. */

import type { Figure } from "../data/header";
import type { Palette } from "../look/colours";
import { largestOf } from "../maths/scores";
import type { Shown } from "./path";

export function nodeColour(shown: Shown, scores: Figure[][] | null, palette: Palette): (column: number, row: number) => number {
  if (!scores) {
    const last = palette.sequential.length - 1;
    return (column, row) => palette.sequential[Math.round(last * (0.25 + 0.75 * Math.sqrt(Math.min(1, shown.path.nodes[column][row]))))];
  }
  const top = largestOf(scores.flat()) || 1;
  const half = (palette.diverging.length - 1) / 2;
  // The square root keeps small scores visible: after the last layer a single token holds the whole score.
  const place = (score: number) => Math.sign(score) * Math.sqrt(Math.abs(score) / top);
  return (column, row) => palette.diverging[Math.round(half * (1 + place(scores[column][row] ?? 0)))];
}
