/** Save the current view as a file. */

import { put } from "../look/canvas";
import { paint } from "../look/paint";
import { pool } from "../maths/pool";
import type { Place, Store } from "../state/store.svelte";
import { layersOf } from "../maths/scores";
import { nodeColour } from "../state/nodes";
import { legendOf, ownApart, showsShares } from "../state/legend";
import { pathAt, type Shown } from "../state/path";
import { csvOf, type Sheet } from "./csv";
import { pathCsv, pathDrawn, type PathColours, type PathPanel } from "./path";
import { MOST, sideBySide, svgOf, type Panel, type Picture } from "./svg";

export type Kind = "svg" | "png" | "csv";

const PAPER: Record<"light" | "dark", PathColours> = {
  light: { paper: "#fcfbf8", ink: "#1e1d1b", quiet: "#66625b", soft: "#f3f1ec", self: "#948f86", mix: "#a63a1c", other: "#2f4f86", idle: "#c9c4b8" },
  dark: { paper: "#16181b", ink: "#e7e5e0", quiet: "#a5a29b", soft: "#23272c", self: "#7d7a74", mix: "#f0977a", other: "#9db8ea", idle: "#454a51" },
};

function titleOf(place: Place, path?: Shown): string {
  const { name } = place.doc.header.model;
  const scope = place.against === null ? place.scope : `${place.against} to ${place.scope}`;
  if (path) return `${name}, path of ${path.side.rows[path.row].token} (${path.side.side} token ${path.side.rows[path.row].position + 1})`;
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
  const large = Math.max(plane.rows, plane.columns) > MOST;
  const made: Panel = { title: titleOf(place), rows, columns, plane, ink, seam, legend: legendOf(store, place, ink, !large), own: ownApart(store, place, ink), share: showsShares(store, place) };
  if (large) {
    const canvas = document.createElement("canvas");
    put(canvas, paint(pool(plane, plane.rows, plane.columns, ink.diagonal !== "show"), ink), plane.columns, plane.rows);
    made.image = canvas.toDataURL("image/png");
  }
  return made;
}

/** An SVG as PNG, at twice the resolution. */
async function pngOf(svg: Picture): Promise<Blob> {
  const image = new Image();
  const address = URL.createObjectURL(new Blob([svg.text], { type: "image/svg+xml" }));
  try {
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = 2 * svg.width;
    canvas.height = 2 * svg.height;
    canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((done, fail) => canvas.toBlob((blob) => (blob ? done(blob) : fail(new Error("This browser could not create a PNG."))), "image/png"));
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

/** A file name that is valid on any file system. */
const fileName = (title: string): string => `normscope ${title}`.replace(/[^\w.-]+/g, "-").slice(0, 100);

/** The exports of a view, each created on demand. */
interface Things {
  title: string;
  csv: () => string;
  svg: () => Picture;
}

const some = <T>(list: (T | null | undefined)[]): T[] => list.filter((one): one is T => one !== null && one !== undefined);

function mapsOf(store: Store, places: Place[]): Things {
  return {
    title: titleOf(places[0]),
    csv: () => csvOf(some(places.map((place) => sheetOf(store, place)))),
    svg: () => svgOf(some(places.map((place) => panelOf(store, place))), PAPER[store.shade]),
  };
}

function pathsOf(store: Store, places: Place[]): Things {
  const docs = places.filter((place, k) => k === 0 || place.doc !== places[0].doc);
  const paths = some(docs.map((place) => {
    const shown = pathAt(store, place);
    return shown && { place, shown, name: place.doc.header.model.name };
  }));
  const panel = ({ place, shown }: (typeof paths)[0]): PathPanel => {
    const scores = layersOf(place.doc.header.flow, shown.side);
    return { title: titleOf(place, shown), shown, colour: nodeColour(shown, scores, store.palette), scored: scores !== null };
  };
  const colours = PAPER[store.shade];
  return {
    title: titleOf(places[0], paths[0]?.shown),
    csv: () => pathCsv(paths),
    svg: () => sideBySide(paths.map((one) => pathDrawn(panel(one), colours)), colours),
  };
}

export async function save(store: Store, kind: Kind): Promise<void> {
  const places = some([store.main, store.second]);
  if (!places.length) return;
  const things = store.view.path ? pathsOf(store, places) : mapsOf(store, places);
  let blob: Blob;
  if (kind === "csv") blob = new Blob([things.csv()], { type: "text/csv;charset=utf-8" });
  else {
    const svg = things.svg();
    blob = kind === "svg" ? new Blob([svg.text], { type: "image/svg+xml" }) : await pngOf(svg);
  }
  download(blob, `${fileName(things.title)}.${kind}`);
}
