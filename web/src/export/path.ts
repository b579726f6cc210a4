/** A path as SVG, and its edges as CSV. */

import { cssOfPixel } from "../look/colours";
import { columnName, edgeLook, edgePath, graphOf, namedEvery, radiusOf, rowsOf, xOf, yOf } from "../look/graph";
import { exactly } from "../look/numbers";
import { glyphs, shortened } from "../look/tokens";
import { OTHER, type Edge } from "../maths/path";
import type { Shown } from "../state/path";
import { field } from "./csv";
import { escaped, type Colours, type Drawn } from "./svg";

const LONGEST = 16;
const COLUMN = 110; // pixels between columns
const LINE = 24; // pixels between tokens
const TITLE = 26;

export interface PathColours extends Colours {
  self: string;
  mix: string;
  other: string;
  idle: string; // nodes that carry nothing
}

export interface PathPanel {
  title: string;
  shown: Shown;
  colour: (column: number, row: number) => number; // of a node
  scored: boolean; // nodes are coloured by score
}

export function pathDrawn({ title, shown, colour, scored }: PathPanel, colours: PathColours): Drawn {
  const { side, edges, row: output } = shown;
  const rows = rowsOf(side.rows.length, side.causal, edges, output);
  const name = (row: number) => (row === OTHER ? (shown.other ?? "") : shortened(side.rows[row].token, LONGEST));
  const text = Math.max(...rows.map((row) => glyphs(name(row)).length), 8);
  const layers = side.layers.length;
  const lane = edges.some((edge) => edge.from === OTHER);
  const graph = graphOf({ rows, layers, room: COLUMN * layers + 20 * text, tall: LINE * rows.length, text, lane, both: true });
  const radius = radiusOf(graph);
  const carrying = new Set(edges.flatMap((edge) => [`${edge.layer}|${edge.from}`, `${edge.layer + 1}|${edge.to}`]));
  const ink = (edge: Edge) => (edge.from === OTHER ? colours.other : edge.from === edge.to ? colours.self : colours.mix);
  const parts: string[] = [];
  const put = (x: number, y: number, words: string, more: string) => parts.push(`<text x="${x}" y="${y}" ${more}>${escaped(words)}</text>`);
  const mono = (fill: string) => `font-family="monospace" font-size="${graph.font}" fill="${fill}"`;
  for (let column = 0; column < graph.columns; column++)
    if (column % namedEvery(graph) === 0) put(xOf(graph, column), 13, columnName(side.layers[0], column), `font-family="sans-serif" font-size="11" text-anchor="middle" fill="${colours.quiet}"`);
  for (const edge of [...edges].reverse()) {
    const { width, strength } = edgeLook(graph, edge.value);
    parts.push(`<path d="${edgePath(graph, edge)}" fill="none" stroke="${ink(edge)}" stroke-width="${width}" opacity="${strength}"/>`);
  }
  for (let column = 0; column < graph.columns; column++)
    for (const row of rows) {
      const on = carrying.has(`${column}|${row}`);
      const size = on ? radius : scored ? 0.62 * radius : 1.4;
      const rim = column === layers && row === output ? ` stroke="${colours.mix}" stroke-width="2"` : on ? ` stroke="${colours.idle}" stroke-width="1"` : "";
      parts.push(`<circle cx="${xOf(graph, column)}" cy="${yOf(graph, row)}" r="${size}" fill="${on || scored ? cssOfPixel(colour(column, row)) : colours.idle}"${rim}/>`);
    }
  for (const column of new Set(edges.filter((edge) => edge.from === OTHER).map((edge) => edge.layer)))
    parts.push(`<circle cx="${xOf(graph, column)}" cy="${yOf(graph, OTHER)}" r="${0.8 * radius}" fill="${colours.other}"/>`);
  for (const row of [...rows, ...(lane ? [OTHER] : [])]) {
    const fill = row === output ? colours.mix : row === OTHER ? colours.other : colours.quiet;
    put(graph.left - 12, yOf(graph, row) + 4, name(row), `${mono(fill)} text-anchor="end"`);
    if (row !== OTHER) put(graph.width - graph.right + 12, yOf(graph, row) + 4, name(row), mono(fill));
  }
  const head = `<text x="0" y="14" font-family="Georgia, serif" font-size="14" fill="${colours.ink}">${escaped(title)}</text>`;
  const note = `${edges.length} edges of at least ${exactly(shown.least)} of the output`;
  const foot = `<text x="${graph.left}" y="${TITLE + graph.height + 12}" font-family="sans-serif" font-size="10" fill="${colours.quiet}">${escaped(note)}</text>`;
  return { svg: `${head}<g transform="translate(0 ${TITLE})">${parts.join("")}</g>${foot}`, width: graph.width, height: TITLE + graph.height + 18 };
}

const HEAD = "document,layer,scope,output_side,output_position,output_token,input_side,input_position,input_token,value";

/** The edges shown, one per line; `value` is the share of the output. All tokens of the other side share one line. */
export function pathCsv(paths: readonly { name: string; shown: Shown }[]): string {
  const lines = [HEAD];
  for (const { name, shown } of paths) {
    const { side, scope } = shown;
    for (const { layer, from, to, value } of shown.edges) {
      const after = side.rows[to];
      const before = from === OTHER ? [shown.other ?? "", "", ""] : [side.side, String(side.rows[from].position + 1), side.rows[from].token];
      lines.push([name, String(side.layers[layer] + 1), scope, after.side, String(after.position + 1), after.token, ...before].map(field).join(",") + `,${Number(value.toPrecision(7))}`);
    }
  }
  return lines.join("\r\n") + "\r\n";
}
