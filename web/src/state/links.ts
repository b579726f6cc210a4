/** The links drawn as arcs: those of the chosen token, or the strongest links of the map. */

import { sources, targets } from "../maths/flow";
import { strongest } from "../maths/strongest";
import type { Store } from "./store.svelte";

export interface Link {
  from: number; // column index in the document
  to: number;
  value: number;
  way: "in" | "out";
}

const MANY = 12;

export function linksOf(store: Store): Link[] {
  const { main, side } = store;
  const values = main && store.valuesAt(main);
  if (!main || !side || !values) return [];
  const picks = store.picksAt(main);
  const placeOfRow = (i: number) => side.columns.findIndex((label) => label.side === side.rows[i].side && label.position === side.rows[i].position);
  const { row, column } = store.chosen;
  if (row < 0 && column < 0) {
    const plane = store.planeAt(main);
    const cells = plane ? strongest(plane, MANY) : [];
    return cells.map((cell) => ({ from: picks.columns[cell.column], to: placeOfRow(picks.rows[cell.row]), value: cell.value, way: "in" }));
  }
  const columns = new Set(picks.columns);
  const rows = new Set(picks.rows);
  const mine = row < 0 ? -1 : placeOfRow(row);
  const into = row < 0 ? [] : sources(values, side.columns.length, row, MANY, (j) => columns.has(j) && j !== mine);
  const out = column < 0 ? [] : targets(values, side.columns.length, column, MANY, (i) => rows.has(i) && i !== row);
  return [
    ...into.map((flow): Link => ({ from: flow.place, to: mine, value: flow.value, way: "in" })),
    ...out.map((flow): Link => ({ from: column, to: placeOfRow(flow.place), value: flow.value, way: "out" })),
  ];
}
