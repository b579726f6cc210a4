/** Pointer gestures on a map: tap, drag, pinch to zoom. */

interface Acts {
  move(dx: number, dy: number): void;
  zoom(factor: number, x: number, y: number): void;
  tap(event: PointerEvent): void;
}

const SLACK = 4; // pixels that a tap may move

export class Fingers {
  private readonly at = new Map<number, { x: number; y: number }>();
  private start: { x: number; y: number } | null = null;
  private drags = false;
  private movable = false;

  constructor(private readonly acts: Acts) {}

  down(event: PointerEvent, movable: boolean): void {
    this.at.set(event.pointerId, { x: event.clientX, y: event.clientY });
    this.movable = movable;
    this.drags = this.at.size > 1;
    this.start = { x: event.clientX, y: event.clientY };
    if (movable || this.at.size > 1) (event.target as Element).setPointerCapture(event.pointerId);
  }

  /** Handle a move; true if it is a drag rather than a hover. */
  move(event: PointerEvent): boolean {
    const before = this.at.get(event.pointerId);
    if (!before || !this.start) return false;
    const now = { x: event.clientX, y: event.clientY };
    if (this.at.size === 2) {
      const other = [...this.at].find(([id]) => id !== event.pointerId)![1];
      const gap = (a: { x: number; y: number }) => Math.max(1, Math.hypot(a.x - other.x, a.y - other.y));
      this.acts.zoom(gap(now) / gap(before), (now.x + other.x) / 2, (now.y + other.y) / 2);
    } else if (this.movable) {
      this.drags ||= Math.hypot(now.x - this.start.x, now.y - this.start.y) > SLACK;
      if (this.drags) this.acts.move(now.x - before.x, now.y - before.y);
    }
    if (this.drags || this.at.size === 2) this.at.set(event.pointerId, now);
    return this.drags;
  }

  up(event: PointerEvent, lost = false): void {
    const known = this.at.delete(event.pointerId);
    const near = this.start && Math.hypot(event.clientX - this.start.x, event.clientY - this.start.y) <= SLACK;
    if (known && near && !this.drags && !lost && !this.at.size) this.acts.tap(event);
    if (!this.at.size) {
      this.start = null;
      this.drags = false;
    }
  }
}
