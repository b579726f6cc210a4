import { describe, expect, it } from "vitest";
import { inlineSafe } from "../inline-safe";
import { csvOf, field } from "../src/export/csv";
import { escaped, svgOf, type Panel } from "../src/export/svg";
import { PALETTES } from "../src/look/colours";
import { picksOf, planeOf } from "../src/maths/plane";
import { extentOf, scaleOf } from "../src/maths/scale";
import { label } from "./fake";

const rows = ['</text><script>alert("1")</script>', "a,b", "\u0000\u202e"].map((token, k) => label(token, k));
const plane = planeOf(Float32Array.of(1, 2, 3, 4, 5, 6, 7, 8, 9), 3, picksOf(rows, rows, true));
const ink = { palette: PALETTES.light, diagonal: "show" as const, scale: scaleOf([extentOf(plane)], "show", false) };
const panel: Panel = { title: "model <b>, layer 1", rows, columns: rows, plane, ink, seam: -1, legend: "share of the row", own: false, share: true };
const colours = { paper: "#fff", ink: "#000", quiet: "#666", soft: "#eee" };

describe("SVG", () => {
  it("has a rectangle for every cell and a label for every token", () => {
    const { text, width, height } = svgOf([panel], colours);
    expect(text.match(/<rect/g)?.length).toBe(9 + 1 + 1 + 64);
    expect(text).toContain(`width="${width}" height="${height}"`);
  });
  it("writes tokens as text only, without characters that XML forbids", () => {
    const { text } = svgOf([panel], colours);
    expect(text).not.toContain("<script");
    expect(text).not.toContain("<b>");
    // eslint-disable-next-line no-control-regex
    expect(text).not.toMatch(/[\u0000-\u0008\u202e]/);
    expect(escaped(`<&>"'`)).toBe("&#60;&#38;&#62;&#34;&#39;");
  });
  it("says what is shown, names its axes, and has the scale of own tokens", () => {
    const apart = { ...ink, diagonal: "own" as const, scale: scaleOf([extentOf(plane)], "own", false) };
    const { text } = svgOf([{ ...panel, ink: apart, own: true }], colours);
    expect(text).toContain("share of the row");
    expect(text).toContain("inputs j");
    expect(text).toContain("outputs i");
    expect(text.match(/<circle/g)?.length).toBe(3 + 3); // three own tokens, and three in the legend
    const radii = [...text.matchAll(/<circle[^>]* r="([\d.]+)"/g)].map((found) => Number(found[1]));
    expect((radii[0] / radii[2]) ** 2).toBeCloseTo(1 / 9, 2); // the area is the value
  });
  it("marks negative changes, whose colour alone is lost in greyscale", () => {
    const change = planeOf(Float32Array.of(-1, 1, 0.5, -0.5, 0, 1, 1, 1, -1), 3, picksOf(rows, rows, true));
    const signed = { ...ink, scale: scaleOf([extentOf(change)], "show", false, true) };
    const { text } = svgOf([{ ...panel, plane: change, ink: signed }], colours);
    expect(text.match(/height="1" fill/g)?.length).toBe(3);
  });
  it("draws two maps side by side", () => {
    expect(svgOf([panel, panel], colours).width).toBeGreaterThan(svgOf([panel], colours).width * 1.8);
  });
});

describe("CSV", () => {
  it("has a line for every cell", () => {
    const lines = csvOf([{ name: "toy", layer: 2, scope: "ATTN-N", rows, columns: rows, plane }]).trim().split("\r\n");
    expect(lines.length).toBe(10);
    expect(lines[1].startsWith("toy,3,ATTN-N,encoder,1,")).toBe(true);
    expect(lines[5]).toBe('toy,3,ATTN-N,encoder,2,"a,b",encoder,2,"a,b",5');
  });
  it("has no cell that a spreadsheet would run", () => {
    for (const text of ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1"]) expect(field(text)).toBe(`'${text}`);
    expect(field('=HYPERLINK("x","y")')).toBe(`"'=HYPERLINK(""x"",""y"")"`);
    expect(field("a=b")).toBe("a=b");
  });
  it("quotes fields when necessary", () => {
    expect(field('say "a", then b')).toBe('"say ""a"", then b"');
    expect(field("plain")).toBe("plain");
  });
});

describe("an inlined script", () => {
  it("cannot end or alter its element, and keeps its meaning", () => {
    const code = 'const a = "</script><!--<script>";';
    const safe = inlineSafe(code);
    expect(safe).not.toMatch(/<\/script|<!--|<script/i);
    expect(new Function(`${safe} return a;`)()).toBe("</script><!--<script>");
  });
});
