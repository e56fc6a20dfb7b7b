/** A heat map of sites and steps, of any size: numbers are aggregated to pixels before they are coloured. */
import { type MatrixReader, outweighs } from "../payload/tiles";
import { MISSING } from "../payload/types";
import type { Palette } from "./colour";
import type { Scale } from "./scale";

/** More cells than this are read from the coarse level. */
const FINE_CELLS = 3e6;

export interface Window {
  rowFrom: number;
  rowTo: number;
  columnFrom: number;
  columnTo: number;
}

export interface Aggregate {
  width: number;
  height: number;
  numbers: Float32Array;
  /** The first matrix column of each pixel column, and the end. */
  columnEdges: Int32Array;
  /** The first listed row of each pixel row, and the end. */
  rowEdges: Int32Array;
  /** Whether every number is that of the finest level. */
  isExact: boolean;
  /** Tiles that are needed for exact numbers: a row and a column in each. */
  wanted: [number, number][];
}

function edges(from: number, to: number, count: number): Int32Array {
  return Int32Array.from({ length: count + 1 }, (_, i) => from + Math.floor((i * (to - from)) / count));
}

/** The number to show in each of at most `width` x `height` pixels: the one of largest magnitude in it. */
export function aggregate(matrix: MatrixReader, rows: Int32Array, window: Window, width: number, height: number): Aggregate {
  const nRows = window.rowTo - window.rowFrom;
  const nColumns = window.columnTo - window.columnFrom;
  const w = Math.max(1, Math.min(width, nColumns));
  const h = Math.max(1, Math.min(height, nRows));
  const columnEdges = edges(window.columnFrom, window.columnTo, w);
  const rowEdges = edges(window.rowFrom, window.rowTo, h);
  const coarseEnough = nColumns / matrix.coarseFactor >= width / 2;
  const fine = !matrix.isWhole && !coarseEnough && nRows * nColumns <= FINE_CELLS;
  const numbers = new Float32Array(w * h).fill(MISSING);
  const wanted = new Map<string, [number, number]>();
  const [tileRows, tileColumns] = matrix.tileShape;
  for (let y = 0; y < h; y++) {
    for (let i = rowEdges[y]!; i < rowEdges[y + 1]!; i++) {
      const row = rows[i]!;
      if (row < 0) continue;
      if (fine) {
        for (let left = Math.floor(window.columnFrom / tileColumns) * tileColumns; left < Math.min(window.columnTo, matrix.storedColumns); left += tileColumns) {
          const key = `${Math.floor(row / tileRows)},${left}`;
          if (!wanted.has(key) && !matrix.tileAt(row, left)) wanted.set(key, [row, left]);
        }
      }
      aggregateRow(matrix, row, columnEdges, fine && wanted.size === 0, numbers, y * w);
    }
  }
  return { width: w, height: h, numbers, columnEdges, rowEdges, isExact: matrix.isWhole || fine && wanted.size === 0, wanted: [...wanted.values()] };
}

function aggregateRow(
  matrix: MatrixReader, row: number, columnEdges: Int32Array, fine: boolean, out: Float32Array, at: number,
): void {
  const { coarse, coarseColumns, coarseFactor, storedColumns } = matrix;
  const base = row * coarseColumns;
  for (let x = 0; x + 1 < columnEdges.length; x++) {
    const from = columnEdges[x]!;
    const to = columnEdges[x + 1]!;
    let best = out[at + x]!;
    const stored = Math.min(to, storedColumns);
    if (fine) {
      for (let column = from; column < stored; column++) {
        const number = matrix.at(row, column) ?? MISSING;
        if (outweighs(number, best)) best = number;
      }
    } else {
      const last = Math.ceil(stored / coarseFactor);
      for (let column = Math.floor(from / coarseFactor); column < last; column++) {
        const number = coarse[base + column]!;
        if (outweighs(number, best)) best = number;
      }
    }
    for (let column = Math.max(from, storedColumns); column < to; column++) {
      const number = matrix.at(row, column) ?? MISSING;
      if (outweighs(number, best)) best = number;
    }
    out[at + x] = best;
  }
}

/** Colour aggregated numbers: one pixel each, transparent where there is no number. */
export function paint(numbers: Float32Array, width: number, height: number, scale: Scale, palette: Palette): ImageData {
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const table = new Uint32Array(palette.table.buffer, palette.table.byteOffset, 256);
  const [r, g, b] = palette.nonfinite;
  const bad = (255 << 24) | (b << 16) | (g << 8) | r;
  for (let i = 0; i < numbers.length; i++) {
    const number = numbers[i]!;
    if (number === MISSING) continue;
    pixels[i] = Number.isFinite(number) ? table[Math.round(scale.place(number) * 255)]! : bad;
  }
  return image;
}

/** Draw an image of pixels into a rectangle of a canvas, with sharp edges. */
export function drawPixels(context: CanvasRenderingContext2D, image: ImageData, x: number, y: number, width: number, height: number): void {
  const small = document.createElement("canvas");
  small.width = image.width;
  small.height = image.height;
  small.getContext("2d")!.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, x, y, width, height);
}
