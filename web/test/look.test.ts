import { describe, expect, it } from "vitest";
import { cssOfPixel, PALETTES, rgbOfPixel } from "../src/look/colours";
import { bounded, frameOf, tallest, zoomed } from "../src/look/frame";
import { described, lineOf } from "../src/look/line";
import { count, number, percent, signed } from "../src/look/numbers";
import { paint, pixelOf, type Ink } from "../src/look/paint";
import { cut, piecesOf, plain, shortened, thinned } from "../src/look/tokens";
import { planeOf, picksOf } from "../src/maths/plane";
import { pool } from "../src/maths/pool";
import { extentOf, scaleOf, type Diagonal } from "../src/maths/scale";
import { COMPONENTS, label, noise, PARALLEL, POST_LN } from "./fake";

/** Perceived lightness. */
const lightness = (pixel: number): number => {
  const [r, g, b] = rgbOfPixel(pixel).map((c) => (c / 255) ** 2.2);
  return Math.cbrt(0.2126 * r + 0.7152 * g + 0.0722 * b);
};

describe("colours", () => {
  for (const theme of ["light", "dark"] as const) {
    const { sequential, diverging } = PALETTES[theme];
    it(`run evenly from the page colour to its opposite (${theme})`, () => {
      const steps = Array.from(sequential, lightness);
      const way = Math.sign(steps[255] - steps[0]);
      for (let k = 8; k < 256; k += 8) expect(way * (steps[k] - steps[k - 8])).toBeGreaterThan(0.004);
      expect(way).toBe(theme === "light" ? -1 : 1);
    });
    it(`diverge from the middle (${theme})`, () => {
      const middle = lightness(diverging[255]);
      for (const end of [0, 510]) expect(Math.abs(lightness(diverging[end]) - middle)).toBeGreaterThan(0.3);
      const [low, high] = [rgbOfPixel(diverging[60]), rgbOfPixel(diverging[450])];
      expect(low[2]).toBeGreaterThan(low[0]); // blue
      expect(high[0]).toBeGreaterThan(high[2]); // orange
    });
  }
  it("are written as CSS", () => {
    expect(cssOfPixel(0xff030201)).toBe("#010203");
  });
});

describe("painting", () => {
  const tokens = [0, 1, 2].map((k) => label("x", k));
  const picks = picksOf(tokens, tokens, true);
  const plane = planeOf(Float32Array.of(9, 0, 1, 2, 9, 4, NaN, 3, 9), 3, picks);
  const ink = (diagonal: Diagonal, log = false, over = false): Ink => ({
    palette: PALETTES.light,
    diagonal,
    scale: { ...scaleOf([extentOf(plane)], diagonal, log), ...(over ? { end: 2 } : {}) },
  });
  it("leaves zero, NaN and hidden cells blank", () => {
    const pixels = paint(pool(plane, 9, 9, true), ink("hide"));
    expect([...pixels].map((pixel) => pixel !== 0)).toEqual([false, false, true, true, false, true, false, true, false]);
  });
  it("colours own tokens on a separate scale", () => {
    expect(paint(pool(plane, 9, 9, true), ink("own"))[0]).toBe(PALETTES.light.own[255]);
  });
  it("marks values beyond the scale", () => {
    for (const log of [false, true]) {
      const pixels = paint(pool(plane, 9, 9, true), ink("hide", log, true));
      expect(pixels[5]).toBe(PALETTES.light.beyond);
      expect(pixels[3]).toBe(PALETTES.light.sequential[255]);
    }
  });
  it("agrees with the colour of single cells", () => {
    for (const diagonal of ["show", "hide", "own"] as const)
      for (const log of [false, true]) {
        const pixels = paint(pool(plane, 9, 9, diagonal !== "show"), ink(diagonal, log));
        pixels.forEach((pixel, k) => expect(pixelOf(plane.cells[k], k % 4 === 0, ink(diagonal, log)) ?? 0).toBe(pixel));
      }
  });
  it("colours gains and losses on the two sides of zero", () => {
    const change = { ...plane, cells: Float32Array.of(0, 0.5, -0.5, 0, 0, 0, 0, 0, 0) };
    const scale = scaleOf([extentOf(change)], "hide", false, true);
    const pixels = paint(pool(change, 9, 9, true), { palette: PALETTES.light, diagonal: "hide", scale });
    expect(pixels[1]).toBe(PALETTES.light.diverging[510]);
    expect(pixels[2]).toBe(PALETTES.light.diverging[0]);
  });
  it("paints a 512 x 512 map", () => {
    const cells = noise(512 * 512);
    const big = { rows: 512, columns: 512, cells, own: Int32Array.from({ length: 512 }, (_, k) => k) };
    const colours = { palette: PALETTES.light, diagonal: "own" as const, scale: scaleOf([extentOf(big)], "own", false) };
    const pixels = paint(pool(big, 512, 512, true), colours);
    expect(pixels.length).toBe(512 * 512);
    for (const k of [1, 512, 131_200, 262_142]) expect(pixels[k]).toBe(pixelOf(cells[k], false, colours) ?? 0);
  });
});

describe("tokens", () => {
  it("dim the tokeniser's marks", () => {
    expect(piecesOf("##ing")[0]).toEqual({ text: "##", kind: "mark" });
    expect(piecesOf("Ġthe")[0]).toEqual({ text: "Ġ", kind: "mark" });
    expect(piecesOf("▁the")[0].kind).toBe("mark");
    expect(piecesOf("##")).toEqual([{ text: "##", kind: "plain" }]);
  });
  it("spell out invisible and bidirectional control characters", () => {
    expect(plain("a\u202eb")).toBe("a\\u202eb");
    expect(plain("\n\t\u0000")).toBe("\\n\\t\\u0000");
    expect(plain("\ud800")).toBe("\\ud800");
    expect(plain("\u{e0001}")).toBe("\\u{e0001}");
    expect(plain("")).toBe("∅");
    expect(plain("  a b ")).toBe("␣␣a b␣");
    expect(plain("  ")).toBe("␣␣");
  });
  it("keep a composite emoji in one piece", () => {
    expect(plain("👩‍🚀")).toBe("👩‍🚀");
    expect(plain("a\u200db")).toBe("a\\u200db");
  });
  it("leave markup alone: it is only ever set as text", () => {
    expect(plain("</script><img onerror=x>")).toBe("</script><img onerror=x>");
  });
  it("are shortened in the middle", () => {
    expect(shortened("Donaudampfschifffahrt", 9)).toBe("Dona…ahrt");
    expect(shortened("short", 9)).toBe("short");
    expect(shortened("👩‍🚀👩‍🚀👩‍🚀👩‍🚀", 3)).toBe("👩‍🚀…👩‍🚀");
    expect(cut(piecesOf("##abcdefghij"), 5).map((piece) => piece.text).join("")).toBe("##…ij");
  });
  it("are thinned out if they do not fit", () => {
    expect(thinned(20, 13)).toBe(1);
    expect(thinned(6, 13)).toBe(3);
    expect(thinned(1.3, 13)).toBe(10);
    for (const cell of [0.3, 1, 2.5, 7]) expect(cell * thinned(cell, 13)).toBeGreaterThanOrEqual(13);
  });
});

describe("numbers", () => {
  it("are short", () => {
    expect(number(0.12345)).toBe("0.123");
    expect(number(0)).toBe("0");
    expect(number(-0.5)).toBe("−0.5");
    expect(number(1.2e-7, 2)).toBe("1e−7");
    expect(number(null)).toBe("–");
    expect(signed(0.5)).toBe("+0.5");
    expect(percent(0.1234)).toBe("12 %");
    expect(percent(0.0123)).toBe("1.2 %");
    expect(count(1, "layer")).toBe("1 layer");
    expect(count(2, "layer")).toBe("2 layers");
  });
});

describe("the component line", () => {
  it("of a post-LN layer bypasses attention and the feed-forward", () => {
    const line = lineOf(COMPONENTS, POST_LN);
    expect(line.stops.map((stop) => stop.column)).toEqual([0, 1, 2, 3, 4, 5]);
    expect(line.bypasses).toEqual([
      { from: 0, to: 1, lanes: 0 },
      { from: 3, to: 4, lanes: 0 },
    ]);
    expect(line.columns[0].scopes).toEqual(["ATTN-W", "ATTN-N"]);
    expect(line.columns[3].scopes).toEqual(["ATTNRESLNFF-N"]);
  });
  it("of a pre-LN layer has bypasses that start before the norm", () => {
    const pre = [
      { ...COMPONENTS[2], block: 0, norms: null },
      { ...COMPONENTS[0], norms: "LNATTN-N" },
      { ...COMPONENTS[1], norms: "LNATTNRES-N", weights: null },
    ];
    const line = lineOf(pre, ["LNATTN-N", "LNATTNRES-N"]);
    expect(line.bypasses).toEqual([{ from: 0, to: 2, lanes: 0 }]);
    expect(line.columns.map((column) => column.scopes.length)).toEqual([0, 1, 1]);
  });
  it("of a parallel layer has the second branch above the first", () => {
    const line = lineOf(PARALLEL, ["ATTN-W", "LNATTN-N", "LNATTNFFRES-N"]);
    expect(line.stops.map(({ column, lane }) => [column, lane])).toEqual([[0, 0], [1, 0], [0, 1], [1, 1], [2, 0]]);
    expect(line.lanes).toBe(1);
    expect(line.bypasses).toEqual([{ from: 0, to: 2, lanes: 1 }]);
  });
  it("shows only maps that the document has", () => {
    expect(lineOf(COMPONENTS, ["ATTN-N"]).columns.flatMap((column) => column.scopes)).toEqual(["ATTN-N"]);
  });
  it("describes scopes in words", () => {
    expect(described("ATTNRESLN-N")).toBe("attention, residual and norm");
    expect(described("ATTN-W")).toBe("attention");
    expect(described("LNXATTNRES-N")).toBe("norm, cross-attention and residual");
    expect(described("whatever")).toBe("whatever");
  });
});

describe("the frame of a map", () => {
  const wanted = { rows: 11, columns: 11, rowText: 8, columnText: 8, room: 900, tall: 430, aside: 56 };
  it("fits the available width and height", () => {
    const frame = frameOf(wanted);
    expect(frame.left + frame.width + frame.right).toBeLessThanOrEqual(900);
    expect(frame.height).toBeLessThanOrEqual(430);
    expect(Number.isInteger(frame.cell)).toBe(true);
    expect(frameOf({ ...wanted, rows: 600, columns: 600 }).height).toBeLessThanOrEqual(430.001);
  });
  it("gives long sentences more height", () => {
    expect(tallest(900, 400, 11)).toBe(416);
    expect(tallest(900, 400, 500)).toBeGreaterThan(650);
  });
  it("zooms around a point and stays within the map", () => {
    const frame = frameOf({ ...wanted, rows: 400, columns: 400 });
    const near = zoomed({ x: 0, y: 0, cell: frame.cell }, 8, 200, 100, frame, 400, 400);
    expect((near.x + 200 / near.cell) * frame.cell).toBeCloseTo(200, 6);
    expect((near.y + 100 / near.cell) * frame.cell).toBeCloseTo(100, 6);
    const edge = bounded({ x: 9999, y: -5, cell: 10 }, frame, 400, 400);
    expect(edge.y).toBe(0);
    expect(edge.x + frame.width / edge.cell).toBeCloseTo(400, 6);
    expect(zoomed(near, 1e-6, 0, 0, frame, 400, 400)).toEqual({ x: 0, y: 0, cell: frame.cell });
  });
});
