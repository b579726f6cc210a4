import { describe, expect, it } from "vitest";
import { Doc } from "../src/data/doc.svelte";
import type { Source } from "../src/data/source";
import { plainScope } from "../src/look/line";
import { insightOf, meanOwnShare, topLink } from "../src/state/insight";
import { Store } from "../src/state/store.svelte";
import { picksOf } from "../src/maths/plane";
import { header, POST_LN, side } from "./fake";

const TOKENS = ["[CLS]", "soap", "opera"];
const NORMS = Float32Array.of(1, 9, 0, 0, 2, 2, 1, 6, 3); // opera receives 60 % from soap
const WEIGHTS = Float32Array.of(0, 1, 0, 0, 0.5, 0.5, 0.7, 0.2, 0.1);

async function shown(scope: string, change: object = {}): Promise<string> {
  const one = header(side(TOKENS, { layers: [0] }));
  const source: Source = { header: async () => one, cells: async (_side, name) => (name.endsWith("-W") ? WEIGHTS : name === "ATTNRES-N" ? Float32Array.of(1, 1, 0, 0, 3, 1, 0, 1, 3) : NORMS) };
  const store = new Store();
  const doc = await Doc.open(source);
  await store.show(doc);
  for (const name of one.sides[0].scopes) await doc.load(one.sides[0], name, 0);
  store.change({ scope, ...change });
  return insightOf(store).map((piece) => ("token" in piece ? piece.token.token : "value" in piece ? piece.value : piece.text)).join("");
}

describe("the sentence that says what stands out", () => {
  it("compares what attention adds with its weights", async () => {
    expect(await shown("ATTN-N")).toBe("soap gives opera 60 % of its attention output, but only 20 % of its weight.");
    expect(await shown("ATTN-W")).toBe("soap puts 50 % of its attention weight on opera, and gets 50 % of its attention output from it.");
  });
  it("says how much a token keeps of itself after other components", async () => {
    expect(await shown("ATTNRES-N")).toBe("A token keeps 67 % of itself on average; the largest link gives soap 25 % from opera.");
  });
  it("names what a component changed most", async () => {
    expect(await shown("ATTNRES-N", { against: "ATTN-N" })).toBe("From attention to + residual, no link between two tokens gains; soap → [CLS] loses most, 40.0 points of what the output receives.");
  });
});

describe("what it is made of", () => {
  const one = side(TOKENS, { layers: [0] });
  const picks = picksOf(one.rows, one.columns, true);
  it("is the largest share between tokens that stand for text", () => {
    expect(topLink(NORMS, one, picks)).toEqual({ row: 2, column: 1, share: expect.closeTo(0.6) });
    expect(topLink(Float32Array.of(1, 1, 0, 0, 1, 0, 1, 0, 1), one, picks)).toMatchObject({ row: 0, column: 1 }); // only with [CLS]
    expect(topLink(new Float32Array(9), one, picks)).toBeNull();
  });
  it("averages the own shares of the shown tokens", () => {
    expect(meanOwnShare(NORMS, one, picks)).toBeCloseTo((0.1 + 0.5 + 0.3) / 3);
    expect(meanOwnShare(NORMS, one, picksOf(one.rows, one.columns, false))).toBeCloseTo((0.5 + 0.3) / 2);
  });
});

describe("plain names", () => {
  it("differ from one another", () => {
    const names = POST_LN.map((scope) => plainScope(scope, { aliases: { layer: "ATTNRESLNFFRESLN-N" } }));
    expect(names).toEqual(["attention weights", "attention", "weights + residual", "+ residual", "+ norm", "after the feed-forward", "+ residual, feed-forward", "whole layer"]);
    expect(plainScope("ATTNRESLNXATTNRES-N", { aliases: {} })).toBe("+ residual, cross-attention");
    expect(plainScope("odd-N", { aliases: {} })).toBe("odd-N");
  });
});
