import { describe, expect, it } from "vitest";
import { explainPython, pythonOf } from "../src/export/python";
import { START, type View } from "../src/state/view";

const view: View = { ...START, scope: "ATTN-N", layer: 2 };
const request = { model: "toy", text: 'say "a"\n\\ \u00e9 \ud800' };

describe("the Python of a view", () => {
  it("escapes what people typed", () => {
    expect(pythonOf(request, view, null)).toContain('lens.analyze("say \\"a\\"\\n\\\\ \\u00e9 \\ud800")');
  });
  it("has the options of the request", () => {
    const given = pythonOf({ ...request, text: "a", second: null, target: "b", generate: null }, { ...view, head: 3 }, "decoder");
    expect(given).toContain('lens.analyze("a", text_target="b", heads=True)');
    expect(given).toContain('result.decoder.heads["ATTN-N"][result.decoder.layers.index(2), 3]');
    expect(pythonOf({ ...request, text: "a", second: "b" }, view, null)).toContain('lens.analyze(("a", "b"))');
    const flow = { target: "top", against: "no", position: 0, method: "exact" };
    expect(pythonOf({ ...request, text: "a", flow }, view, null)).toContain('lens.flow("a", target=("top", "no"), position=0)');
    expect(explainPython({ model: "toy", text: "a", generate: 3, answer: null, contrast: null })).toContain('lens.explain("a", generate=3)');
  });
});
