/** Labels on a line without overlaps: earlier labels take precedence, and all stay within the line. */

export interface Wanted {
  at: number; // centre
  wide: number;
}

export function spaced<T extends Wanted>(labels: readonly T[], width: number): T[] {
  const kept: T[] = [];
  for (const one of labels) {
    const at = Math.min(Math.max(one.at, one.wide / 2), width - one.wide / 2);
    if (kept.every((other) => Math.abs(other.at - at) >= (other.wide + one.wide) / 2)) kept.push({ ...one, at });
  }
  return kept;
}
