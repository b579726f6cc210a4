/** Where the viewer gets a document from: an HTML file, a server, a notebook. */

import type { Header } from "./header";

/** The logit that the tokens are to be scored for. */
export interface Aim {
  target: string; // a class or token, or "top"
  against: string | null; // the same, subtracted
  position: number | null; // where it is read, counted from 0
  method: string;
}

/** What `normscope serve` is asked to analyse. */
export interface Request {
  model: string;
  text: string;
  second: string | null;
  target: string | null;
  generate: number | null;
  image: string | null;
  heads: boolean;
  flow: Aim | null;
}

/** Whether two requests are for the same input; what is asked about it may differ. */
export const sameInput = (a: Partial<Request>, b: Partial<Request>): boolean =>
  (["model", "text", "second", "target", "generate"] as const).every((name) => (a[name] || null) === (b[name] || null));

export interface ModelInfo {
  name: string;
  family: string;
  kind: "encoder" | "causal" | "encoder-decoder" | "vision";
  layers: number;
  heads: number;
  scopes: string[];
  max_tokens: number | null;
  targets: "none" | "classes" | "tokens";
  classes: string[];
  positions: boolean; // there is a logit at every token
}

export interface Source {
  header(): Promise<Header>;
  /** The map of a scope, or with the scope "heads/..." all its heads one after the other. */
  cells(side: string, scope: string, layer: number): Promise<Float32Array>;
}

/** A place that runs analyses: only `normscope serve`. */
export interface Lab {
  models(): Promise<ModelInfo[]>;
  /** `first` is given the first layer where it is there before the others. */
  analyse(request: Request, on: (progress: number) => void, signal: AbortSignal, first?: (source: Source) => void): Promise<Source>;
}
