import { describe, expect, it } from "vitest";
import type { Explanation } from "../src/data/explanation";
import { answerRows, chosenScores, firstColumn, groupsOf, strongestParts } from "../src/maths/explained";
import { label } from "./fake";

const columns = ["<s>", "a", "b", "c"].map((token, k) => label(token, k, "decoder"));
const told: Explanation = {
  columns,
  rows: [label("c", 3, "decoder"), label("d", 4, "decoder")],
  targets: ["", ""],
  scores: [[10, 1, -2, 0], [20, 0.5, 0.5, -3]],
  values: [9.5, 18.5],
  remainder: [0.5, 0.5],
  completeness: [1e-7, 2e-7],
  probabilities: [0.5, 0.25],
  alternatives: [[], []],
  groups: { word: [{ name: "<s>", places: [0] }, { name: "ab", places: [1, 2] }, { name: "c", places: [3] }], sentence: [], line: [] },
  answer_words: [],
  warnings: [],
};

describe("an explanation", () => {
  it("adds up to what is explained, for one token, all, and the other side of a contrast", () => {
    for (const chosen of [[0], [1], [0, 1]])
      for (const sign of [1, -1] as const) {
        const found = chosenScores(told, chosen, sign);
        expect(found.scores.reduce((a, b) => a + b, 0) + found.remainder).toBeCloseTo(found.value);
      }
    expect(chosenScores(told, [0, 1]).completeness).toBe(2e-7);
  });
  it("has a scale that the first token does not set", () => {
    expect(firstColumn(told)).toBe(0);
    expect(chosenScores(told, [0]).most).toBe(2);
  });
  it("lists the strongest parts, without those that were not read", () => {
    const parts = strongestParts(told, chosenScores(told, [0]), "word", 5);
    expect(parts.map((part) => [part.group.name, part.score])).toEqual([["<s>", 10], ["ab", -1]]);
    expect(groupsOf(told, "token").map((group) => group.name)).toEqual(["<s>", "a", "b", "c"]);
  });
  it("knows which columns the model wrote", () => expect(answerRows(told)).toEqual([-1, -1, -1, 0]));
});
