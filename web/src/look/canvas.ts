/** Drawing pixels on canvases. */

/** Write pixels to a small canvas, one per cell; the browser scales it. */
export function put(canvas: HTMLCanvasElement, pixels: Uint32Array, columns: number, rows: number): void {
  canvas.width = columns;
  canvas.height = rows;
  const image = new ImageData(new Uint8ClampedArray(pixels.buffer as ArrayBuffer, pixels.byteOffset, 4 * pixels.length), columns, rows);
  canvas.getContext("2d")?.putImageData(image, 0, 0);
}

const waiting = new Map<object, () => void>();
let asked = false;

/** Draw later, for at most a few milliseconds per frame; only the latest drawing of each owner is kept. */
export function soon(owner: object, draw: () => void): void {
  waiting.delete(owner);
  waiting.set(owner, draw);
  if (asked) return;
  asked = true;
  requestAnimationFrame(run);
}

/** Draw everything that waits, now. */
export function drain(): void {
  waiting.forEach((draw) => draw());
  waiting.clear();
}

export const forget = (owner: object): boolean => waiting.delete(owner);

const BUDGET = 7; // milliseconds per frame

function run(): void {
  const start = performance.now();
  for (const [owner, draw] of waiting) {
    waiting.delete(owner);
    draw();
    if (performance.now() - start > BUDGET) break;
  }
  asked = waiting.size > 0;
  if (asked) requestAnimationFrame(run);
}
