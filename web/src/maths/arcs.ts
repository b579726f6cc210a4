/** Arcs above or below a line of tokens. */

/** A flat half ellipse from `from` to `to` on the line y = `base`, at most `ceiling` high; `down`: below the line. */
export function arcPath(from: number, to: number, base: number, ceiling: number, down = false): string {
  const span = Math.abs(to - from);
  const height = Math.min(ceiling, 6 + 2.6 * Math.sqrt(span));
  const lean = Math.min(span / 2, Math.max(6, span * 0.18));
  const way = to >= from ? 1 : -1;
  const top = base + (down ? 1 : -1) * height * 1.25;
  return `M${round(from)} ${base}C${round(from + way * lean)} ${round(top)} ${round(to - way * lean)} ${round(top)} ${round(to)} ${base}`;
}

/** Stroke width and opacity of an arc, from its value relative to the largest. */
export function arcWeight(value: number, top: number): { width: number; strength: number } {
  const strength = top > 0 ? Math.min(1, value / top) : 0;
  return { width: round(0.75 + 2.75 * strength), strength: round(0.25 + 0.65 * Math.sqrt(strength)) };
}

const round = (x: number): number => Math.round(x * 10) / 10;
