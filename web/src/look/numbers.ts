/** Numbers as text. */

export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(digits))) : value.toExponential(Math.max(0, digits - 2));
  return text.replace("-", "−").replace("e+", "e");
}

/** A tick of a scale: a share as a percentage, else the number. */
export const tickText = (value: number, share: boolean): string => (share ? `${number(100 * value, 2)} %` : number(value, 2));

export const signed = (value: number, digits = 3): string => (value > 0 ? `+${number(value, digits)}` : number(value, digits));

export const percent = (share: number | null | undefined, digits = 1): string =>
  share === null || share === undefined || Number.isNaN(share) ? "–" : `${(100 * share).toFixed(share < 0.0995 || share >= 0.9995 ? digits : 0)} %`;

/** A chosen threshold as a percentage, without the rounding of measured shares. */
export const exactly = (share: number): string => `${Number((100 * share).toPrecision(3))} %`;

export const count = (k: number, thing: string): string => `${k} ${thing}${k === 1 ? "" : "s"}`;
