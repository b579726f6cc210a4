/** A path as a layered graph: a column of tokens before each layer and one after the last, edges between them. */

import { OTHER, type Edge } from "../maths/path";
import { CHARACTER } from "./frame";

export const MANY = 64; // tokens: of more, only those that carry an edge are drawn

export interface Graph {
  rows: number[]; // the tokens drawn, from top to bottom
  columns: number; // layers + 1
  left: number; // room for the labels of the input
  right: number; // room for those of the output
  top: number;
  gap: number; // between two columns
  step: number; // between two tokens
  lane: boolean; // the other side has a line of its own under the tokens
  font: number;
  width: number;
  height: number;
}

export interface Wanted {
  rows: number[];
  layers: number;
  room: number; // width
  tall: number; // height wanted
  text: number; // characters of the longest label
  lane: boolean;
  both: boolean; // labels on both ends
}

const TOP = 24;
const BOTTOM = 12;
const NARROW = 30; // the least distance of two columns: what does not fit is scrolled to

export function graphOf({ rows, layers, room, tall, text, lane, both }: Wanted): Graph {
  const lines = rows.length + (lane ? 1.5 : 0);
  const step = Math.min(34, Math.max(tall / Math.max(lines, 1), 14));
  const font = step < 15 || room < 480 ? 10.5 : 12;
  const label = Math.round(text * font * CHARACTER + 18);
  const right = both ? label : 16;
  const gap = Math.min(170, Math.max((room - label - right) / layers, NARROW));
  return { rows, columns: layers + 1, left: label, right, top: TOP, gap, step, lane, font, width: Math.round(label + layers * gap + right), height: Math.round(TOP + lines * step + BOTTOM) };
}

/** The tokens to draw: all that can be on the path to `output`, or of many those at an end of an edge. */
export function rowsOf(count: number, causal: boolean, edges: readonly Edge[], output: number): number[] {
  const reach = causal ? output + 1 : count; // nothing comes from a later token
  if (reach <= MANY) return Array.from({ length: reach }, (_, i) => i);
  const found = new Set([output, ...edges.flatMap((edge) => [edge.from, edge.to])]);
  found.delete(OTHER);
  return [...found].sort((a, b) => a - b);
}

export const xOf = (graph: Graph, column: number): number => round(graph.left + column * graph.gap);

/** The height of a token's line; OTHER is the lane of the other side. */
export function yOf(graph: Graph, row: number): number {
  const line = row === OTHER ? graph.rows.length + 0.5 : graph.rows.indexOf(row);
  return round(graph.top + (line + 0.5) * graph.step);
}

/** A smooth line from a token before a layer to one after it. */
export function edgePath(graph: Graph, { layer, from, to }: Edge): string {
  const [x, y, u, v] = [xOf(graph, layer), yOf(graph, from), xOf(graph, layer + 1), yOf(graph, to)];
  if (y === v) return `M${x} ${y}H${u}`;
  const lean = round(0.5 * graph.gap);
  return `M${x} ${y}C${round(x + lean)} ${y} ${round(u - lean)} ${v} ${u} ${v}`;
}

/** How an edge is drawn: as wide as it is strong. */
export function edgeLook(graph: Graph, value: number): { width: number; strength: number } {
  const widest = Math.min(11, 0.5 * graph.step);
  return { width: round(Math.max(0.7, widest * Math.sqrt(value))), strength: round(Math.min(0.9, 0.28 + 0.75 * Math.sqrt(value))) };
}

export const radiusOf = (graph: Graph): number => round(Math.min(6.5, 0.27 * graph.step));

/** Every how many columns one is named. */
export const namedEvery = (graph: Graph): number => Math.ceil(22 / graph.gap);

/** What a column holds: the input, or the states after a layer. */
export const columnName = (first: number, column: number): string => (column ? String(first + column) : first ? `before ${first + 1}` : "input");

const round = (x: number): number => Math.round(100 * x) / 100;
