import { describe, expect, it } from "vitest";
import { arcPath, arcWeight } from "../src/maths/arcs";
import { difference } from "../src/maths/difference";
import { shareOfRow, sources, targets } from "../src/maths/flow";
import { gridPlane, patchColumns } from "../src/maths/grid";
import { mean, worst } from "../src/maths/mixing";
import { picksOf, planeOf, sums } from "../src/maths/plane";
import { pool } from "../src/maths/pool";
import { extentOf, placeOn, scaleOf, sharedEnd, valueAt } from "../src/maths/scale";
import { largest, strongest } from "../src/maths/strongest";
import { label, noise, side } from "./fake";

const tokens = ["[CLS]", "soap", "opera", "[SEP]"].map((token, k) => label(token, k));
const all = picksOf(tokens, tokens, true);
const map = Float32Array.of(9, 1, 2, 3, 4, 9, 5, 6, 7, 8, 9, 1, 2, 3, 4, 9);

describe("the visible part of a map", () => {
  it("is the map itself when nothing is hidden", () => {
    expect(planeOf(map, 4, all).cells).toBe(map);
    expect([...all.own]).toEqual([0, 1, 2, 3]);
  });
  it("leaves out special tokens", () => {
    const picks = picksOf(tokens, tokens, false);
    expect([...picks.rows]).toEqual([1, 2]);
    expect([...planeOf(map, 4, picks).cells]).toEqual([9, 5, 8, 9]);
    expect([...picks.own]).toEqual([0, 1]);
  });
  it("shows special tokens if there is nothing else", () => {
    const only = [label("[CLS]", 0), label("[SEP]", 1)];
    expect(picksOf(only, only, false).rows.length).toBe(2);
  });
  it("can be limited to a band of columns without own tokens", () => {
    const columns = [...tokens.map((one) => ({ ...one, side: "decoder" })), ...tokens];
    const rows = tokens.map((one) => ({ ...one, side: "decoder" }));
    const picks = picksOf(rows, columns, true, "encoder");
    expect([...picks.columns]).toEqual([4, 5, 6, 7]);
    expect([...picks.own]).toEqual([-1, -1, -1, -1]);
  });
  it("normalises rows and columns of the whole map, including hidden tokens", () => {
    expect([...sums(map, 4, "row")]).toEqual([15, 24, 25, 18]);
    expect([...sums(map, 4, "column")]).toEqual([22, 21, 20, 19]);
    const picks = picksOf(tokens, tokens, false);
    expect(planeOf(map, 4, picks, "row").cells[1]).toBeCloseTo(5 / 24);
    expect(planeOf(map, 4, picks, "column").cells[1]).toBeCloseTo(5 / 20);
  });
  it("makes rows sum to 1, and leaves an empty row empty", () => {
    const plane = planeOf(Float32Array.of(0, 0, 1, 3), 2, picksOf(tokens.slice(0, 2), tokens.slice(0, 2), true), "row");
    expect([...plane.cells]).toEqual([0, 0, 0.25, 0.75]);
  });
});

describe("difference", () => {
  it("is the change in share of the output and sums to zero in each row", () => {
    const before = noise(20, 3);
    const after = noise(20, 4);
    const found = difference(before, after, 5, "output");
    for (const sum of sums(found, 5, "row")) expect(sum).toBeCloseTo(0, 5);
    expect(found[7]).toBeCloseTo(after[7] / sums(after, 5, "row")[1] - before[7] / sums(before, 5, "row")[1], 5);
  });
  it("is the change in share of the input and sums to zero in each column", () => {
    const found = difference(noise(20, 3), noise(20, 4), 5, "input");
    for (const sum of sums(found, 5, "column")) expect(sum).toBeCloseTo(0, 5);
  });
  it("treats an empty row as zero shares", () => {
    expect([...difference(Float32Array.of(0, 0), Float32Array.of(1, 3), 2, "output")]).toEqual([0.25, 0.75]);
  });
});

describe("scales", () => {
  const plane = planeOf(map, 4, all);
  it("separate own tokens from others", () => {
    expect(extentOf(plane)).toEqual({ others: 8, own: 9, least: 1 });
  });
  it("end at the largest value; only a shown diagonal counts", () => {
    expect(scaleOf([extentOf(plane)], "hide", false).end).toBe(8);
    expect(scaleOf([extentOf(plane)], "show", false).end).toBe(9);
    expect(scaleOf([extentOf(plane)], "own", false).ownEnd).toBe(9);
  });
  it("are not set by a single outlier map", () => {
    expect(sharedEnd([2, 2, 2, 60])).toBe(3);
    expect(sharedEnd([2, 2.5])).toBe(2.5);
    expect(sharedEnd([0, 0])).toBe(0);
    const scale = scaleOf([2, 2, 2, 60].map((others) => ({ others, own: 1, least: 0.1 })), "hide", false);
    expect([scale.end, scale.top]).toEqual([3, 60]);
  });
  it("are never empty", () => {
    expect(scaleOf([], "own", true).end).toBe(1);
    expect(placeOn(0, scaleOf([], "own", true))).toBe(0);
  });
  it("place values linearly, logarithmically and around zero", () => {
    const extent = [{ others: 100, own: 0, least: 0.01 }];
    expect(placeOn(25, scaleOf(extent, "hide", false))).toBe(0.25);
    expect(placeOn(1, scaleOf(extent, "hide", true))).toBeCloseTo(0.5);
    const signed = scaleOf([{ others: 0.5, own: 0, least: 0.001 }], "hide", false, true);
    expect(placeOn(-0.25, signed)).toBe(-0.5);
    expect(placeOn(7, signed)).toBe(1);
    expect(placeOn(0, signed)).toBe(0);
  });
  it("return the value at a place", () => {
    for (const log of [false, true])
      for (const signed of [false, true]) {
        const scale = scaleOf([{ others: 3, own: 8, least: 0.002 }], "own", log, signed);
        for (const value of signed ? [-2, -0.1, 0.4, 3] : [0.05, 0.4, 3]) expect(valueAt(placeOn(value, scale), scale)).toBeCloseTo(value, 6);
        expect(valueAt(1, scale, true)).toBeCloseTo(8, 6);
      }
  });
});

describe("pooling", () => {
  const plane = planeOf(map, 4, all);
  it("keeps the strongest cell of each block", () => {
    expect([...pool(plane, 2, 2, false).cells]).toEqual([9, 6, 8, 9]);
  });
  it("keeps own tokens separate", () => {
    const small = pool(plane, 2, 2, true);
    expect([...small.cells]).toEqual([4, 6, 8, 4]);
    expect([...small.ownAt]).toEqual([0, 3]);
    expect([...small.ownValues]).toEqual([9, 9]);
  });
  it("keeps the sign of the strongest cell", () => {
    const signed = { ...plane, cells: map.map((value, k) => (k % 2 ? -value : value)) };
    expect([...pool(signed, 1, 1, false).cells]).toEqual([9]);
    expect([...pool(signed, 2, 2, true).cells]).toEqual([4, -6, -8, 4]);
  });
  it("copies nothing when the map is small enough", () => {
    expect(pool(plane, 10, 10, false).cells).toBe(map);
    expect([...pool(plane, 10, 10, true).ownAt]).toEqual([0, 5, 10, 15]);
  });
  it("covers every cell of a map whose size is not a multiple of the block", () => {
    const cells = noise(7 * 5);
    const picks = { rows: new Int32Array(7), columns: new Int32Array(5), own: new Int32Array(7).fill(-1), whole: true };
    const small = pool({ rows: 7, columns: 5, cells, own: picks.own }, 3, 2, true);
    expect(Math.max(...small.cells)).toBe(Math.max(...cells));
    expect([...small.cells].every((value) => cells.includes(value))).toBe(true);
  });
});

describe("the strongest cells", () => {
  it("are sorted, without own tokens by default", () => {
    const plane = planeOf(map, 4, all);
    expect(strongest(plane, 3)).toEqual([
      { row: 2, column: 1, value: 8 },
      { row: 2, column: 0, value: 7 },
      { row: 1, column: 3, value: 6 },
    ]);
    expect(strongest(plane, 1, 1, true)[0]).toEqual({ row: 0, column: 0, value: 9 });
  });
  it("can be the most negative ones", () => {
    const plane = { ...planeOf(map, 4, all), cells: map.map((value) => value - 5) };
    expect(strongest(plane, 2, -1).map((cell) => cell.value)).toEqual([-4, -4]);
    expect(strongest(plane, 100, 1).every((cell) => cell.value > 0)).toBe(true);
  });
  it("agree with sorting", () => {
    const values = noise(500, 9);
    const sorted = [...values].sort((a, b) => b - a).slice(0, 20);
    expect(largest(500, (k) => values[k], 20).map((k) => values[k])).toEqual(sorted);
  });
  it("skip values that are not finite", () => {
    expect(largest(4, (k) => [NaN, Infinity, 2, 1][k], 3)).toEqual([2, 3]);
  });
});

describe("flows", () => {
  it("are a token's row and column", () => {
    expect(sources(map, 4, 1, 2, (j) => j !== 1)).toEqual([
      { place: 3, value: 6, share: 0.25 },
      { place: 2, value: 5, share: 5 / 24 },
    ]);
    expect(targets(map, 4, 0, 2, (i) => i !== 0).map((flow) => [flow.place, flow.value])).toEqual([[2, 7], [1, 4]]);
    expect(shareOfRow(map, 4, 2, 0)).toBeCloseTo(7 / 25);
  });
  it("rank losses by magnitude", () => {
    expect(sources(Float32Array.of(-3, 1, 2), 3, 0, 2, () => true).map((flow) => flow.value)).toEqual([-3, 2]);
  });
});

describe("arcs", () => {
  it("start and end on the line", () => {
    expect(arcPath(10, 50, 60, 40)).toMatch(/^M10 60C.* 50 60$/);
    expect(arcPath(50, 10, 0, 40, true)).toMatch(/^M50 0C.* 10 0$/);
  });
  it("stay below the ceiling and rise with distance", () => {
    const top = (path: string) => Number(/^M[\d.]+ [\d.]+C[-\d.]+ ([-\d.]+)/.exec(path)?.[1]);
    expect(top(arcPath(0, 10, 60, 40))).toBeGreaterThan(top(arcPath(0, 100, 60, 40)));
    expect(top(arcPath(0, 1e6, 60, 40))).toBe(10);
  });
  it("are wider for larger values", () => {
    expect(arcWeight(4, 4).width).toBeGreaterThan(arcWeight(1, 4).width);
    expect(arcWeight(0, 0).strength).toBeGreaterThan(0);
  });
});

describe("mixing", () => {
  it("skips missing values", () => {
    expect(mean([0.2, null, 0.4])).toBeCloseTo(0.3);
    expect(mean([0.2, 0.3, 0.4], [0, 2])).toBeCloseTo(0.3);
    expect(mean([null])).toBeNaN();
  });
  it("is NaN at worst if a value is missing", () => {
    expect(worst([1e-7, 3e-6])).toBe(3e-6);
    expect(worst([1e-7, null])).toBeNaN();
  });
});

describe("patches", () => {
  const seen = side(["[CLS]", "1,1", "1,2", "2,1", "2,2", "3,1", "3,2"], { grid: [3, 2] });
  const values = Float32Array.from({ length: 49 }, (_, k) => k);
  it("fill the grid in order", () => {
    expect(patchColumns(seen)).toEqual([1, 2, 3, 4, 5, 6]);
    expect([...gridPlane(values, seen, 0, "raw").cells]).toEqual([1, 2, 3, 4, 5, 6]);
  });
  it("mark the output's own patch", () => {
    expect([...gridPlane(values, seen, 4, "raw").own]).toEqual([-1, 1, -1]);
    expect([...gridPlane(values, seen, 0, "raw").own]).toEqual([-1, -1, -1]);
  });
  it("are shares of the whole row", () => {
    expect(gridPlane(values, seen, 0, "row").cells[5]).toBeCloseTo(6 / 21);
  });
});
