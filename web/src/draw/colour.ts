/** Colour scales that people with any colour vision can read, interpolated in OKLab. */

export type Rgb = [number, number, number];
export type ThemeName = "light" | "dark";

function toLinear(c: number): number {
  const x = c / 255;
  return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
}

function fromLinear(x: number): number {
  const c = x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055;
  return Math.round(255 * Math.min(1, Math.max(0, c)));
}

export function parseHex(hex: string): Rgb {
  const n = parseInt(hex.slice(1), 16);
  return [n >> 16, (n >> 8) & 255, n & 255];
}

function toOklab([r8, g8, b8]: Rgb): Rgb {
  const r = toLinear(r8),
    g = toLinear(g8),
    b = toLinear(b8);
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function fromOklab([lightness, a, b]: Rgb): Rgb {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    fromLinear(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
    fromLinear(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
    fromLinear(-0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s),
  ];
}

const STEPS = 256;

function ramp(stops: string[]): Uint8ClampedArray {
  const labs = stops.map((stop) => toOklab(parseHex(stop)));
  const table = new Uint8ClampedArray(STEPS * 4);
  for (let i = 0; i < STEPS; i++) {
    const place = (i / (STEPS - 1)) * (labs.length - 1);
    const at = Math.min(labs.length - 2, Math.floor(place));
    const t = place - at;
    const low = labs[at]!,
      high = labs[at + 1]!;
    const rgb = fromOklab([0, 1, 2].map((k) => low[k]! * (1 - t) + high[k]! * t) as Rgb);
    table.set([...rgb, 255], 4 * i);
  }
  return table;
}

/** Small to large: lightness rises all the way, from the background's side in the dark theme. */
const SEQUENTIAL: Record<ThemeName, Uint8ClampedArray> = {
  light: ramp(["#f3f1e7", "#c7dcc0", "#7dbcb0", "#3b8ea5", "#2b5c92", "#2a2f6b", "#1a1236"]),
  dark: ramp(["#1b1930", "#2e3a75", "#2b6a93", "#3796a0", "#6dc09c", "#bfe09b", "#f8f3c0"]),
};

/** Below zero blue, above zero orange, zero the colour of the background. */
const DIVERGING: Record<ThemeName, Uint8ClampedArray> = {
  light: ramp(["#0b3c78", "#2f78b8", "#9cc6e2", "#f5f4f0", "#f2bd8a", "#d5731f", "#7f3404"]),
  dark: ramp(["#a5d1f5", "#4e95d0", "#28527e", "#232427", "#7c4718", "#d5822f", "#ffd09a"]),
};

export const NONFINITE: Record<ThemeName, Rgb> = { light: [214, 20, 122], dark: [255, 64, 160] };

export interface Palette {
  table: Uint8ClampedArray;
  nonfinite: Rgb;
}

export function paletteOf(theme: ThemeName, diverging: boolean): Palette {
  return { table: (diverging ? DIVERGING : SEQUENTIAL)[theme], nonfinite: NONFINITE[theme] };
}

export function colourAt(palette: Palette, t: number): Rgb {
  const i = 4 * Math.min(STEPS - 1, Math.max(0, Math.round(t * (STEPS - 1))));
  return [palette.table[i]!, palette.table[i + 1]!, palette.table[i + 2]!];
}

export function css([r, g, b]: Rgb): string {
  return `rgb(${r}, ${g}, ${b})`;
}

/** Black or white, whichever is easier to read on a colour. */
export function inkOn([r, g, b]: Rgb): string {
  return 0.2126 * toLinear(r) + 0.7152 * toLinear(g) + 0.0722 * toLinear(b) > 0.3 ? "#16171a" : "#ffffff";
}

/** Lines of several runs or kinds; told apart with any colour vision. */
export const LINES: Record<ThemeName, string[]> = {
  light: ["#2f5fd0", "#c8600a", "#0f8a78", "#8a4fb5", "#7a6a12"],
  dark: ["#86a9ff", "#f2a05a", "#4fc7b3", "#c79af0", "#d3c15a"],
};
