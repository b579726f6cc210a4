/** The path on display: that of the chosen token, or of the token at which the target is read. */

import type { Label, Side } from "../data/header";
import { carried, edgesOf, MOST, pathTo, readable, type Edge, type Layers, type Path } from "../maths/path";
import { rowRead } from "../maths/scores";
import { Kept } from "./kept";
import type { Place, Store } from "./store.svelte";
import { pathScope, tokenPlaces } from "./view";

export interface Shown {
  side: Side;
  scope: string;
  row: number; // the output token
  path: Path;
  least: number; // the smallest edge to draw, as a share of the output
  edges: Edge[]; // the edges drawn, strongest first
  left: number; // edges above `least` that are not drawn because there are too many
  carried: number; // the share of the whole flow carried by the drawn edges
  away: number; // the share of the output that comes from the other side
  other: string | null; // the name of that side
}

interface Found {
  layers: Layers;
  path: Path;
  readable: number;
}

const found = new Kept<Found>(24);
const drawn = new Kept<Shown>(24);

/** The column of each row's token; -1 if it has none. */
const ownColumns = (side: Side): Int32Array => {
  const at = new Map(side.columns.map((label, j) => [`${label.side}:${label.position}`, j]));
  return Int32Array.from(side.rows, (label) => at.get(`${label.side}:${label.position}`) ?? -1);
};

/** The path at a place; undefined until its maps are loaded. */
export function pathAt(store: Store, place: Place): Shown | undefined {
  const side = store.sideAt(place);
  const scope = pathScope(side);
  const own = ownColumns(side);
  if (scope === null || own.includes(-1)) return undefined;
  const maps = side.layers.map((layer) => place.doc.map(side, scope, layer, true));
  if (!maps.every((map) => map !== undefined)) return undefined;
  const chosen = tokenPlaces(side, store.view.token).row;
  const row = chosen >= 0 ? chosen : rowRead(place.doc.header.flow, side);
  const key = `${place.doc.id}|${side.side}|${row}`;
  const { layers, path, readable: few } = found.get(key, () => {
    const layers: Layers = { maps, width: side.columns.length, own };
    const path = pathTo(layers, row);
    return { layers, path, readable: readable(layers, path) };
  });
  const least = store.view.least ?? few;
  return drawn.get(`${key}|${least}`, () => {
    const all = edgesOf(layers, path, least);
    const edges = all.slice(0, MOST);
    const away = path.others.reduce((sum, layer) => sum + layer.reduce((a, b) => a + b, 0), 0);
    const other = side.columns.find((label) => label.side !== side.side)?.side ?? null;
    return { side, scope, row, path, least, edges, left: all.length - edges.length, carried: carried(path, edges), away, other };
  });
}

/** The origins of an output: the tokens before the first layer, and the tokens of the other side. */
export function origins({ side, path }: Shown): { label: Label; value: number }[] {
  const own = side.rows.map((label, i) => ({ label, value: path.nodes[0][i] }));
  const others = side.columns.flatMap((label, j) => (label.side === side.side ? [] : [{ label, value: path.others.reduce((sum, layer) => sum + layer[j], 0) }]));
  return [...own, ...others].sort((a, b) => b.value - a.value);
}
