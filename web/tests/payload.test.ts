import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateRawSync } from "node:zlib";
import { BlobReader, decodeBase64 } from "../src/payload/blobs";
import { checkHeader } from "../src/payload/hosts";
import { decodeTile, MatrixReader, outweighs } from "../src/payload/tiles";
import { type Header, type Matrix, MISSING } from "../src/payload/types";

function readerOf(blobs: Uint8Array[]): BlobReader {
  return new BlobReader({ read: async (i) => new Uint8Array(deflateRawSync(blobs[i]!)) });
}

function bytesOf(array: Float32Array | Float64Array | Int32Array): Uint8Array {
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}

/** A tile of one row, by hand: three parameters, then low bytes, then high bytes. */
function quantisedRow(low: number, step: number, unit: number, codes: number[]): Uint8Array {
  const bytes = new Uint8Array(12 + 2 * codes.length);
  const view = new DataView(bytes.buffer);
  [low, step, unit].forEach((x, i) => view.setFloat32(4 * i, x, true));
  codes.forEach((code, i) => {
    bytes[12 + i] = code & 255;
    bytes[12 + codes.length + i] = code >> 8;
  });
  return bytes;
}

test("codes of a quantised row are powers of e, and the first five are special", () => {
  const numbers = decodeTile(quantisedRow(Math.log(2), Math.log(2), 0, [0, 1, 2, 3, 4, 5, 6, 7]), "q13", 1, 8);
  assert.equal(numbers[0], MISSING);
  assert.ok(Number.isNaN(numbers[1]));
  assert.deepEqual([...numbers.slice(2, 5)], [Infinity, -Infinity, 0]);
  [2, 4, 8].forEach((wanted, i) => assert.ok(Math.abs(numbers[5 + i]! / wanted - 1) < 1e-6));
});

test("a row with both signs is a hyperbolic sine of its codes", () => {
  const numbers = decodeTile(quantisedRow(-1, 1, 0.5, [5, 6, 7, 300]), "q13", 1, 4);
  const wanted = [0.5 * Math.sinh(-1), 0, 0.5 * Math.sinh(1)];
  wanted.forEach((x, i) => assert.ok(Math.abs(numbers[i]! - x) < 1e-6));
});

test("a tile that is not whole is refused", () => {
  assert.throws(() => decodeTile(new Uint8Array(7), "f32", 1, 2), /7 bytes, but 8 were expected/);
});

test("columns are typed, and may share a blob", async () => {
  const reader = readerOf([
    bytesOf(new Float32Array([1, 2, 3, 4])),
    bytesOf(new Float64Array([0.5, -1])),
    new TextEncoder().encode("größe"),
  ]);
  assert.deepEqual([...(await reader.floats({ blob: 0, dtype: "f32", shape: [2, 2] }))], [1, 2, 3, 4]);
  assert.deepEqual([...(await reader.floats({ blob: 0, dtype: "f32", shape: [2], offset: 1 }))], [2, 3]);
  assert.deepEqual([...(await reader.doubles({ blob: 1, dtype: "f64", shape: [2] }))], [0.5, -1]);
  assert.equal(await reader.text({ blob: 2, dtype: "utf8", shape: [7] }), "größe");
  await assert.rejects(reader.floats({ blob: 0, dtype: "f32", shape: [3] }), /16 bytes, but 12/);
  await assert.rejects(reader.floats({ blob: 1, dtype: "f64", shape: [2] }), /holds f64/);
});

test("base64 is decoded as the browser's own encoder writes it", () => {
  assert.deepEqual([...decodeBase64(btoa(String.fromCharCode(0, 255, 16)))], [0, 255, 16]);
});

test("NaN outweighs infinity, infinity any number, and every number a missing one", () => {
  const order = [NaN, -Infinity, -3, 2, MISSING];
  order.forEach((a, i) => order.forEach((b, j) => assert.equal(outweighs(a, b), i < j, `${a} and ${b}`)));
});

async function tiledMatrix(): Promise<MatrixReader> {
  // [3, 5] in tiles of 2 x 3 columns, and a coarse level of two columns to one.
  const tiles = [
    [0, 1, 2, 10, 11, 12],
    [3, 4, 13, 14],
    [20, 21, 22],
    [23, 24],
    [1, 3, 4, 11, 13, 14, 21, 23, 24],
  ];
  const level = { codec: "f32" as const, tileRows: 2, tileColumns: 3 };
  const matrix: Matrix = {
    sites: { blob: 5, dtype: "i32", shape: [3] },
    rows: 3,
    columns: 5,
    levels: [
      { ...level, factor: 1, columns: 5, blob: 0 },
      { codec: "f32", tileRows: 3, tileColumns: 3, factor: 2, columns: 3, blob: 4 },
    ],
  };
  const reader = readerOf([
    ...tiles.map((tile) => bytesOf(new Float32Array(tile))),
    bytesOf(new Int32Array([4, 7, 9])),
  ]);
  const made = new MatrixReader(matrix, reader);
  await made.load();
  return made;
}

test("a tiled matrix is read by row, by tile and at its coarse level", async () => {
  const matrix = await tiledMatrix();
  assert.equal(matrix.row(7), 1);
  assert.equal(matrix.row(8), -1);
  assert.deepEqual([...matrix.coarseRow(1)], [11, 13, 14]);
  assert.deepEqual([...(await matrix.readRow(2))], [20, 21, 22, 23, 24]);
  assert.equal(matrix.at(1, 4), undefined);
  await matrix.readTile(1, 4);
  assert.equal(matrix.at(1, 4), 14);
});

test("a followed run appends columns and sites, and replaces steps from the one it was resumed at", async () => {
  const level = { factor: 1, columns: 2, codec: "f32" as const, tileRows: 8, tileColumns: 8, blob: 0 };
  const matrix = new MatrixReader(
    { sites: null, rows: 2, columns: 2, levels: [level] },
    readerOf([bytesOf(new Float32Array([1, 2, 3, 4]))]),
  );
  await matrix.load();
  matrix.append(
    2,
    1,
    new Map([
      [0, new Float32Array([5])],
      [6, new Float32Array([7])],
    ]),
  );
  assert.deepEqual([...(await matrix.readRow(0))], [1, 2, 5]);
  assert.deepEqual([...(await matrix.readRow(1))], [3, 4, MISSING]);
  assert.deepEqual([...(await matrix.readRow(matrix.row(6)))], [MISSING, MISSING, 7]);
  matrix.append(1, 1, new Map([[0, new Float32Array([9])]]));
  assert.deepEqual([...(await matrix.readRow(0))], [1, 9]);
});

test("a payload of another version is refused with a sentence", () => {
  const header = { format: "tapax.page", version: 99 } as unknown as Header;
  assert.throws(() => checkHeader(header), /version 99 of the format, but this page reads version 2/);
  assert.throws(() => checkHeader({ format: "x" } as unknown as Header), /not a payload/);
});
