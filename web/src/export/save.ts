/** Save what is shown as a file. */

import { put } from "../look/canvas";
import { paint } from "../look/paint";
import { pool } from "../maths/pool";
import type { Place, Store } from "../state/store.svelte";
import { csvOf, type Sheet } from "./csv";
import { MOST, svgOf, type Colours, type Panel } from "./svg";

export type Kind = "svg" | "png" | "csv";

const PAPER: Record<"light" | "dark", Colours> = {
  light: { paper: "#fcfbf8", ink: "#1e1d1b", quiet: "#66625b", soft: "#f3f1ec" },
  dark: { paper: "#16181b", ink: "#e7e5e0", quiet: "#a5a29b", soft: "#23272c" },
};

function titleOf(place: Place): string {
  const { name } = place.doc.header.model;
  const scope = place.against === null ? place.scope : `${place.against} to ${place.scope}`;
  return `${name}, layer ${place.layer + 1}, ${scope}${place.head === null ? "" : `, head ${place.head + 1}`}`;
}

function sheetOf(store: Store, place: Place): Sheet | null {
  const plane = store.planeAt(place);
  if (!plane) return null;
  const side = store.sideAt(place);
  const picks = store.picksAt(place);
  return {
    name: place.doc.header.model.name,
    layer: place.layer,
    scope: place.against === null ? (place.head === null ? place.scope : `${place.scope} head ${place.head + 1}`) : `${place.scope} - ${place.against}`,
    rows: Array.from(picks.rows, (i) => side.rows[i]),
    columns: Array.from(picks.columns, (j) => side.columns[j]),
    plane,
  };
}

function panelOf(store: Store, place: Place): Panel | null {
  const sheet = sheetOf(store, place);
  if (!sheet) return null;
  const { rows, columns, plane } = sheet;
  const ink = store.inkAt(place);
  const seam = columns.findIndex((label, k) => k > 0 && label.side !== columns[k - 1].side);
  const made: Panel = { title: titleOf(place), rows, columns, plane, ink, seam };
  if (Math.max(plane.rows, plane.columns) > MOST) {
    const canvas = document.createElement("canvas");
    put(canvas, paint(pool(plane, plane.rows, plane.columns, ink.diagonal !== "show"), ink), plane.columns, plane.rows);
    made.image = canvas.toDataURL("image/png");
  }
  return made;
}

/** An SVG picture as PNG, twice as fine. */
async function pngOf(svg: { text: string; width: number; height: number }): Promise<Blob> {
  const image = new Image();
  const address = URL.createObjectURL(new Blob([svg.text], { type: "image/svg+xml" }));
  try {
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = 2 * svg.width;
    canvas.height = 2 * svg.height;
    canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((done, fail) => canvas.toBlob((blob) => (blob ? done(blob) : fail(new Error("This browser made no PNG."))), "image/png"));
  } finally {
    URL.revokeObjectURL(address);
  }
}

function download(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** A name that any file system takes. */
const fileName = (place: Place): string => `normscope ${titleOf(place)}`.replace(/[^\w.-]+/g, "-").slice(0, 100);

export async function save(store: Store, kind: Kind): Promise<void> {
  const places = [store.main, store.second].filter((place) => place !== null);
  const some = <T>(list: (T | null)[]) => list.filter((one): one is T => one !== null);
  if (!places.length) return;
  let blob: Blob;
  if (kind === "csv") blob = new Blob([csvOf(some(places.map((place) => sheetOf(store, place))))], { type: "text/csv;charset=utf-8" });
  else {
    const svg = svgOf(some(places.map((place) => panelOf(store, place))), PAPER[store.shade]);
    blob = kind === "svg" ? new Blob([svg.text], { type: "image/svg+xml" }) : await pngOf(svg);
  }
  download(blob, `${fileName(places[0])}.${kind}`);
}
