/** The enlarged map on its canvas: coloured once, then redrawn on every move; a new map fades in. */

import type { Plane } from "../maths/plane";
import { pool } from "../maths/pool";
import { put } from "./canvas";
import { cssOfPixel } from "./colours";
import type { Frame, Sight } from "./frame";
import { paint, type Ink } from "./paint";
import { discRadius, isDeep, LEGIBLE, minusAt } from "./shapes";

interface Extras {
  gap: string; // colour between cells
  ink: string; // colour of shapes in cells
  rule: string; // colour of the rule between two sides
  seam: number; // column before which a rule is drawn
  fade: string; // name of the map: a map with another name fades in
}

const FADE = 220; // milliseconds
const still = (): boolean => matchMedia("(prefers-reduced-motion: reduce)").matches;

export class Sheet {
  private now = document.createElement("canvas");
  private old = document.createElement("canvas");
  private plane: Plane | null = null;
  private ink: Ink | null = null;
  private dots = 0;
  private discs = false;
  private name = "";
  private fading = 0;

  show(canvas: HTMLCanvasElement, plane: Plane, ink: Ink, frame: Frame, sight: Sight, extras: Extras): void {
    const ratio = Math.min(3, devicePixelRatio || 1);
    const width = Math.max(1, Math.round(frame.width * ratio));
    const height = Math.max(1, Math.round(frame.height * ratio));
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    const dots = Math.min(1, sight.cell * ratio); // cells smaller than a pixel are pooled
    const discs = ink.diagonal === "own" && sight.cell >= LEGIBLE;
    const changed = plane !== this.plane || ink !== this.ink || dots !== this.dots || discs !== this.discs;
    const fades = changed && this.name !== "" && this.name !== extras.fade && this.plane?.cells.length === plane.cells.length;
    if (changed) {
      if (fades) [this.now, this.old] = [this.old, this.now];
      const small = pool(plane, Math.ceil(plane.rows * dots), Math.ceil(plane.columns * dots), ink.diagonal !== "show");
      put(this.now, paint(small, discs ? { ...ink, diagonal: "hide" } : ink), small.columns, small.rows);
      [this.plane, this.ink, this.dots, this.discs, this.name] = [plane, ink, dots, discs, extras.fade];
    }
    cancelAnimationFrame(this.fading);
    if (!fades || still()) return this.draw(canvas, plane, frame, sight, extras, ratio, 1);
    const start = performance.now();
    const step = () => {
      const share = Math.min(1, (performance.now() - start) / FADE);
      this.draw(canvas, plane, frame, sight, extras, ratio, share);
      if (share < 1) this.fading = requestAnimationFrame(step);
    };
    step();
  }

  private draw(canvas: HTMLCanvasElement, plane: Plane, frame: Frame, sight: Sight, extras: Extras, ratio: number, share: number): void {
    const context = canvas.getContext("2d");
    if (!context) return;
    const cell = sight.cell * ratio;
    const { width, height } = canvas;
    context.clearRect(0, 0, width, height);
    context.imageSmoothingEnabled = false;
    const picture = (source: HTMLCanvasElement) => {
      const x = (sight.x / plane.columns) * source.width;
      const y = (sight.y / plane.rows) * source.height;
      const across = (frame.width / sight.cell / plane.columns) * source.width;
      const down = (frame.height / sight.cell / plane.rows) * source.height;
      context.drawImage(source, x, y, across, down, 0, 0, width, height);
    };
    if (share < 1) picture(this.old);
    context.globalAlpha = share;
    picture(this.now);
    context.globalAlpha = 1;
    if (sight.cell >= LEGIBLE) {
      const line = Math.max(1, Math.round(ratio));
      context.fillStyle = extras.gap;
      for (let c = Math.ceil(sight.x); c <= plane.columns; c++) context.fillRect(Math.round((c - sight.x) * cell) - line, 0, line, height);
      for (let r = Math.ceil(sight.y); r <= plane.rows; r++) context.fillRect(0, Math.round((r - sight.y) * cell) - line, width, line);
      if (this.ink) this.shapes(context, plane, this.ink, frame, sight, extras, cell, line);
    }
    if (extras.seam > 0) {
      const middle = (extras.seam - sight.x) * cell - ratio / 2;
      context.fillStyle = extras.gap;
      context.fillRect(Math.round(middle - 2.5 * ratio), 0, Math.round(5 * ratio), height);
      context.fillStyle = extras.rule;
      context.fillRect(Math.round(middle - 0.5 * ratio), 0, Math.max(1, Math.round(ratio)), height);
    }
  }

  /** Discs of own tokens and minus signs, in the visible cells. */
  private shapes(context: CanvasRenderingContext2D, plane: Plane, ink: Ink, frame: Frame, sight: Sight, extras: Extras, cell: number, line: number): void {
    const { scale, palette } = ink;
    if (!this.discs && !scale.signed) return;
    const last = { row: Math.min(plane.rows, Math.ceil(sight.y + frame.height / sight.cell)), column: Math.min(plane.columns, Math.ceil(sight.x + frame.width / sight.cell)) };
    for (let r = Math.floor(sight.y); r < last.row; r++)
      for (let c = Math.floor(sight.x); c < last.column; c++) {
        const value = plane.cells[r * plane.columns + c];
        const own = plane.own[r] === c;
        const [x, y] = [(c + 0.5 - sight.x) * cell - line / 2, (r + 0.5 - sight.y) * cell - line / 2];
        if (own && ink.diagonal === "hide") continue;
        if (own && this.discs) {
          context.fillStyle = scale.signed ? cssOfPixel(palette.diverging[value < 0 ? 64 : palette.diverging.length - 65]) : extras.ink;
          context.beginPath();
          context.arc(x, y, value === 0 ? 0 : Math.max(line, discRadius(value, scale) * cell), 0, 2 * Math.PI);
          context.fill();
        }
        const place = own && this.discs ? (value < 0 ? 0 : null) : minusAt(value, scale);
        if (place === null || !scale.signed) continue;
        context.fillStyle = isDeep(place) ? extras.gap : extras.ink;
        const wide = Math.max(3 * line, 0.3 * cell);
        context.fillRect(Math.round(x - wide / 2), Math.round(y - line / 2), Math.round(wide), line);
      }
  }
}
