/** The source of a document: an HTML file, a server or a notebook. */

import type { Explanation, ExplanationRequest } from "./explanation";
import type { Header } from "./header";

/** The logit to explain. */
export interface Aim {
  target: string; // a class or token, or "top"
  against: string | null; // another class or token, whose logit is subtracted
  position: number | null; // of the token at which it is read, counted from 0
  method: string;
}

/** A request to `normscope serve`. */
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

/** Whether two requests have the same model and input; heads and target may differ. */
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
  positions: boolean; // the model has a logit at every token
}

export interface Source {
  header(): Promise<Header>;
  /** The map of a scope; for a scope "heads/...", the maps of all heads one after the other. */
  cells(side: string, scope: string, layer: number): Promise<Float32Array>;
}

/** A backend that runs analyses; `normscope serve` is the only one. */
export interface Lab {
  models(): Promise<ModelInfo[]>;
  /** Explain an answer token by token. */
  explain?(request: ExplanationRequest, on: (progress: number) => void, signal: AbortSignal): Promise<Explanation>;
  /** `first` is called with the layers that are ready before the others, and again when there are more. */
  analyse(request: Request, on: (progress: number) => void, signal: AbortSignal, first?: (source: Source) => void): Promise<Source>;
}
