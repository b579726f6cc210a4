/** A fake document: deterministic numbers, and a header as written by Python. */

import type { Component, Header, Label, Side } from "../src/data/header";

export const POST_LN = ["ATTN-W", "ATTN-N", "ATTNRES-W", "ATTNRES-N", "ATTNRESLN-N", "ATTNRESLNFF-N", "ATTNRESLNFFRES-N", "ATTNRESLNFFRESLN-N"];

const part = (kind: Component["kind"], label: string, block: number, norms: string | null, weights: string | null = null, branch = 0): Component => ({ kind, label, block, branch, norms, weights });

export const COMPONENTS: Component[] = [
  part("attention", "ATTN", 0, "ATTN-N", "ATTN-W"),
  part("residual", "+RES", 0, "ATTNRES-N", "ATTNRES-W"),
  part("norm", "LN", 0, "ATTNRESLN-N"),
  part("ff", "FF", 1, "ATTNRESLNFF-N"),
  part("residual", "+RES", 1, "ATTNRESLNFFRES-N"),
  part("norm", "LN", 1, "ATTNRESLNFFRESLN-N"),
];

export const PARALLEL: Component[] = [
  part("norm", "LN", 0, null),
  part("attention", "ATTN", 0, "LNATTN-N", "ATTN-W"),
  part("norm", "LN", 0, null, null, 1),
  part("ff", "FF", 0, null, null, 1),
  part("residual", "+RES", 0, "LNATTNFFRES-N"),
];

export const label = (token: string, position: number, side = "encoder"): Label => ({ token, side, position, special: /^(\[.*\]|<\/?s>)$/.test(token), word: null });

export function side(tokens: string[], options: Partial<Side> = {}): Side {
  const rows = tokens.map((token, k) => label(token, k));
  const scopes = options.scopes ?? POST_LN;
  const layers = options.layers ?? [0, 1, 2];
  const each = <T>(make: () => T) => Object.fromEntries(scopes.map((scope) => [scope, layers.map(make)]));
  return {
    side: "encoder",
    causal: false,
    rows,
    columns: rows,
    layers,
    model_layers: layers.length,
    components: COMPONENTS,
    scopes,
    aliases: { attention: "ATTN-N", "attention-block": "ATTNRESLN-N", layer: "ATTNRESLNFFRESLN-N" },
    completeness: each(() => 1e-6),
    mixing: each(() => rows.map(() => 0.25)),
    remainder: each(() => rows.map(() => 0.1)),
    heads: [],
    grid: null,
    ...options,
  };
}

export function header(...sides: Side[]): Header {
  return {
    format: "normscope-view-1",
    model: { name: "toy", family: "BERT", dtype: "float32", gate: "ig", value_bias: "token", complete: true, versions: {} },
    encoding: "float32",
    precision: 0,
    sides: sides.length ? sides : [side(["[CLS]", "soap", "opera", "[SEP]"])],
    image: null,
  };
}

/** Deterministic numbers between 0 and 1. */
export function noise(count: number, seed = 1): Float32Array<ArrayBuffer> {
  let state = seed >>> 0;
  return Float32Array.from({ length: count }, () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  });
}
