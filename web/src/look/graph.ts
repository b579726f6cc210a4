/** A path as a layered graph: a column of tokens before each layer and after the last, with edges between columns. */

import { OTHER, type Edge } from "../maths/path";
import { CHARACTER } from "./frame";

export const MANY = 64; // with more tokens, only those with an edge are drawn

export interface Graph {
  rows: number[]; // the tokens drawn, from top to bottom
  columns: number; // layers + 1
  left: number; // room for the input labels
  right: number; // room for the output labels
  top: number;
  gap: number; // distance between columns
  step: number; // distance between tokens
  lane: boolean; // the other side has a lane below the tokens
  font: number;
  width: number;
  height: number;
}

export interface Wanted {
  rows: number[];
  layers: number;
  room: number; // available width
  tall: number; // preferred height
  text: number; // characters of the longest label
  lane: boolean;
  both: boolean; // labels at both ends
}

const TOP = 24;
const BOTTOM = 12;
const NARROW = 30; // minimum distance between columns; wider graphs scroll

export function graphOf({ rows, layers, room, tall, text, lane, both }: Wanted): Graph {
  const lines = rows.length + (lane ? 1.5 : 0);
  const step = Math.min(34, Math.max(tall / Math.max(lines, 1), 14));
  const font = step < 15 || room < 480 ? 10.5 : 12;
  const label = Math.round(text * font * CHARACTER + 18);
  const right = both ? label : 16;
  const gap = Math.min(170, Math.max((room - label - right) / layers, NARROW));
  return { rows, columns: layers + 1, left: label, right, top: TOP, gap, step, lane, font, width: Math.round(label + layers * gap + right), height: Math.round(TOP + lines * step + BOTTOM) };
}

/** The tokens to draw: all that can be on the path to `output`; if there are many, only those with an edge. */
export function rowsOf(count: number, causal: boolean, edges: readonly Edge[], output: number): number[] {
  const reach = causal ? output + 1 : count; // causal models do not read later tokens
  if (reach <= MANY) return Array.from({ length: reach }, (_, i) => i);
  const found = new Set([output, ...edges.flatMap((edge) => [edge.from, edge.to])]);
  found.delete(OTHER);
  return [...found].sort((a, b) => a - b);
}

export const xOf = (graph: Graph, column: number): number => round(graph.left + column * graph.gap);

/** The y coordinate of a token; OTHER is the lane of the other side. */
export function yOf(graph: Graph, row: number): number {
  const line = row === OTHER ? graph.rows.length + 0.5 : graph.rows.indexOf(row);
  return round(graph.top + (line + 0.5) * graph.step);
}

/** A smooth line from a token before a layer to a token after it. */
export function edgePath(graph: Graph, { layer, from, to }: Edge): string {
  const [x, y, u, v] = [xOf(graph, layer), yOf(graph, from), xOf(graph, layer + 1), yOf(graph, to)];
  if (y === v) return `M${x} ${y}H${u}`;
  const lean = round(0.5 * graph.gap);
  return `M${x} ${y}C${round(x + lean)} ${y} ${round(u - lean)} ${v} ${u} ${v}`;
}

/** Stroke width and opacity of an edge, growing with its value. */
export function edgeLook(graph: Graph, value: number): { width: number; strength: number } {
  const widest = Math.min(11, 0.5 * graph.step);
  return { width: round(Math.max(0.7, widest * Math.sqrt(value))), strength: round(Math.min(0.9, 0.28 + 0.75 * Math.sqrt(value))) };
}

export const radiusOf = (graph: Graph): number => round(Math.min(6.5, 0.27 * graph.step));

/** Every nth column is named; returns n. */
export const namedEvery = (graph: Graph): number => Math.ceil(22 / graph.gap);

/** The name of a column: the input, or the layer that it follows. */
export const columnName = (first: number, column: number): string => (column ? String(first + column) : first ? `before ${first + 1}` : "input");

const round = (x: number): number => Math.round(100 * x) / 100;
