import { describe, expect, it, vi } from "vitest";
import { Doc } from "../src/data/doc.svelte";
import { header, side } from "./fake";

/** A document, and the maps requested from its source, in order. */
function document() {
  const one = side(["a", "b"]);
  const asked: string[] = [];
  const cells = async (_: string, scope: string, layer: number) => {
    asked.push(`${scope}|${layer}`);
    return new Float32Array(4);
  };
  return { one, asked, doc: new Doc(header(one), { header: async () => header(one), cells }) };
}
const settled = () => new Promise((done) => setTimeout(done)); // all pending microtasks have run
const eventually = (check: () => void) => vi.waitFor(check, { timeout: 60_000 });

describe("documents", () => {
  it("load only urgent maps until the first map is drawn", async () => {
    const { one, asked, doc } = document();
    doc.map(one, "ATTN-N", 1);
    await settled();
    expect(asked).toEqual([]);
    doc.release();
    await eventually(() => expect(asked).toEqual(["ATTN-N|1"]));
  });
  it("load urgent maps first, even if they are queued already", async () => {
    const { one, asked, doc } = document();
    doc.map(one, "ATTN-W", 0);
    doc.map(one, "ATTN-N", 1);
    doc.map(one, "ATTN-N", 1, true);
    await eventually(() => expect(doc.map(one, "ATTN-N", 1)).toBeDefined());
    expect(asked[0]).toBe("ATTN-N|1");
    expect(new Set(asked).size).toBe(asked.length);
  });
});
