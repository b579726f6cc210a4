/** The header of a document: which maps it has, and of which tokens. */

export const FORMAT = "normscope-view-1";

export interface Label {
  token: string;
  side: string;
  position: number;
  special: boolean;
  word?: number | null;
}

export type ComponentKind = "attention" | "cross-attention" | "ff" | "norm" | "residual" | "scale";

/** One component of a layer, and the scopes measured after it. */
export interface Component {
  kind: ComponentKind;
  label: string;
  branch: number;
  block: number;
  norms: string | null;
  weights: string | null;
}

/** A number as written by Python: non-finite values are null. */
export type Figure = number | null;

export interface Side {
  side: string;
  causal: boolean;
  rows: Label[];
  columns: Label[];
  layers: number[];
  model_layers: number;
  components: Component[];
  scopes: string[];
  aliases: Record<string, string>;
  completeness: Record<string, Figure[]>;
  mixing: Partial<Record<string, Figure[][]>>; // none for cross-attention alone, which reads only encoder tokens
  remainder: Record<string, Figure[][]>;
  heads: number[];
  head_scopes?: string[];
  grid: [number, number] | null;
  ranges?: Record<string, [number, number]>;
}

export interface Model {
  name: string;
  family: string;
  dtype: string;
  gate: string;
  value_bias: string;
  complete: boolean;
  versions: Record<string, string>;
}

/** Scores of a target (a logit, or the difference of two logits) for the input tokens, and for the tokens of the hidden
 *  states before each layer and after the last. If the method is a decomposition, scores + remainder = value. */
export interface Flow {
  method: string;
  target: string; // in words
  position: number | null; // of the token at which it is read
  value: Figure;
  remainder: Figure;
  completeness: Figure;
  columns: Label[];
  scores: Figure[];
  layers: Record<string, Figure[][]>; // side -> (layers + 1) x tokens of that side
  remainders: Record<string, Figure[]>;
}

export interface Header {
  format: string;
  model: Model;
  encoding: "float32" | "log16";
  precision: number;
  sides: Side[];
  image: string | null;
  warnings?: string[]; // caveats shown above the maps
  flow?: Flow | null;
}

/** The header; throws an error if it is invalid. */
export function checked(value: unknown): Header {
  const header = value as Header | null;
  if (!header || typeof header !== "object" || header.format !== FORMAT)
    throw new Error(`Not a ${FORMAT} document.`);
  if (!Array.isArray(header.sides) || !header.sides.length) throw new Error("This document contains no maps.");
  for (const side of header.sides)
    if (!side.scopes.length || !side.layers.length || !side.rows.length || !side.columns.length)
      throw new Error(`The ${side.side} of this document has no maps.`);
  return header;
}

/** The scopes that have head-level maps, in the order of the arrays: for each attention its weights, then its norms. */
export function headScopes(side: Side): string[] {
  if (!side.heads.length) return [];
  if (side.head_scopes) return side.head_scopes;
  return side.components
    .filter((one) => one.kind === "attention" || one.kind === "cross-attention")
    .flatMap((one) => [one.weights, one.norms])
    .filter((name): name is string => name !== null);
}

/** Index of the label with this side and position; -1 if there is none. */
export const placeOf = (labels: readonly Label[], side: string, position: number): number =>
  labels.findIndex((one) => one.position === position && one.side === side);
