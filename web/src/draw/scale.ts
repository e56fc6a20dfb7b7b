/** Scales from numbers to the unit interval, their ticks, and how they choose their range from data. */
import { MISSING } from "../payload/types";
import { formatNumber } from "./format";

export type ScaleKind = "log" | "linear" | "diverging";

export interface Scale {
  kind: ScaleKind;
  low: number;
  high: number;
  /** The place of a number in [0, 1]; numbers beyond the range are at its ends. */
  place(x: number): number;
}

export function makeScale(kind: ScaleKind, low: number, high: number): Scale {
  if (kind === "log") {
    const floor = low > 0 ? low : 1e-30;
    const from = Math.log(floor);
    const span = Math.log(Math.max(high, floor * 1.0001)) - from;
    return {
      kind,
      low: floor,
      high: Math.exp(from + span),
      place: (x) => (x > 0 ? clamp((Math.log(x) - from) / span) : 0),
    };
  }
  if (kind === "diverging") {
    const bound = Math.max(Math.abs(low), Math.abs(high)) || 1;
    return { kind, low: -bound, high: bound, place: (x) => clamp((x / bound + 1) / 2) };
  }
  const span = high - low || Math.abs(high) || 1;
  return { kind, low, high: low + span, place: (x) => clamp((x - low) / span) };
}

function clamp(t: number): number {
  return t < 0 ? 0 : t > 1 ? 1 : t;
}

/** A scale for some numbers: from the first to the last percentile, so that an outlier does not hide all others. */
export function fitScale(kind: ScaleKind, numbers: Float32Array | number[], trim = 0.005): Scale {
  const stride = Math.max(1, Math.floor(numbers.length / 60000));
  const sample: number[] = [];
  for (let i = 0; i < numbers.length; i += stride) {
    const x = numbers[i]!;
    if (Number.isFinite(x) && x !== MISSING && (kind !== "log" || x > 0)) sample.push(x);
  }
  if (!sample.length) return makeScale(kind, kind === "log" ? 0.1 : 0, 1);
  sample.sort((a, b) => a - b);
  const at = (q: number) => sample[Math.min(sample.length - 1, Math.max(0, Math.round(q * (sample.length - 1))))]!;
  let low = at(sample.length > 100 ? trim : 0);
  let high = at(sample.length > 100 ? 1 - trim : 1);
  if (low === high)
    [low, high] = kind === "log" ? [low / 2, high * 2] : [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
  return makeScale(kind, low, high);
}

/** Round numbers along a scale, about `count` of them. */
export function ticks(scale: Scale, count: number): number[] {
  if (scale.kind === "log") {
    const from = Math.ceil(Math.log10(scale.low) - 1e-9);
    const to = Math.floor(Math.log10(scale.high) + 1e-9);
    const decades = to - from + 1;
    if (decades >= 2) {
      const stride = Math.max(1, Math.ceil(decades / count));
      return Array.from({ length: Math.floor((decades - 1) / stride) + 1 }, (_, i) => 10 ** (from + i * stride));
    }
    const made = [];
    for (let decade = from - 1; decade <= to; decade++) {
      for (const digit of [1, 2, 3, 5]) {
        const x = digit * 10 ** decade;
        if (x >= scale.low * 0.999 && x <= scale.high * 1.001) made.push(x);
      }
    }
    return made.length > 1 ? made : niceTicks(scale.low, scale.high, count);
  }
  return niceTicks(scale.low, scale.high, count);
}

export function niceTicks(low: number, high: number, count: number): number[] {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((digit) => digit * power).find((each) => each >= rough * 0.999)!;
  const made = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) made.push(i * step || 0);
  return made;
}

export function tickLabel(x: number): string {
  return formatNumber(Number(x.toPrecision(6)), 4);
}
