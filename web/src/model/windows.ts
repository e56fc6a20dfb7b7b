/** Which sites and steps of a heat map are in sight. */
import type { Window } from "../draw/heatmap";

/** The start of a range of `size` entries that lies within `end` entries. */
export function bound(from: number, size: number, end: number): number {
  return Math.max(0, Math.min(end - size, Math.round(from)));
}

/** A range made larger or smaller by a factor, with the place `at` of it, from 0 to 1, where it was. */
export function zoomRange(from: number, to: number, factor: number, at: number, end: number): [number, number] {
  const size = Math.max(2, Math.min(end, Math.round((to - from) * factor) + (factor > 1 ? 1 : 0)));
  const pivot = from + Math.max(0, Math.min(1, at)) * (to - from);
  const start = Math.max(0, Math.min(end - size, Math.round(pivot - at * size)));
  return [start, start + Math.min(size, end)];
}

/** The range in a text such as `20-60`, within `end` entries; null if it is none. */
export function parseRange(text: string | undefined, end: number): [number, number] | null {
  const [from, to] = (text ?? "").split("-").map(Number);
  const isRange = from !== undefined && to !== undefined && from >= 0 && to > from && from < end;
  return isRange ? [from, Math.min(to, end)] : null;
}

/** The window that the address asks for; null for everything. */
export function parseWindow(
  rows: string | undefined,
  columns: string | undefined,
  rowCount: number,
  columnCount: number,
): Window | null {
  const rowRange = parseRange(rows, rowCount);
  const columnRange = parseRange(columns, columnCount);
  if (!rowRange && !columnRange) return null;
  const [rowFrom, rowTo] = rowRange ?? [0, rowCount];
  const [columnFrom, columnTo] = columnRange ?? [0, columnCount];
  return { rowFrom, rowTo, columnFrom, columnTo };
}

/** The number of the first entry that is at least `x`. */
export function lowerBound(sorted: number[], x: number): number {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle]! < x) low = middle + 1;
    else high = middle;
  }
  return low;
}
