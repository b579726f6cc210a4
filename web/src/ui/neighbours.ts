/** The same cell at neighbouring scopes. */

import type { Place, Store } from "../state/store.svelte";
import { scopesOf } from "../state/view";

export interface Neighbour {
  scope: string;
  value: number;
  here: boolean;
}

/** The cell at up to `reach` scopes of the same quantity before and after; in difference mode, at the two scopes. */
export function neighbours(store: Store, place: Place, row: number, column: number, reach = 1): Neighbour[] {
  const side = store.sideAt(place);
  const kin = scopesOf(place.doc.header, place.band).filter((scope) => scope.slice(-2) === place.scope.slice(-2));
  const at = kin.indexOf(place.scope);
  const near = kin.filter((_, k) => Math.abs(k - at) <= reach);
  const wanted = place.against === null ? near : side.scopes.filter((scope) => scope === place.against || scope === place.scope);
  return wanted.flatMap((scope) => {
    const values = place.doc.map(side, scope, place.layer);
    return values ? [{ scope, value: values[row * side.columns.length + column], here: scope === place.scope }] : [];
  });
}
