/** One sentence that says what stands out on the page. Every number in it is computed from the maps on display. */

import type { Label, Side } from "../data/header";
import { percent } from "../look/numbers";
import { plainScope } from "../look/line";
import { rowSum } from "../maths/flow";
import type { Picks } from "../maths/plane";
import { strongest } from "../maths/strongest";
import { origins, pathAt } from "./path";
import type { Place, Store } from "./store.svelte";

export type Piece = { text: string } | { token: Label } | { value: string };

const text = (words: string): Piece => ({ text: words });
const token = (label: Label): Piece => ({ token: label });
const value = (share: number): Piece => ({ value: percent(share) });

export interface TopLink {
  row: number; // in the document
  column: number;
  share: number; // of the row
}

/** The link between two tokens that has the largest share of its row; between special tokens only if there is no other. */
export function topLink(values: Float32Array, side: Side, picks: Picks): TopLink | null {
  const width = side.columns.length;
  let best: TopLink | null = null;
  for (const special of [false, true]) {
    picks.rows.forEach((row, r) => {
      if (side.rows[row].special && !special) return;
      const sum = rowSum(values, width, row);
      picks.columns.forEach((column, c) => {
        if (c === picks.own[r] || (side.columns[column].special && !special)) return;
        const share = sum > 0 ? values[row * width + column] / sum : 0;
        if (share > (best?.share ?? 0)) best = { row, column, share };
      });
    });
    if (best) return best;
  }
  return best;
}

/** The mean share that the shown outputs keep of their own tokens; NaN without own tokens. */
export function meanOwnShare(values: Float32Array, side: Side, picks: Picks): number {
  const width = side.columns.length;
  let sum = 0;
  let count = 0;
  picks.rows.forEach((row, r) => {
    const total = rowSum(values, width, row);
    if (picks.own[r] < 0 || !(total > 0)) return;
    sum += values[row * width + picks.columns[picks.own[r]]] / total;
    count++;
  });
  return count ? sum / count : NaN;
}

/** The attention that a scope measures alone, and the other of its two quantities. */
function attentionOf(side: Side, scope: string): { kind: string; other: string | null } | null {
  const found = side.components.find((one) => one.kind.endsWith("attention") && (one.norms === scope || one.weights === scope));
  if (!found) return null;
  const other = found.norms === scope ? found.weights : found.norms;
  return { kind: found.kind, other: other !== null && side.scopes.includes(other) ? other : null };
}

function ofDifference(store: Store, place: Place): Piece[] {
  const plane = store.planeAt(place);
  if (!plane) return [];
  const side = store.sideAt(place);
  const picks = store.picksAt(place);
  const [more] = strongest(plane, 1, 1);
  const [less] = strongest(plane, 1, -1);
  const link = (cell: typeof more): Piece[] => [token(side.columns[picks.columns[cell.column]]), text(" → "), token(side.rows[picks.rows[cell.row]])];
  const points = (change: number): Piece => ({ value: `${Math.abs(100 * change).toFixed(1)} points` });
  return [
    text(`From ${plainScope(place.against!, side)} to ${plainScope(place.scope, side)}, `),
    ...(more ? [...link(more), text(" gains most, "), points(more.value)] : [text("no link between two tokens gains")]),
    ...(less ? [text("; "), ...link(less), text(" loses most, "), points(less.value)] : []),
    text(store.view.per === "output" ? " of what the output receives." : " of what the input gives."),
  ];
}

function ofPath(store: Store, place: Place): Piece[] {
  const shown = pathAt(store, place);
  if (!shown) return [];
  const found = origins(shown).slice(0, 3);
  const output = shown.side.rows[shown.row];
  const listed = found.flatMap(({ label, value: share }, k) => [text(k ? (k === found.length - 1 ? " and " : ", ") : ""), value(share), text(" from "), token(label)]);
  return [text("Traced back through all layers, the output "), token(output), text(" has "), ...listed, text(".")];
}

function ofMap(store: Store, place: Place): Piece[] {
  const values = store.valuesAt(place);
  if (!values) return [];
  const side = store.sideAt(place);
  const picks = store.picksAt(place);
  const found = topLink(values, side, picks);
  if (!found) return [text("Nothing flows between two tokens here.")];
  const from = token(side.columns[found.column]);
  const to = token(side.rows[found.row]);
  const start = place.head === null ? [] : [text(`In head ${place.head + 1}, `)];
  const attention = attentionOf(side, place.scope);
  if (!attention) {
    const own = meanOwnShare(values, side, picks);
    const kept = Number.isNaN(own) ? [] : [text("A token keeps "), value(own), text(" of itself on average; ")];
    return [...start, ...kept, text(kept.length || start.length ? "the largest link gives " : "The largest link gives "), to, text(" "), value(found.share), text(" from "), from, text(".")];
  }
  const others = attention.other === null ? undefined : place.head === null ? place.doc.map(side, attention.other, place.layer) : place.doc.head(side, attention.other, place.layer, side.heads.indexOf(place.head));
  const width = side.columns.length;
  const beside = others && others[found.row * width + found.column] / rowSum(others, width, found.row);
  if (place.scope.endsWith("-W")) {
    const gets = beside === undefined ? [] : [text(`, and gets ${beside < 0.8 * found.share ? "only " : ""}`), value(beside), text(` of its ${attention.kind} output from it`)];
    return [...start, to, text(" puts "), value(found.share), text(` of its ${attention.kind} weight on `), from, ...gets, text(".")];
  }
  const only = beside !== undefined && beside < 0.8 * found.share;
  const weighs = beside === undefined ? [] : [text(only ? ", but only " : ", and "), value(beside), text(" of its weight")];
  return [...start, from, text(" gives "), to, text(" "), value(found.share), text(` of its ${attention.kind} output`), ...weighs, text(".")];
}

export function insightOf(store: Store): Piece[] {
  const { main, view } = store;
  if (!main) return [];
  if (view.path) return ofPath(store, main);
  return view.against === null ? ofMap(store, main) : ofDifference(store, main);
}
