/** Colour scales as tables of pixels, computed in OKLab: even in lightness, and safe for colour-blind readers because
 *  they only run between blue and yellow or blue and orange. The strong end is dark on a light page, light on a dark one. */

export type Theme = "light" | "dark";

type Lab = [number, number, number];
export type Rgb = [number, number, number];
const STEPS = 256;

/** OKLab to sRGB bytes. */
export function rgbOf([L, a, b]: Lab): Rgb {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((c) => {
    const light = Math.min(1, Math.max(0, c));
    const coded = light <= 0.0031308 ? 12.92 * light : 1.055 * light ** (1 / 2.4) - 0.055;
    return Math.round(255 * coded);
  }) as Rgb;
}

const pixel = ([r, g, b]: Rgb): number => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

/** A table of pixels that interpolates the given colours in even steps. */
function table(stops: readonly Lab[], steps = STEPS): Uint32Array {
  return Uint32Array.from({ length: steps }, (_, k) => {
    const at = (k / (steps - 1)) * (stops.length - 1);
    const n = Math.min(Math.floor(at), stops.length - 2);
    const mixed = stops[n].map((from, c) => from + (stops[n + 1][c] - from) * (at - n)) as Lab;
    return pixel(rgbOf(mixed));
  });
}

const PAPER_TO_BLUE: Lab[] = [
  [0.975, 0.0, 0.012],
  [0.885, -0.004, 0.062],
  [0.785, -0.004, 0.058],
  [0.68, -0.006, 0.03],
  [0.575, -0.008, -0.002],
  [0.47, -0.008, -0.034],
  [0.365, -0.01, -0.07],
  [0.26, -0.006, -0.098],
];
const NIGHT_TO_YELLOW: Lab[] = [
  [0.235, -0.008, -0.045],
  [0.335, -0.014, -0.075],
  [0.435, -0.008, -0.035],
  [0.54, -0.004, 0.0],
  [0.645, -0.002, 0.04],
  [0.745, 0.0, 0.085],
  [0.835, -0.004, 0.125],
  [0.925, -0.018, 0.155],
];
const DIVERGING: Record<Theme, Lab[]> = {
  light: [
    [0.4, -0.03, -0.135],
    [0.58, -0.035, -0.115],
    [0.78, -0.025, -0.06],
    [0.98, 0.0, 0.004],
    [0.82, 0.055, 0.095],
    [0.67, 0.105, 0.13],
    [0.5, 0.1, 0.1],
  ],
  dark: [
    [0.86, -0.03, -0.09],
    [0.66, -0.04, -0.13],
    [0.44, -0.025, -0.09],
    [0.25, 0.0, -0.006],
    [0.47, 0.08, 0.09],
    [0.68, 0.105, 0.13],
    [0.88, 0.05, 0.11],
  ],
};
const OWN: Record<Theme, Lab[]> = {
  light: [
    [0.95, 0, 0.004],
    [0.52, 0, 0.002],
  ],
  dark: [
    [0.33, 0, -0.004],
    [0.86, 0, 0.0],
  ],
};

export interface Palette {
  sequential: Uint32Array;
  diverging: Uint32Array; // zero is in the middle
  own: Uint32Array; // own tokens on their own scale
  beyond: number; // values beyond the end of the scale
}

const palette = (theme: Theme): Palette => ({
  sequential: table(theme === "light" ? PAPER_TO_BLUE : NIGHT_TO_YELLOW),
  diverging: table(DIVERGING[theme], 2 * STEPS - 1),
  own: table(OWN[theme]),
  beyond: pixel(rgbOf(theme === "light" ? [0.13, 0.01, -0.045] : [0.985, -0.004, 0.05])),
});

export const PALETTES: Record<Theme, Palette> = { light: palette("light"), dark: palette("dark") };

export const rgbOfPixel = (p: number): Rgb => [p & 255, (p >>> 8) & 255, (p >>> 16) & 255];
export const cssOfPixel = (p: number): string => `#${rgbOfPixel(p).map((c) => c.toString(16).padStart(2, "0")).join("")}`;

/** A table as a left-to-right CSS gradient. */
export function gradient(colours: Uint32Array, stops = 16): string {
  const at = (k: number) => cssOfPixel(colours[Math.round((k / stops) * (colours.length - 1))]);
  return `linear-gradient(to right, ${Array.from({ length: stops + 1 }, (_, k) => at(k)).join(", ")})`;
}
