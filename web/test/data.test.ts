import { deflateRawSync } from "node:zlib";
import { describe, expect, it } from "vitest";
import { bytesOfBase64, inflate } from "../src/data/embedded";
import { checked, headScopes } from "../src/data/header";
import { decode, log16Table } from "../src/data/log16";
import { PackedSource, places } from "../src/data/packed";
import { header, noise, side } from "./fake";

describe("log16", () => {
  const table = log16Table(Math.log(1e-4), Math.log(20));
  it("keeps zero, the minimum and the maximum", () => {
    const cells = decode(Uint8Array.of(0, 0, 1, 0, 255, 255), 0, 3, table);
    expect(cells[0]).toBe(0);
    expect(cells[1]).toBeCloseTo(1e-4, 9);
    expect(cells[2]).toBeCloseTo(20, 4);
  });
  it("is exact to half a step", () => {
    const [lo, hi] = [Math.log(1e-4), Math.log(20)];
    for (const value of [1e-4, 0.003, 0.7, 5, 19.9]) {
      const q = 1 + Math.round(((Math.log(value) - lo) / (hi - lo)) * 65534);
      const [found] = decode(Uint8Array.of(q & 255, q >> 8), 0, 1, table);
      expect(Math.abs(found / value - 1)).toBeLessThan(((hi - lo) / 65534) * 0.51);
    }
  });
  it("reads codes at odd offsets", () => {
    expect(decode(Uint8Array.of(9, 255, 255), 1, 1, table)[0]).toBeCloseTo(20, 4);
  });
});

describe("packed documents", () => {
  const one = side(["a", "b"], { scopes: ["ATTN-W", "ATTN-N"], layers: [0, 2], heads: [0, 1, 2] });
  it("are ordered by scope and layer, followed by heads", () => {
    const { at, total } = places(header(one));
    expect(at.get("encoder|ATTN-W|0")).toBe(0);
    expect(at.get("encoder|ATTN-W|2")).toBe(4);
    expect(at.get("encoder|ATTN-N|0")).toBe(8);
    expect(at.get("encoder|heads/ATTN-W|0")).toBe(16);
    expect(at.get("encoder|heads/ATTN-N|2")).toBe(16 + 3 * 12);
    expect(total).toBe(16 + 4 * 12);
  });
  it("return float32 cells", async () => {
    const values = noise(64);
    const source = new PackedSource(header(one), new Uint8Array(values.buffer));
    expect(await source.cells("encoder", "ATTN-N", 2)).toEqual(values.slice(12, 16));
    expect(await source.cells("encoder", "heads/ATTN-W", 2)).toEqual(values.slice(28, 40));
    await expect(source.cells("encoder", "ATTN-N", 1)).rejects.toThrow("layer 2");
  });
  it("decode log16 cells with the range of their scope", async () => {
    const small = side(["a"], { scopes: ["ATTN-N", "ATTNRES-N"], layers: [0], ranges: { "ATTN-N": [0, 1], "ATTNRES-N": [2, 3] } });
    const source = new PackedSource({ ...header(small), encoding: "log16" }, Uint8Array.of(1, 0, 255, 255));
    expect((await source.cells("encoder", "ATTN-N", 0))[0]).toBeCloseTo(1, 5);
    expect((await source.cells("encoder", "ATTNRES-N", 0))[0]).toBeCloseTo(Math.exp(3), 3);
  });
  it("reject truncated bytes and foreign headers", () => {
    expect(() => new PackedSource(header(one), new Uint8Array(4))).toThrow("truncated");
    expect(() => checked({ format: "other" })).toThrow("normscope-view-1");
    expect(() => checked(null)).toThrow();
    expect(() => checked({ ...header(), sides: [] })).toThrow("no maps");
  });
  it("take the head scopes from the components, or from the header", () => {
    expect(headScopes(one)).toEqual(["ATTN-W", "ATTN-N"]);
    expect(headScopes({ ...one, heads: [] })).toEqual([]);
    expect(headScopes({ ...one, head_scopes: ["X"] })).toEqual(["X"]);
  });
});

describe("embedded data", () => {
  it("is base64 of a raw deflate stream", async () => {
    const bytes = new Uint8Array(noise(100).buffer);
    const text = deflateRawSync(bytes).toString("base64");
    expect(await inflate(bytesOfBase64(`\n${text}\n`))).toEqual(bytes);
  });
});
