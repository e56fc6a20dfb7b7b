/** Matrices of statistics: tiles are decoded when a view asks for them, and the last ones are kept. */
import type { BlobReader } from "./blobs";
import { type Level, type Matrix, MISSING } from "./types";

const KEPT_TILES = 160;
const RESERVED = 5;

export interface Tile {
  rows: number;
  columns: number;
  numbers: Float32Array;
}

/** Decode one row of a tile in codec q13 into `out`, from `at` on. */
export function decodeQuantisedRow(
  bytes: Uint8Array,
  rows: number,
  columns: number,
  row: number,
  out: Float32Array,
  at: number,
): void {
  const view = new DataView(bytes.buffer, bytes.byteOffset + 12 * row, 12);
  const low = view.getFloat32(0, true);
  const step = view.getFloat32(4, true);
  const unit = view.getFloat32(8, true);
  const lowBytes = 12 * rows + row * columns;
  const highBytes = lowBytes + rows * columns;
  for (let i = 0; i < columns; i++) {
    const code = bytes[lowBytes + i]! | (bytes[highBytes + i]! << 8);
    let number: number;
    if (code >= RESERVED) {
      const place = low + (code - RESERVED) * step;
      number = unit > 0 ? unit * Math.sinh(place) : Math.exp(place);
    } else {
      number = code === 0 ? MISSING : code === 1 ? NaN : code === 2 ? Infinity : code === 3 ? -Infinity : 0;
    }
    out[at + i] = number;
  }
}

export function decodeTile(bytes: Uint8Array, codec: Level["codec"], rows: number, columns: number): Float32Array {
  const wanted = codec === "f32" ? 4 * rows * columns : 12 * rows + 2 * rows * columns;
  if (bytes.byteLength !== wanted) {
    throw new Error(`A tile of ${rows} x ${columns} has ${bytes.byteLength} bytes, but ${wanted} were expected.`);
  }
  if (codec === "f32") return new Float32Array(bytes.buffer, bytes.byteOffset, rows * columns);
  const numbers = new Float32Array(rows * columns);
  for (let row = 0; row < rows; row++) decodeQuantisedRow(bytes, rows, columns, row, numbers, row * columns);
  return numbers;
}

/** Whether `a` is shown rather than `b` where only one can be: NaN, then the larger magnitude, missing last. */
export function outweighs(a: number, b: number): boolean {
  if (a === MISSING) return false;
  if (b === MISSING) return true;
  if (b !== b) return false;
  return a !== a || Math.abs(a) > Math.abs(b);
}

/** A matrix [rows, columns], of which a run that is followed appends columns. */
export class MatrixReader {
  rows: number;
  columns: number;
  /** The coarsest level, whole; with `coarseFactor` columns of the matrix to each of its own. */
  coarse: Float32Array = new Float32Array(0);
  coarseColumns = 0;
  coarseFactor = 1;
  /** The site of each row. */
  sites: Int32Array = new Int32Array(0);
  private rowOfSite = new Map<number, number>();
  private readonly tiles = new Map<string, Tile>();
  private readonly pending = new Map<string, Promise<Tile>>();
  /** Numbers that a followed run appended, column by column, each [rows]. */
  private appended: Float32Array[] = [];
  private stored: number;

  constructor(
    private readonly matrix: Matrix,
    private readonly reader: BlobReader,
  ) {
    this.rows = matrix.rows;
    this.columns = matrix.columns;
    this.stored = matrix.columns;
  }

  async load(): Promise<void> {
    const { matrix, reader } = this;
    this.sites = matrix.sites
      ? await reader.integers(matrix.sites)
      : Int32Array.from({ length: matrix.rows }, (_, i) => i);
    this.rowOfSite = new Map(Array.from(this.sites, (site, row) => [site, row]));
    const level = matrix.levels[matrix.levels.length - 1]!;
    this.coarseFactor = level.factor;
    this.coarseColumns = level.columns;
    this.coarse = new Float32Array(matrix.rows * level.columns);
    const jobs: Promise<void>[] = [];
    for (let top = 0; top < matrix.rows; top += level.tileRows) {
      for (let left = 0; left < level.columns; left += level.tileColumns) {
        jobs.push(
          this.decode(level, top, left).then((tile) => {
            for (let row = 0; row < tile.rows; row++) {
              this.coarse.set(
                tile.numbers.subarray(row * tile.columns, (row + 1) * tile.columns),
                (top + row) * level.columns + left,
              );
            }
          }),
        );
      }
    }
    await Promise.all(jobs);
  }

  row(site: number): number {
    return this.rowOfSite.get(site) ?? -1;
  }

  /** The number at a row and column if it is in memory; undefined if its tile has to be read first. */
  at(row: number, column: number): number | undefined {
    if (column >= this.stored) return this.appended[column - this.stored]?.[row] ?? MISSING;
    if (this.coarseFactor === 1) return this.coarse[row * this.coarseColumns + column];
    const level = this.matrix.levels[0]!;
    const top = Math.floor(row / level.tileRows) * level.tileRows;
    const left = Math.floor(column / level.tileColumns) * level.tileColumns;
    const tile = this.tiles.get(`${top},${left}`);
    return tile?.numbers[(row - top) * tile.columns + column - left];
  }

  /** The tile of the finest level at a row and column, if it is in memory. */
  tileAt(row: number, column: number): Tile | undefined {
    const level = this.matrix.levels[0]!;
    const key = `${Math.floor(row / level.tileRows) * level.tileRows},${Math.floor(column / level.tileColumns) * level.tileColumns}`;
    const tile = this.tiles.get(key);
    if (tile) {
      this.tiles.delete(key);
      this.tiles.set(key, tile);
    }
    return tile;
  }

  get tileShape(): [number, number] {
    const level = this.matrix.levels[0]!;
    return [level.tileRows, level.tileColumns];
  }

  /** Whether every number is in memory already. */
  get isWhole(): boolean {
    return this.coarseFactor === 1;
  }

  /** How many columns came with the payload; the others were appended since. */
  get storedColumns(): number {
    return this.stored;
  }

  async readTile(row: number, column: number): Promise<Tile> {
    const level = this.matrix.levels[0]!;
    const top = Math.floor(row / level.tileRows) * level.tileRows;
    const left = Math.floor(column / level.tileColumns) * level.tileColumns;
    const key = `${top},${left}`;
    const known = this.tiles.get(key) ?? this.pending.get(key);
    if (known) return known;
    const job = this.decode(level, top, left).then((tile) => {
      this.pending.delete(key);
      this.tiles.set(key, tile);
      if (this.tiles.size > KEPT_TILES) this.tiles.delete(this.tiles.keys().next().value!);
      return tile;
    });
    this.pending.set(key, job);
    return job;
  }

  /** All numbers of one row. */
  async readRow(row: number): Promise<Float32Array> {
    const out = new Float32Array(this.columns);
    if (this.coarseFactor === 1) {
      out.set(this.coarse.subarray(row * this.coarseColumns, row * this.coarseColumns + this.stored));
    } else {
      const level = this.matrix.levels[0]!;
      const top = Math.floor(row / level.tileRows) * level.tileRows;
      const rows = Math.min(level.tileRows, this.rows - top);
      for (let left = 0; left < this.stored; left += level.tileColumns) {
        const columns = Math.min(level.tileColumns, level.columns - left);
        const bytes = await this.reader.bytes(this.blobOf(level, top, left));
        if (level.codec === "q13") decodeQuantisedRow(bytes, rows, columns, row - top, out, left);
        else
          out.set(
            decodeTile(bytes, "f32", rows, columns).subarray((row - top) * columns, (row - top + 1) * columns),
            left,
          );
      }
    }
    this.appended.forEach((column, i) => (out[this.stored + i] = column[row] ?? MISSING));
    return out;
  }

  /** The numbers of a row in some of the columns that a followed run appended. */
  appendedRow(row: number, from: number, to: number): Float32Array {
    return Float32Array.from({ length: to - from }, (_, i) => this.appended[from + i - this.stored]?.[row] ?? MISSING);
  }

  /** The numbers of a row at the coarsest level, the appended ones after them. */
  coarseRow(row: number): Float32Array {
    const stored = this.coarse.subarray(row * this.coarseColumns, (row + 1) * this.coarseColumns);
    if (!this.appended.length) return stored;
    const out = new Float32Array(this.coarseColumns + this.appended.length);
    out.set(stored);
    this.appended.forEach((column, i) => (out[this.coarseColumns + i] = column[row] ?? MISSING));
    return out;
  }

  /** Keep the first `keep` columns, and append others: `numbers` by site and new column. */
  append(keep: number, columns: number, rows: Map<number, Float32Array>): void {
    if (keep < this.stored && !this.isWhole)
      throw new Error("A run replaced steps of a quantised payload. Load the page again.");
    if (keep < this.stored) {
      const coarse = new Float32Array(this.rows * keep);
      for (let row = 0; row < this.rows; row++) {
        coarse.set(this.coarse.subarray(row * this.coarseColumns, row * this.coarseColumns + keep), row * keep);
      }
      this.coarse = coarse;
      this.coarseColumns = this.stored = keep;
    }
    this.appended.length = Math.min(this.appended.length, keep - this.stored);
    while (this.stored + this.appended.length < keep) this.appended.push(new Float32Array(this.rows).fill(MISSING));
    for (const site of rows.keys()) {
      if (!this.rowOfSite.has(site)) {
        this.rowOfSite.set(site, this.rows);
        this.sites = Int32Array.from([...this.sites, site]);
        this.rows += 1;
        const coarse = new Float32Array(this.rows * this.coarseColumns).fill(MISSING);
        coarse.set(this.coarse);
        this.coarse = coarse;
      }
    }
    for (let i = 0; i < columns; i++) {
      const column = new Float32Array(this.rows).fill(MISSING);
      for (const [site, numbers] of rows) column[this.rowOfSite.get(site)!] = numbers[i] ?? MISSING;
      this.appended.push(column);
    }
    this.columns = keep + columns;
  }

  private blobOf(level: Level, top: number, left: number): number {
    const across = Math.ceil(level.columns / level.tileColumns);
    return level.blob + (top / level.tileRows) * across + left / level.tileColumns;
  }

  private async decode(level: Level, top: number, left: number): Promise<Tile> {
    const rows = Math.min(level.tileRows, this.matrix.rows - top);
    const columns = Math.min(level.tileColumns, level.columns - left);
    const bytes = await this.reader.bytes(this.blobOf(level, top, left));
    return { rows, columns, numbers: decodeTile(bytes, level.codec, rows, columns) };
  }
}
