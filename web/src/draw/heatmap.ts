/** A heat map of sites and steps, of any size: numbers are aggregated to pixels before they are coloured. */
import type { MatrixReader } from "../payload/tiles";
import { MISSING } from "../payload/types";
import type { Palette } from "./colour";
import type { Scale } from "./scale";

/** More cells than this are read from the coarse level. */
const FINE_CELLS = 3e6;
/** More tiles than this are not read for one picture. */
const MOST_TILES = 48;

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
export function aggregate(
  matrix: MatrixReader,
  rows: Int32Array,
  window: Window,
  width: number,
  height: number,
): Aggregate {
  const nRows = window.rowTo - window.rowFrom;
  const nColumns = window.columnTo - window.columnFrom;
  const w = Math.max(1, Math.min(width, nColumns));
  const h = Math.max(1, Math.min(height, nRows));
  const columnEdges = edges(window.columnFrom, window.columnTo, w);
  const rowEdges = edges(window.rowFrom, window.rowTo, h);
  const coarseEnough = nColumns / matrix.coarseFactor >= width / 2;
  const mayBeFine = !matrix.isWhole && !coarseEnough && nRows * nColumns <= FINE_CELLS;
  const numbers = new Float32Array(w * h).fill(MISSING);
  const magnitudes = new Float32Array(w * h).fill(-1);
  const wanted = new Map<string, [number, number]>();
  const fine = mayBeFine && needTiles(matrix, rows, window, wanted);
  for (let y = 0; y < h; y++) {
    for (let i = rowEdges[y]!; i < rowEdges[y + 1]!; i++) {
      if (rows[i]! < 0) continue;
      for (const stretch of stretchesOf(matrix, rows[i]!, window, fine))
        fold(stretch, columnEdges, numbers, magnitudes, y * w);
    }
  }
  return {
    width: w,
    height: h,
    numbers,
    columnEdges,
    rowEdges,
    isExact: matrix.isWhole || fine,
    wanted: [...wanted.values()],
  };
}

/** Note the tiles of a window that are not in memory; return whether all are, and whether they are few enough to read. */
function needTiles(
  matrix: MatrixReader,
  rows: Int32Array,
  window: Window,
  wanted: Map<string, [number, number]>,
): boolean {
  const [tileRows, tileColumns] = matrix.tileShape;
  const seen = new Set<number>();
  const last = Math.min(window.columnTo, matrix.storedColumns);
  let count = 0;
  for (let i = window.rowFrom; i < window.rowTo; i++) {
    const row = rows[i]!;
    const band = Math.floor(row / tileRows);
    if (row < 0 || seen.has(band)) continue;
    seen.add(band);
    for (let left = Math.floor(window.columnFrom / tileColumns) * tileColumns; left < last; left += tileColumns) {
      count += 1;
      if (!matrix.tileAt(row, left)) wanted.set(`${band},${left}`, [row, left]);
    }
  }
  if (count > MOST_TILES) wanted.clear();
  return count <= MOST_TILES && wanted.size === 0;
}

/** Where a stretch of a row is in memory: matrix columns `from` to `to`, at `start` of `numbers`, `factor` to an entry. */
interface Stretch {
  numbers: Float32Array;
  start: number;
  from: number;
  to: number;
  factor: number;
}

function stretchesOf(matrix: MatrixReader, row: number, window: Window, fine: boolean): Stretch[] {
  const made: Stretch[] = [];
  const stored = Math.min(window.columnTo, matrix.storedColumns);
  if (!fine) {
    made.push({
      numbers: matrix.coarse,
      start: row * matrix.coarseColumns,
      from: 0,
      to: stored,
      factor: matrix.coarseFactor,
    });
  } else {
    const [tileRows, tileColumns] = matrix.tileShape;
    for (let left = Math.floor(window.columnFrom / tileColumns) * tileColumns; left < stored; left += tileColumns) {
      const tile = matrix.tileAt(row, left);
      if (tile)
        made.push({
          numbers: tile.numbers,
          start: (row % tileRows) * tile.columns,
          from: left,
          to: Math.min(stored, left + tileColumns),
          factor: 1,
        });
    }
  }
  if (window.columnTo > matrix.storedColumns) {
    const from = Math.max(window.columnFrom, matrix.storedColumns);
    made.push({
      numbers: matrix.appendedRow(row, from, window.columnTo),
      start: 0,
      from,
      to: window.columnTo,
      factor: 1,
    });
  }
  return made;
}

/** Fold a stretch of a row into the numbers shown; `magnitudes` has theirs, -1 where there is none yet. */
function fold(
  stretch: Stretch,
  columnEdges: Int32Array,
  out: Float32Array,
  magnitudes: Float32Array,
  at: number,
): void {
  const { numbers, start, from, to, factor } = stretch;
  for (let x = 0; x + 1 < columnEdges.length; x++) {
    const first = Math.max(columnEdges[x]!, from);
    const end = Math.min(columnEdges[x + 1]!, to);
    if (first >= end) continue;
    let best = out[at + x]!;
    let magnitude = magnitudes[at + x]!;
    const last = start + Math.ceil((end - from) / factor);
    for (let i = start + Math.floor((first - from) / factor); i < last; i++) {
      const number = numbers[i]!;
      const size = number < 0 ? -number : number;
      if (size > magnitude ? number !== MISSING : number !== number) {
        best = number;
        magnitude = number !== number ? Infinity : size;
      }
    }
    out[at + x] = best;
    magnitudes[at + x] = magnitude;
  }
}

const tables = new WeakMap<Scale, Uint8Array>();

/**
 * The colour of every number by the upper half of its bits, for a log scale that spans more than a decade: the logarithm
 * of half a million pixels takes longer than a frame. Null for other scales, whose steps are finer than those bits.
 */
function tableOf(scale: Scale): Uint8Array | null {
  if (scale.kind !== "log" || scale.high / scale.low < 10) return null;
  let table = tables.get(scale);
  if (!table) {
    const bits = new Uint32Array(1);
    const float = new Float32Array(bits.buffer);
    table = new Uint8Array(65536);
    for (let i = 0; i < 65536; i++) {
      bits[0] = (i << 16) | 0x8000;
      table[i] = Math.round(scale.place(float[0]!) * 255);
    }
    tables.set(scale, table);
  }
  return table;
}

/** Colour aggregated numbers: one pixel each, transparent where there is no number. */
export function paint(numbers: Float32Array, width: number, height: number, scale: Scale, palette: Palette): ImageData {
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = new Uint32Array(palette.table.buffer, palette.table.byteOffset, 256);
  const [r, g, b] = palette.nonfinite;
  const bad = (255 << 24) | (b << 16) | (g << 8) | r;
  const table = tableOf(scale);
  const own =
    table && numbers.byteOffset % 4 === 0 ? new Uint32Array(numbers.buffer, numbers.byteOffset, numbers.length) : null;
  for (let i = 0; i < numbers.length; i++) {
    const number = numbers[i]!;
    if (number === MISSING) continue;
    pixels[i] =
      number - number !== 0
        ? bad
        : table && own
          ? colours[table[own[i]! >>> 16]!]!
          : colours[Math.round(scale.place(number) * 255)]!;
  }
  return image;
}

/** Draw an image of pixels into a rectangle of a canvas, with sharp edges. */
export function drawPixels(
  context: CanvasRenderingContext2D,
  image: ImageData,
  x: number,
  y: number,
  width: number,
  height: number,
): void {
  const small = document.createElement("canvas");
  small.width = image.width;
  small.height = image.height;
  small.getContext("2d")!.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, x, y, width, height);
}
