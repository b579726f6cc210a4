import { describe, expect, it } from "vitest";
import { pathCsv, pathDrawn } from "../src/export/path";
import { edgePath, graphOf, MANY, rowsOf, xOf, yOf } from "../src/look/graph";
import { carried, edgesOf, nearestStep, OTHER, pathTo, readable, STEPS, total, type Layers } from "../src/maths/path";
import { layersOf, mostlyRemainder, placesOf, rowRead, sumOf } from "../src/maths/scores";
import type { Flow } from "../src/data/header";
import { pathScope } from "../src/state/view";
import type { Shown } from "../src/state/path";
import { label, noise, side } from "./fake";

const all = (n: number) => Int32Array.from({ length: n }, (_, k) => k);

// Two tokens, two layers. The first output of layer 2 is 3/4 the first and 1/4 the second token after layer 1; these are
// 1/2 and 1/2, and 1/5 and 4/5, of the input.
const two: Layers = { maps: [Float32Array.of(1, 1, 1, 4), Float32Array.of(3, 1, 0, 7)], width: 2, own: all(2) };

describe("a path", () => {
  it("follows the shares backwards, as computed by hand", () => {
    const { nodes } = pathTo(two, 0);
    expect([...nodes[2]]).toEqual([1, 0]);
    expect([...nodes[1]]).toEqual([0.75, 0.25]);
    expect(nodes[0][0]).toBeCloseTo(0.75 * 0.5 + 0.25 * 0.2, 12);
    expect(nodes[0][1]).toBeCloseTo(0.75 * 0.5 + 0.25 * 0.8, 12);
  });
  it("sums to 1 in every layer", () => {
    const layers: Layers = { maps: [1, 2, 3].map((seed) => noise(49, seed)), width: 7, own: all(7) };
    for (const nodes of pathTo(layers, 3).nodes) expect(total(nodes)).toBeCloseTo(1, 10);
  });
  it("has edges that add up to the nodes at both ends", () => {
    const layers: Layers = { maps: [4, 5].map((seed) => noise(25, seed)), width: 5, own: all(5) };
    const path = pathTo(layers, 2);
    const edges = edgesOf(layers, path, 0);
    for (let l = 0; l < 2; l++)
      for (let i = 0; i < 5; i++) {
        expect(total(edges.filter((edge) => edge.layer === l && edge.from === i).map((edge) => edge.value))).toBeCloseTo(path.nodes[l][i], 10);
        expect(total(edges.filter((edge) => edge.layer === l && edge.to === i).map((edge) => edge.value))).toBeCloseTo(path.nodes[l + 1][i], 10);
      }
    expect(carried(path, edges)).toBeCloseTo(1, 10);
  });
  it("shows the edges above a threshold, the strongest first", () => {
    const path = pathTo(two, 0);
    expect(edgesOf(two, path, 0.3)).toEqual([
      { layer: 1, from: 0, to: 0, value: 0.75 },
      { layer: 0, from: 0, to: 0, value: 0.375 },
      { layer: 0, from: 1, to: 0, value: 0.375 },
    ]);
    expect(edgesOf(two, path, 0.25).length).toBe(4);
    expect(edgesOf(two, path, 0).length).toBe(6); // exact zeros have no edge
    expect(carried(path, edgesOf(two, path, 0.3))).toBeCloseTo(0.75, 10);
  });
  it("merges the tokens of another side without loss", () => {
    const layers: Layers = { maps: [Float32Array.of(2, 0, 1, 1, 1, 1, 1, 1), Float32Array.of(1, 1, 0, 2, 0, 2, 1, 1)], width: 4, own: all(2) };
    const path = pathTo(layers, 1);
    expect([...path.others[1]]).toEqual([0, 0, 0.25, 0.25]);
    expect(total(path.nodes[0]) + path.others.reduce((sum, layer) => sum + total(layer), 0)).toBeCloseTo(1, 12);
    expect(edgesOf(layers, path, 0.01)).toContainEqual({ layer: 1, from: OTHER, to: 1, value: 0.5 });
  });
  it("treats an empty row as zero", () => {
    const layers: Layers = { maps: [new Float32Array(4)], width: 2, own: all(2) };
    expect(edgesOf(layers, pathTo(layers, 0), 0)).toEqual([]);
    expect(carried(pathTo(layers, 0), [])).toBe(0);
  });
  it("starts with a readable threshold", () => {
    const n = 40;
    const layers: Layers = { maps: [1, 2, 3, 4].map((seed) => noise(n * n, seed)), width: n, own: all(n) };
    const path = pathTo(layers, 0);
    const least = readable(layers, path);
    expect(STEPS).toContain(least);
    expect(edgesOf(layers, path, least).length).toBeLessThanOrEqual(56);
    expect(readable(two, pathTo(two, 0))).toBe(0.005);
    expect(STEPS[nearestStep(0.0101)]).toBe(0.01);
  });
});

describe("the graph of a path", () => {
  const graph = graphOf({ rows: [0, 1, 2], layers: 3, room: 600, tall: 300, text: 6, lane: true, both: true });
  it("has its columns and rows in order, within its size", () => {
    const x = [0, 1, 2, 3].map((column) => xOf(graph, column));
    const y = [0, 1, 2, OTHER].map((row) => yOf(graph, row));
    expect(x).toEqual([...x].sort((a, b) => a - b));
    expect(y).toEqual([...y].sort((a, b) => a - b));
    expect(x[3]).toBeLessThan(graph.width);
    expect(y[3]).toBeLessThan(graph.height);
    expect(edgePath(graph, { layer: 1, from: 2, to: 2, value: 1 })).toBe(`M${x[1]} ${y[2]}H${x[2]}`);
  });
  it("scrolls instead of squeezing many layers", () => {
    expect(graphOf({ rows: [0], layers: 40, room: 360, tall: 300, text: 6, lane: false, both: false }).width).toBeGreaterThan(1000);
  });
  it("leaves out tokens that cannot be on the path and, if there are many, those without an edge", () => {
    expect(rowsOf(5, true, [], 2)).toEqual([0, 1, 2]);
    expect(rowsOf(5, false, [], 2)).toEqual([0, 1, 2, 3, 4]);
    expect(rowsOf(MANY + 10, false, [{ layer: 0, from: 9, to: 70, value: 1 }, { layer: 0, from: OTHER, to: 3, value: 1 }], 5)).toEqual([3, 5, 9, 70]);
  });
});

const NASTY = '</text><script>alert("1")</script>';
const tokens = ["[CLS]", NASTY, "a,b"];
const here = side(tokens, { layers: [0, 1] });
const flow: Flow = {
  method: "exact", target: "logit of 'x'", position: null, value: 2, remainder: 0.5, completeness: 1e-7,
  columns: here.rows, scores: [2, -1, 0.5], layers: { encoder: [[2, -1, 0.5], [1, 0, 0], [0, -3, 0]] }, remainders: { encoder: [0.5, 0.5, 0] },
};

describe("the scores of a target", () => {
  it("are scaled to -1 to 1", () => {
    expect(here.rows.map(placesOf(flow))).toEqual([1, -0.5, 0.25]);
    expect(placesOf(flow)(label("x", 0, "decoder"))).toBeNull();
    expect(sumOf(flow.scores)).toBe(1.5);
    expect(sumOf([1, null])).toBeNaN();
  });
  it("report when biases dominate", () => {
    expect([0.5, -1.5, 3.4, -3.6, null].map((remainder) => mostlyRemainder({ ...flow, remainder }))).toEqual([false, false, false, true, false]);
  });
  it("determine the row at which the target is read", () => {
    expect(rowRead(flow, here)).toBe(1);
    expect(rowRead({ ...flow, layers: {}, position: 2 }, here)).toBe(2);
    expect(rowRead(null, here)).toBe(0);
    expect(rowRead(undefined, { ...here, causal: true })).toBe(2);
    expect(layersOf(flow, { ...here, layers: [0] })).toBeNull();
  });
});

describe("a document has a path", () => {
  it("through whole layers, or through the last norms it has", () => {
    expect(pathScope(here)).toBe("ATTNRESLNFFRESLN-N");
    expect(pathScope(side(tokens, { scopes: ["ATTN-W", "ATTN-N"] }))).toBe("ATTN-N");
  });
  it("unless something in between is missing", () => {
    expect(pathScope(side(tokens, { layers: [0, 2] }))).toBeNull();
    expect(pathScope(side(tokens, { rows: here.rows.slice(1) }))).toBeNull();
    expect(pathScope(side(tokens, { grid: [1, 3] }))).toBeNull();
    expect(pathScope(side(tokens, { scopes: ["ATTN-W"] }))).toBeNull();
  });
});

describe("an exported path", () => {
  const layers: Layers = { maps: [noise(9, 1), noise(9, 2)], width: 3, own: all(3) };
  const path = pathTo(layers, 1);
  const edges = edgesOf(layers, path, 0.02);
  const shown: Shown = { side: here, scope: "ATTN-N", row: 1, path, least: 0.02, edges, left: 0, carried: 1, away: 0, other: null };
  const colours = { paper: "#fff", ink: "#000", quiet: "#666", soft: "#eee", self: "#999", mix: "#a00", other: "#00a", idle: "#ccc" };
  it("has a line for every edge, with tokens as text only", () => {
    const { svg } = pathDrawn({ title: `model, ${NASTY}`, shown, colour: () => 0, scored: false }, colours);
    expect(svg.match(/<path/g)?.length).toBe(edges.length);
    expect(svg.match(/<circle/g)?.length).toBe(9);
    expect(svg).not.toContain("<script");
    expect(pathDrawn({ title: "", shown: { ...shown, least: 0.0075 }, colour: () => 0, scored: false }, colours).svg).toContain("at least 0.75 %");
  });
  it("is a table of its edges", () => {
    const lines = pathCsv([{ name: "toy", shown }]).trim().split("\r\n");
    expect(lines.length).toBe(1 + edges.length);
    expect(lines[1].split(",").slice(0, 3)).toEqual(["toy", "2", "ATTN-N"]);
    expect(pathCsv([{ name: "toy", shown: { ...shown, other: "encoder", edges: [{ layer: 0, from: OTHER, to: 0, value: 0.5 }] } }])).toContain("[CLS],encoder,,,0.5");
  });
});
