/** The enlarged map on its canvas: coloured once, then redrawn on every move; a new map fades in. */

import type { Plane } from "../maths/plane";
import { pool } from "../maths/pool";
import { put } from "./canvas";
import type { Frame, Sight } from "./frame";
import { paint, type Ink } from "./paint";

interface Extras {
  gap: string; // colour between cells
  ground: string; // colour behind them
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
  private name = "";
  private fading = 0;

  show(canvas: HTMLCanvasElement, plane: Plane, ink: Ink, frame: Frame, sight: Sight, extras: Extras): void {
    const ratio = Math.min(3, devicePixelRatio || 1);
    const width = Math.max(1, Math.round(frame.width * ratio));
    const height = Math.max(1, Math.round(frame.height * ratio));
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    const dots = Math.min(1, sight.cell * ratio); // cells smaller than a pixel are pooled
    const changed = plane !== this.plane || ink !== this.ink || dots !== this.dots;
    const fades = changed && this.name !== "" && this.name !== extras.fade && this.plane?.cells.length === plane.cells.length;
    if (changed) {
      if (fades) [this.now, this.old] = [this.old, this.now];
      const small = pool(plane, Math.ceil(plane.rows * dots), Math.ceil(plane.columns * dots), ink.diagonal !== "show");
      put(this.now, paint(small, ink), small.columns, small.rows);
      [this.plane, this.ink, this.dots, this.name] = [plane, ink, dots, extras.fade];
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
    context.fillStyle = extras.gap;
    if (sight.cell >= 9) {
      const line = Math.max(1, Math.round(ratio));
      for (let c = Math.ceil(sight.x); c <= plane.columns; c++) context.fillRect(Math.round((c - sight.x) * cell) - line, 0, line, height);
      for (let r = Math.ceil(sight.y); r <= plane.rows; r++) context.fillRect(0, Math.round((r - sight.y) * cell) - line, width, line);
    }
    // Own tokens on their own scale are drawn as smaller squares, so that their grey is not read on the other scale.
    if (this.ink?.diagonal === "own" && sight.cell >= 9) {
      context.strokeStyle = extras.ground;
      const rim = Math.round(Math.max(1, 0.13 * cell));
      context.lineWidth = rim;
      for (let r = 0; r < plane.rows; r++) {
        if (plane.own[r] < 0) continue;
        const left = Math.round((plane.own[r] - sight.x) * cell);
        const top = Math.round((r - sight.y) * cell);
        context.strokeRect(left + rim / 2, top + rim / 2, Math.round(cell) - rim - ratio, Math.round(cell) - rim - ratio);
      }
    }
    if (extras.seam > 0) {
      const middle = (extras.seam - sight.x) * cell - ratio / 2;
      context.fillStyle = extras.gap;
      context.fillRect(Math.round(middle - 2.5 * ratio), 0, Math.round(5 * ratio), height);
      context.fillStyle = extras.rule;
      context.fillRect(Math.round(middle - 0.5 * ratio), 0, Math.max(1, Math.round(ratio)), height);
    }
  }
}
