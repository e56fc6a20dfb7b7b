import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateRawSync } from "node:zlib";
import { SubjectModel } from "../src/model/subject";
import { BlobReader } from "../src/payload/blobs";
import { type Column, MISSING, type Statistic, type Subject, type Update } from "../src/payload/types";

/** Blobs that are added as a test needs them. */
class Blobs {
  private readonly blobs: Uint8Array[] = [];
  readonly reader = new BlobReader({ read: async (i) => new Uint8Array(deflateRawSync(this.blobs[i]!)) });

  add(array: Float32Array | Float64Array | Int32Array): number {
    return this.blobs.push(new Uint8Array(array.buffer)) - 1;
  }

  statistic(stat: string, sites: number[], rows: number[][]): Statistic {
    const columns = rows[0]!.length;
    const column: Column = { blob: this.add(Int32Array.from(sites)), dtype: "i32", shape: [sites.length] };
    const blob = this.add(Float32Array.from(rows.flat()));
    return {
      of: "value",
      stat,
      unit: "",
      scale: "log",
      matrix: {
        sites: column,
        rows: sites.length,
        columns,
        levels: [{ factor: 1, columns, codec: "f32", tileRows: 64, tileColumns: 64, blob }],
      },
    };
  }
}

function sitesOf(names: string[]): Subject["sites"] {
  return { name: names, path: names, role: names, stack: names.map(() => ""), depth: names.map(() => []) };
}

test("a followed run gets steps, sites and statistics that it had not", async () => {
  const blobs = new Blobs();
  const subject: Subject = {
    kind: "log",
    name: "run",
    sites: sitesOf(["a"]),
    steps: { blob: blobs.add(Float64Array.of(0, 10)), dtype: "f64", shape: [2] },
    statistics: [blobs.statistic("rms", [0], [[1, 2]])],
    histograms: [],
    arrays: [],
    tokens: [],
    edges: [],
    events: [],
    messages: [],
  };
  const run = new SubjectModel(0, subject, blobs.reader);
  await run.load();
  const update: Update = {
    format: "tapax.page",
    version: 2,
    subject: 0,
    revision: 1,
    keep: 1,
    sites: sitesOf(["b"]),
    steps: [10, 20],
    statistics: [
      blobs.statistic(
        "rms",
        [0, 1],
        [
          [3, 4],
          [5, 6],
        ],
      ),
      blobs.statistic("norm", [1], [[7, 8]]),
    ],
    histograms: [],
    events: [{ kind: "alert", step: 20, site: 1, siteName: "b", message: "b is large" }],
    messages: [],
    blobs: 0,
  };
  await run.apply(update);
  assert.deepEqual(run.steps, [0, 10, 20]);
  assert.equal(run.site("b")!.index, 1);
  const rms = run.statistic("value.rms")!.matrix;
  assert.deepEqual([...(await rms.readRow(rms.row(0)))], [1, 3, 4]);
  assert.deepEqual([...(await rms.readRow(rms.row(1)))], [MISSING, 5, 6]);
  const norm = run.statistic("value.norm")!.matrix;
  assert.deepEqual([...(await norm.readRow(norm.row(1)))], [MISSING, 7, 8]);
  assert.equal(run.data.events[0]!.message, "b is large");
});

test("a statistic that an update does not have is missing at its steps", async () => {
  const blobs = new Blobs();
  const subject: Subject = {
    kind: "log",
    name: "run",
    sites: sitesOf(["a"]),
    steps: { blob: blobs.add(Float64Array.of(0)), dtype: "f64", shape: [1] },
    statistics: [blobs.statistic("rms", [0], [[1]])],
    histograms: [],
    arrays: [],
    tokens: [],
    edges: [],
    events: [],
    messages: [],
  };
  const run = new SubjectModel(0, subject, blobs.reader);
  await run.load();
  await run.apply({
    format: "tapax.page",
    version: 2,
    subject: 0,
    revision: 1,
    keep: 1,
    sites: sitesOf([]),
    steps: [5],
    statistics: [],
    histograms: [],
    events: [],
    messages: [],
    blobs: 0,
  });
  assert.deepEqual([...(await run.statistic("value.rms")!.matrix.readRow(0))], [1, MISSING]);
});
