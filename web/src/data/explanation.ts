/** An explanation of an answer, as the server describes it. */

import type { Figure, Label } from "./header";

/** Tokens whose scores are added up. */
export interface Group {
  name: string;
  places: number[]; // into the columns, or into the answer
}

export type Grain = "token" | "word" | "sentence" | "line";

export interface Explanation {
  columns: Label[]; // everything that the model read
  rows: Label[]; // the tokens of the answer
  targets: string[]; // what is explained of each
  scores: Figure[][]; // answer x columns, signed
  values: Figure[];
  remainder: Figure[];
  completeness: Figure[];
  probabilities: Figure[];
  alternatives: { token: string; probability: number }[][];
  groups: Record<Exclude<Grain, "token">, Group[]>; // of the columns
  answer_words: Group[];
  warnings: string[];
}

export interface ExplanationRequest {
  model: string;
  text: string;
  generate: number | null;
  answer: string | null;
  contrast: { position: number; token: string } | null;
}
