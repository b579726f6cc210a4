/** The description of a document: what maps there are, and of which tokens. */

export const FORMAT = "normscope-view-1";

export interface Label {
  token: string;
  side: string;
  position: number;
  special: boolean;
  word?: number | null;
}

export type ComponentKind = "attention" | "cross-attention" | "ff" | "norm" | "residual" | "scale";

/** One component of a layer, with the scopes that are read after it. */
export interface Component {
  kind: ComponentKind;
  label: string;
  branch: number;
  block: number;
  norms: string | null;
  weights: string | null;
}

/** A number as Python wrote it: what is not finite is null. */
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
  mixing: Partial<Record<string, Figure[][]>>; // cross-attention alone has none: it reads the encoder's tokens only
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

/** A target (a logit, or the difference of two) by input token, and by token of the states before each layer and after
 *  the last. The scores and the remainder add up to the value, where a method decomposes it. */
export interface Flow {
  method: string;
  target: string; // in words
  position: number | null; // of the token that it is read at
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
  warnings?: string[]; // what to know before believing the maps
  flow?: Flow | null;
}

/** The header, or an error that says what is wrong with it. */
export function checked(value: unknown): Header {
  const header = value as Header | null;
  if (!header || typeof header !== "object" || header.format !== FORMAT)
    throw new Error(`This is no document of the format ${FORMAT}.`);
  if (!Array.isArray(header.sides) || !header.sides.length) throw new Error("This document holds no maps.");
  for (const side of header.sides)
    if (!side.scopes.length || !side.layers.length || !side.rows.length || !side.columns.length)
      throw new Error(`The ${side.side} of this document holds no maps.`);
  return header;
}

/** The scopes that have head-level maps, in the order of the arrays: at each attention its weights, then its norms. */
export function headScopes(side: Side): string[] {
  if (!side.heads.length) return [];
  if (side.head_scopes) return side.head_scopes;
  return side.components
    .filter((one) => one.kind === "attention" || one.kind === "cross-attention")
    .flatMap((one) => [one.weights, one.norms])
    .filter((name): name is string => name !== null);
}

/** Where a label stands in a list, by side and position; -1 where it does not. */
export const placeOf = (labels: readonly Label[], side: string, position: number): number =>
  labels.findIndex((one) => one.position === position && one.side === side);
