import assert from "node:assert/strict";
import { test } from "node:test";
import { isGeometric, mergeEdges, powerOfTwo, shareOf } from "../src/draw/bins";
import { colourAt, inkOn, paletteOf } from "../src/draw/colour";
import { formatBytes, formatNumber, formatType, shorten } from "../src/draw/format";
import { aggregate } from "../src/draw/heatmap";
import { fitScale, makeScale, niceTicks, ticks } from "../src/draw/scale";
import { BlobReader } from "../src/payload/blobs";
import { MatrixReader } from "../src/payload/tiles";
import { MISSING } from "../src/payload/types";

test("numbers are short, and what is not a number says so", () => {
  const cases: [number, string][] = [
    [0, "0"],
    [1.2345, "1.23"],
    [-0.5, "−0.5"],
    [123456, "1.23e5"],
    [1e-5, "1e−5"],
    [2, "2"],
    [NaN, "NaN"],
    [-Infinity, "−∞"],
    [MISSING, "no number"],
  ];
  for (const [x, text] of cases) assert.equal(formatNumber(x), text);
  assert.equal(formatBytes(98304), "96.0 KiB");
  assert.equal(formatType("float32", [2, 3]), "float32[2, 3]");
  assert.equal(shorten("GPT/blocks/3/mlp", 8), "…s/3/mlp");
});

test("a log scale has a decade where there is a decade", () => {
  const scale = makeScale("log", 0.01, 100);
  assert.ok(Math.abs(scale.place(1) - 0.5) < 1e-12);
  assert.deepEqual([scale.place(0), scale.place(-1), scale.place(1e9)], [0, 0, 1]);
  assert.deepEqual(
    ticks(scale, 9).map((tick) => Number(tick.toPrecision(6))),
    [0.01, 0.1, 1, 10, 100],
  );
});

test("a diverging scale has zero in its middle", () => {
  const scale = fitScale("diverging", [-1, 3, 2]);
  assert.deepEqual([scale.place(0), scale.place(3), scale.place(-3)], [0.5, 1, 0]);
});

test("a scale leaves out the outlier that would hide all other numbers, and everything that is not one", () => {
  const numbers = Float32Array.from({ length: 1000 }, (_, i) => 1 + i / 1000);
  numbers.set([1e30, NaN, Infinity, MISSING]);
  const scale = fitScale("log", numbers);
  assert.ok(scale.low >= 1 && scale.high <= 2);
});

test("equal numbers and no numbers at all have a scale", () => {
  for (const numbers of [[], [0], [5, 5], [NaN]]) {
    for (const kind of ["log", "linear", "diverging"] as const) {
      const scale = fitScale(kind, numbers);
      assert.ok(Number.isFinite(scale.place(5)), `${kind} of ${numbers}`);
      assert.ok(ticks(scale, 4).length > 0);
    }
  }
});

test("ticks are round", () => {
  assert.deepEqual(niceTicks(0, 240, 5), [0, 50, 100, 150, 200]);
  assert.deepEqual(niceTicks(3, 3, 5), [3]);
});

test("lightness rises along a scale of sizes in both themes, so that it reads without hue", () => {
  const luminance = ([r, g, b]: [number, number, number]) => 0.2126 * r + 0.7152 * g + 0.0722 * b;
  for (const theme of ["light", "dark"] as const) {
    const palette = paletteOf(theme, false);
    const line = Array.from({ length: 32 }, (_, i) => luminance(colourAt(palette, i / 31)));
    const sign = theme === "light" ? -1 : 1;
    line.slice(1).forEach((x, i) => assert.ok(sign * (x - line[i]!) > 0, `${theme} at ${i}`));
  }
  assert.equal(inkOn([255, 255, 255]), "#16171a");
  assert.equal(inkOn([20, 20, 60]), "#ffffff");
});

async function matrixOf(rows: number[][]): Promise<MatrixReader> {
  const columns = rows[0]!.length;
  const bytes = new Uint8Array(new Float32Array(rows.flat()).buffer);
  const { deflateRawSync } = await import("node:zlib");
  const reader = new BlobReader({ read: async () => new Uint8Array(deflateRawSync(bytes)) });
  const matrix = new MatrixReader(
    {
      sites: null,
      rows: rows.length,
      columns,
      levels: [{ factor: 1, columns, codec: "f32", tileRows: rows.length, tileColumns: columns, blob: 0 }],
    },
    reader,
  );
  await matrix.load();
  return matrix;
}

test("a pixel of a heat map shows the number of largest magnitude in it", async () => {
  const matrix = await matrixOf([
    [1, -5, 2, MISSING],
    [3, 4, NaN, MISSING],
    [0, 0, 0, 7],
  ]);
  const whole = { rowFrom: 0, rowTo: 3, columnFrom: 0, columnTo: 4 };
  const exact = aggregate(matrix, Int32Array.of(0, 1, 2), whole, 100, 100);
  assert.deepEqual([exact.width, exact.height], [4, 3]);
  assert.deepEqual([...exact.numbers.slice(0, 4)], [1, -5, 2, MISSING]);
  const folded = aggregate(matrix, Int32Array.of(0, 1, 2), whole, 2, 2);
  assert.deepEqual([...folded.numbers], [-5, 2, 4, NaN]);
  const part = aggregate(matrix, Int32Array.of(2, 0), { rowFrom: 0, rowTo: 2, columnFrom: 3, columnTo: 4 }, 9, 9);
  assert.deepEqual([...part.numbers], [7, MISSING]);
});

test("bins of powers of two are told from others, and named by their exponents", () => {
  assert.equal(isGeometric(Float64Array.of(-Infinity, -2, 0, 0.25, 2, Infinity)), true);
  assert.equal(isGeometric(Float64Array.of(0, 1, 2, 3)), false);
  assert.deepEqual([0.25, -8, 0].map(powerOfTwo), ["2⁻²", "−2³", "0"]);
});

test("the edges of several lines are merged in order", () => {
  const lines = [Float64Array.of(-Infinity, -2, 0, 16), Float64Array.of(-0.5, 0, 2, Infinity)];
  assert.deepEqual([...mergeEdges(lines.map((edges) => ({ edges })))], [-Infinity, -2, -0.5, 0, 2, 16, Infinity]);
});

test("the share of a bin is that of the elements of its own line", () => {
  const lines = [Float32Array.of(1, 3), Float32Array.of(0, 0)].map((counts) => ({ counts }));
  assert.deepEqual([...shareOf(lines)], [0.75, 0, 0.25, 0]);
});
