/** What the colours of a map mean, in words: beside the map, and in exported figures. */

import { quantity } from "../look/line";
import { tickText } from "../look/numbers";
import type { Ink } from "../look/paint";
import type { Place, Store } from "./store.svelte";

/** The quantity on display. */
function shownQuantity(store: Store, place: Place): string {
  const { per, norm } = store.view;
  if (place.against !== null) return `change in share, ${per === "output" ? "each output" : "each input"} scaled to sum to 1`;
  if (norm === "raw") return quantity(place.scope);
  return norm === "row" ? `share of the row: of all that an output receives (${quantity(place.scope)})` : `share of the column: of all that an input gives (${quantity(place.scope)})`;
}

/** The maps that share the colour scale. */
function sharedBy(store: Store, place: Place): string {
  const { reach } = store.view;
  if (place.head !== null) return reach === "map" ? "this head" : reach === "layer" ? "all heads of this layer" : "all heads of all layers";
  if (reach === "map" || (reach === "layer" && place.against !== null)) return store.second ? "both maps" : "this map";
  return reach === "all" ? "all layers" : "this layer";
}

/** Whether the values on display are shares. */
export const showsShares = (store: Store, place: Place): boolean => place.against !== null || store.view.norm !== "raw";

/** Whether own tokens are on a scale of their own; without own tokens among the columns there is none. */
export const ownApart = (store: Store, place: Place, ink: Ink): boolean => ink.diagonal === "own" && store.picksAt(place).own.some((column) => column >= 0);

/** `discs`: own tokens are drawn as discs, because the cells are large enough. */
export function legendOf(store: Store, place: Place, ink: Ink, discs: boolean): string {
  const { scale } = ink;
  const parts = [`${shownQuantity(store, place)}${scale.log ? ", log" : ""}`, `scale shared by ${sharedBy(store, place)}`];
  if (ownApart(store, place, ink)) parts.push(`${discs ? "discs" : scale.signed ? "diagonal" : "grey"}: own tokens on a separate scale${discs ? ", by area" : ""}`);
  if (ink.diagonal === "hide") parts.push("own tokens hidden");
  if (!scale.signed && scale.top > scale.end * 1.005) parts.push(`beyond the scale: up to ${tickText(scale.top, showsShares(store, place))}`);
  return parts.join("; ");
}
