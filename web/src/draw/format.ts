/** Numbers, sizes and types as people read them. */
import { MISSING } from "../payload/types";

export function formatNumber(x: number, digits = 3): string {
  if (x === MISSING) return "no number";
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const magnitude = Math.abs(x);
  let text: string;
  if (magnitude >= 1e5 || magnitude < 1e-3) {
    const [mantissa, exponent] = x.toExponential(digits - 1).split("e") as [string, string];
    text = `${trimZeros(mantissa)}e${Number(exponent)}`;
  } else {
    text = trimZeros(x.toPrecision(digits));
  }
  return text.replace(/-/g, "−");
}

function trimZeros(text: string): string {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

export function formatWithUnit(x: number, unit: string): string {
  return unit && x !== MISSING ? `${formatNumber(x)} ${unit}` : formatNumber(x);
}

export function formatBytes(n: number): string {
  if (n < 1024) return `${n} B`;
  const power = Math.min(4, Math.floor(Math.log2(n) / 10));
  return `${(n / 1024 ** power).toFixed(1)} ${" KMGT"[power]}iB`;
}

export function formatCount(n: number): string {
  return n.toLocaleString("en-US").replace(/,/g, "\u2009");
}

export function formatType(dtype: string, shape: number[] | null): string {
  return shape ? `${dtype}[${shape.join(", ")}]` : dtype;
}

/** The end of a path, which tells more than its start. */
export function shorten(text: string, length: number): string {
  return text.length <= length ? text : `…${text.slice(text.length - length + 1)}`;
}

export function fileName(path: string): string {
  return path.slice(Math.max(path.lastIndexOf("/"), path.lastIndexOf("\\")) + 1);
}
