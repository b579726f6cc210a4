/** The scores of an explanation for the chosen tokens of the answer, by group of the input. */

import type { Explanation, Grain, Group } from "../data/explanation";
import type { Figure } from "../data/header";

const figure = (value: Figure | undefined): number => value ?? NaN;
const total = (values: readonly number[]): number => values.reduce((sum, one) => sum + one, 0);

export interface Part {
  group: Group;
  score: number;
}

/** Scores of the input for some tokens of the answer: `scores` and `remainder` add up to `value`. */
export interface ChosenScores {
  scores: number[]; // of each column
  value: number;
  remainder: number;
  completeness: number; // the worst of the chosen tokens
  most: number; // the largest absolute score of a column; the first token, on which models rest much, does not count
}

/** The column of the first token that the model read on the answer's side; it would hide the others on a scale. */
export const firstColumn = (told: Explanation): number => told.columns.findIndex((label) => label.side === told.rows[0].side);

/** `sign` -1 explains the other token of a contrast. */
export function chosenScores(told: Explanation, chosen: readonly number[], sign: 1 | -1 = 1): ChosenScores {
  const first = firstColumn(told);
  const scores = told.columns.map((_, j) => sign * total(chosen.map((i) => figure(told.scores[i]?.[j]))));
  return {
    scores,
    value: sign * total(chosen.map((i) => figure(told.values[i]))),
    remainder: sign * total(chosen.map((i) => figure(told.remainder[i]))),
    completeness: Math.max(0, ...chosen.map((i) => figure(told.completeness[i]))),
    most: Math.max(0, ...scores.filter((_, j) => j !== first).map(Math.abs)),
  };
}

export function groupsOf(told: Explanation, grain: Grain): Group[] {
  return grain === "token" ? told.columns.map((label, j) => ({ name: label.token, places: [j] })) : told.groups[grain];
}

/** The groups with the largest absolute scores, the largest first; groups that the model had not read are left out. */
export function strongestParts(told: Explanation, chosen: ChosenScores, grain: Grain, many: number): Part[] {
  const parts = groupsOf(told, grain).map((group) => ({ group, score: total(group.places.map((j) => chosen.scores[j])) }));
  return parts.filter((part) => part.score !== 0).sort((a, b) => Math.abs(b.score) - Math.abs(a.score)).slice(0, many);
}

/** The row of the answer that a column holds; -1 if it belongs to the prompt. */
export function answerRows(told: Explanation): number[] {
  const at = new Map(told.rows.map((label, i) => [`${label.side}:${label.position}`, i]));
  return told.columns.map((label) => at.get(`${label.side}:${label.position}`) ?? -1);
}
