/** A signed score as a text background: blue below zero, transparent at zero, orange above; light enough to read. */

const MOST = 0.52;

export function tint(place: number | null): string {
  if (place === null || place === 0 || Number.isNaN(place)) return "transparent";
  const share = Math.round(100 * MOST * Math.min(1, Math.abs(place)) ** 0.8);
  return `color-mix(in srgb, var(--${place > 0 ? "more" : "less"}) ${share}%, transparent)`;
}
