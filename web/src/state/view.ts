/** The view, and the steps from one view to the next: pure functions of a view and a header. */

import { headScopes, type Header, type Side } from "../data/header";
import type { Per } from "../maths/difference";
import type { Norm } from "../maths/plane";
import type { Diagonal } from "../maths/scale";

/** Which maps share a colour scale: this map alone, the maps of a layer, or all maps. */
export type Reach = "map" | "layer" | "all";

/** A second map next to the first. */
export interface Beside {
  layer: number;
  scope: string;
  linked: boolean; // follows the first map
}

export interface View {
  band: string; // a side, or "cross": the encoder tokens in the decoder's maps
  layer: number; // counted from 0, as in the model
  scope: string;
  against: string | null; // difference mode: the scope to subtract
  per: Per;
  heads: boolean; // the strip of heads is open
  head: number | null; // show one head instead of the whole layer
  norm: Norm;
  log: boolean;
  diagonal: Diagonal;
  special: boolean;
  reach: Reach;
  token: string | null; // "side:position"
  cell: [number, number] | null; // row and column in the document
  beside: Beside | null;
  matrix: boolean; // show a vision map as a matrix of patches instead of over the image
  path: boolean; // show the path of a token through all layers instead of a map
  least: number | null; // the smallest edge of a path to show, as a share of the output; null: chosen to be readable
}

export const START: View = {
  band: "",
  layer: 0,
  scope: "",
  against: null,
  per: "output",
  heads: false,
  head: null,
  norm: "row",
  log: false,
  diagonal: "own",
  special: true,
  reach: "layer",
  token: null,
  cell: null,
  beside: null,
  matrix: false,
  path: false,
  least: null,
};

export const CROSS = "cross"; // the band of the encoder tokens in the decoder's maps

/** The bands of a document: its sides and, for encoder-decoders, "cross". */
export function bandsOf(header: Header): string[] {
  const crosses = header.sides.some((side) => side.columns.some((label) => label.side !== side.side));
  const sides = [...header.sides].sort((a, b) => Number(a.side === "decoder") - Number(b.side === "decoder"));
  return [...sides.map((side) => side.side), ...(crosses ? [CROSS] : [])];
}

/** The side shown in a band. */
export function sideOf(header: Header, band: string): Side {
  const side = band === CROSS ? header.sides.find((one) => one.columns.some((label) => label.side !== one.side)) : header.sides.find((one) => one.side === band);
  return side ?? header.sides[0];
}

/** The side whose columns a band is limited to; undefined if it shows all columns. */
export const columnsOf = (header: Header, band: string): string | undefined =>
  band === CROSS ? sideOf(header, band).columns.find((label) => label.side !== sideOf(header, band).side)?.side : undefined;

/** The scopes of a band; "cross" has only those that involve encoder tokens. */
export function scopesOf(header: Header, band: string): string[] {
  const side = sideOf(header, band);
  if (band !== CROSS) return side.scopes;
  const first = side.components.findIndex((one) => one.kind === "cross-attention");
  const before = new Set(side.components.slice(0, Math.max(first, 0)).flatMap((one) => [one.norms, one.weights]));
  const found = side.scopes.filter((scope) => !before.has(scope));
  return found.length ? found : side.scopes;
}

/** The scope whose maps a path follows: the whole layer, or the last available norms. Null if there is no path: for
 *  images, or if tokens or intermediate layers are missing. */
export function pathScope(side: Side): string | null {
  const whole = side.rows.length === side.columns.filter((label) => label.side === side.side).length;
  const gapless = side.layers.every((layer, k) => layer === side.layers[0] + k);
  if (side.grid || !whole || !gapless) return null;
  const layer = side.aliases.layer;
  return side.scopes.includes(layer) ? layer : (side.scopes.findLast((scope) => scope.endsWith("-N")) ?? null);
}

const within = <T>(list: readonly T[], wanted: T, otherwise: T): T => (list.includes(wanted) ? wanted : otherwise);

/** The initial scope: attention alone. */
const opening = (scopes: readonly string[]): string => scopes.find((scope) => scope.endsWith("-N")) ?? scopes[0];

/** The corresponding scope in another document: the same name or the same alias. */
export function counterpart(scope: string, from: Side, to: Side): string {
  if (to.scopes.includes(scope)) return scope;
  const alias = Object.keys(from.aliases).find((name) => from.aliases[name] === scope && to.scopes.includes(to.aliases[name]));
  if (alias) return to.aliases[alias];
  const place = from.scopes.indexOf(scope) / Math.max(1, from.scopes.length - 1);
  return to.scopes[Math.round(place * (to.scopes.length - 1))] ?? to.scopes[0];
}

/** The view with everything replaced that this document does not have. */
export function settled(view: View, header: Header): View {
  const bands = bandsOf(header);
  const band = within(bands, view.band, header.sides[0].side);
  const side = sideOf(header, band);
  const scopes = scopesOf(header, band);
  const scope = within(scopes, side.aliases[view.scope] ?? view.scope, opening(scopes));
  const against = view.against !== null && scopes.includes(view.against) && view.against !== scope ? view.against : null;
  const headed = against === null && headScopes(side).includes(scope);
  const known = view.token !== null && [...side.rows, ...side.columns].some((label) => `${label.side}:${label.position}` === view.token);
  const inside = view.cell !== null && view.cell[0] < side.rows.length && view.cell[1] < side.columns.length;
  return {
    ...view,
    band,
    scope,
    against,
    layer: within(side.layers, view.layer, side.layers[0]),
    head: headed && view.head !== null && side.heads.includes(view.head) ? view.head : null,
    token: known ? view.token : null,
    cell: inside ? view.cell : null,
    path: view.path && pathScope(side) !== null,
  };
}

/** Switch to another scope. A difference from the previous scope is kept up. */
export function atScope(view: View, header: Header, scope: string): View {
  const scopes = scopesOf(header, view.band);
  const tandem = view.against !== null && view.against === before(scopes, view.scope);
  const against = tandem ? before(scopes, scope) : view.against;
  return settled({ ...view, path: false, scope, against: against === scope ? before(scopes, scope) : against }, header);
}

/** The nearest earlier scope of the same kind, weights or norms. */
export function before(scopes: readonly string[], scope: string): string | null {
  const kind = scope.slice(-2);
  const kin = scopes.filter((one) => one.endsWith(kind));
  const place = kin.indexOf(scope);
  return kin[place - 1] ?? null;
}

export function stepScope(view: View, header: Header, by: number): View {
  const scopes = scopesOf(header, view.band);
  const place = scopes.indexOf(view.scope) + by;
  return place < 0 || place >= scopes.length ? view : atScope(view, header, scopes[place]);
}

export function stepLayer(view: View, header: Header, by: number): View {
  const { layers } = sideOf(header, view.band);
  const place = layers.indexOf(view.layer) + by;
  return place < 0 || place >= layers.length ? view : settled({ ...view, path: false, layer: layers[place] }, header);
}

/** The next frame of the animation: scope by scope, then layer by layer; null at the end. */
export function following(view: View, header: Header): View | null {
  const next = stepScope(view, header, 1);
  if (next !== view) return next;
  const { layers } = sideOf(header, view.band);
  const place = layers.indexOf(view.layer);
  if (place + 1 >= layers.length) return null;
  const scopes = scopesOf(header, view.band);
  const first = view.against === null ? scopes[0] : (scopes.find((scope) => before(scopes, scope)) ?? scopes[0]);
  return atScope({ ...view, layer: layers[place + 1] }, header, first);
}

/** The first frame of the animation. */
export function opened(view: View, header: Header): View {
  const { layers } = sideOf(header, view.band);
  return atScope({ ...view, layer: layers[0] }, header, scopesOf(header, view.band)[0]);
}

/** Toggle difference mode: from the previous scope to this one, or from the first scope to the next. */
export function toggleDifference(view: View, header: Header): View {
  if (view.against !== null) return view.path ? { ...view, path: false } : { ...view, against: null };
  const scopes = scopesOf(header, view.band);
  const earlier = before(scopes, view.scope);
  if (earlier) return settled({ ...view, path: false, against: earlier, head: null }, header);
  const next = scopes.find((scope) => before(scopes, scope) === view.scope);
  return next ? settled({ ...view, path: false, against: view.scope, scope: next, head: null }, header) : view;
}

const turn = <T>(list: readonly T[], now: T): T => list[(list.indexOf(now) + 1) % list.length];
export const NORMS = ["row", "raw", "column"] as const;
export const DIAGONALS = ["show", "hide", "own"] as const;
export const nextNorm = (view: View): View => ({ ...view, norm: turn<Norm>(NORMS, view.norm) });
export const nextDiagonal = (view: View): View => ({ ...view, diagonal: turn<Diagonal>(DIAGONALS, view.diagonal) });

/** The row and column of the chosen token; -1 if it has none. */
export function tokenPlaces(side: Side, token: string | null): { row: number; column: number } {
  const is = (label: { side: string; position: number }) => `${label.side}:${label.position}` === token;
  return token === null ? { row: -1, column: -1 } : { row: side.rows.findIndex(is), column: side.columns.findIndex(is) };
}
