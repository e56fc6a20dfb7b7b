import assert from "node:assert/strict";
import { test } from "node:test";
import { columnBefore, compareSites, describeComparison, lastCommonStep } from "../src/model/comparison";
import { boxWidth, layOutIndented } from "../src/model/graph_layout";
import { layOutLayers } from "../src/model/layer_grid";
import { keepNearest, visibleEdges } from "../src/model/module_edges";
import { buildTree, openByDefault, visibleNodes } from "../src/model/module_tree";
import { axisStatistics, takeSlice } from "../src/model/slices";
import type { Site } from "../src/model/subject";
import { MISSING } from "../src/payload/types";
import { readAddress, writeAddress } from "../src/state";

function makeSite(index: number, name: string, more: Partial<Site> = {}): Site {
  const path = name.replace(/\[.*$/, "");
  return {
    index,
    name,
    path,
    call: 0,
    pullback: 0,
    iteration: [],
    kind: "module",
    shape: [2],
    dtype: "float32",
    nbytes: 8,
    source: null,
    loops: [],
    module: "",
    op: "",
    conditional: false,
    role: "",
    stack: "",
    depth: [],
    ...more,
  };
}

const SITES = [
  makeSite(0, "GPT/embed"),
  makeSite(1, "GPT/layers/mlp[0]", { iteration: [0] }),
  makeSite(2, "GPT/layers/mlp[1]", { iteration: [1] }),
  makeSite(3, "GPT/layers[0]", { iteration: [0] }),
  makeSite(4, "GPT/layers[1]", { iteration: [1] }),
  makeSite(5, "GPT/head", { conditional: true, shape: [7, 3] }),
  makeSite(6, "GPT"),
];

test("modules are a tree, and a loop is one node with its number of iterations", () => {
  const tree = buildTree(SITES);
  const [gpt] = tree.children;
  assert.deepEqual(
    gpt!.children.map((node) => [node.label, node.repeats]),
    [
      ["embed", ""],
      ["layers", "× 2"],
      ["head", ""],
    ],
  );
  assert.equal(gpt!.count, 7);
  assert.equal(gpt!.children[2]!.isConditional, true);
  assert.deepEqual(
    gpt!.children[1]!.children.map((node) => node.sites.length),
    [2],
  );
});

test("containers open level by level, as many as fit", () => {
  const tree = buildTree(SITES);
  assert.deepEqual([...openByDefault(tree, 3)], [""]);
  assert.deepEqual([...openByDefault(tree, 5)], ["", "GPT", "GPT/layers"]);
  assert.deepEqual(
    visibleNodes(tree, new Set(["", "GPT"])).map((node) => node.path),
    ["GPT", "GPT/embed", "GPT/layers", "GPT/head"],
  );
});

test("edges are the data flow where it is known, and the order of siblings where it is not", () => {
  const tree = buildTree(SITES);
  const open = new Set(["", "GPT"]);
  const ordered = visibleEdges(tree, open, null);
  assert.deepEqual(
    ordered.map((edge) => [edge.from.label, edge.to.label, edge.label, edge.isOrder]),
    [
      ["embed", "layers", "float32[2]", true],
      ["layers", "head", "float32[2]", true],
    ],
  );
  const flows = (from: number, to: number, shape: number[], back = false) => ({
    from,
    to,
    shape,
    dtype: "float32",
    back,
  });
  const known = visibleEdges(tree, open, [
    flows(0, 5, [4, 4]),
    flows(0, 1, [2]),
    flows(1, 3, [2]),
    flows(3, 1, [2], true),
    flows(3, 3, [2], true),
    flows(1, 5, [2]),
    flows(3, 5, [7]),
    flows(5, 6, [1]),
  ]);
  assert.deepEqual(
    known.map((edge) => [edge.from.label, edge.to.label, edge.label, edge.isBack]),
    [
      ["embed", "head", "float32[4, 4]", false],
      ["embed", "layers", "float32[2]", false],
      ["layers", "layers", "float32[2]", true],
      ["layers", "head", "float32[2], float32[7]", false],
    ],
  );
  const inside = visibleEdges(tree, new Set(["", "GPT", "GPT/layers"]), [
    flows(0, 1, [2]),
    flows(1, 3, [2]),
    flows(3, 1, [2], true),
    flows(3, 5, [2]),
  ]);
  assert.deepEqual(
    inside.map((edge) => [edge.from.path, edge.to.path, edge.isBack]),
    [
      ["GPT/embed", "GPT/layers/mlp", false],
      ["GPT/layers", "GPT/layers", true],
      ["GPT/layers", "GPT/head", false],
    ],
  );
  assert.deepEqual(visibleEdges(tree, open, []), []);
});

test("of too many edges, those from the nearest modules are kept", () => {
  const sites = Array.from({ length: 40 }, (_, i) => makeSite(i, `m${i}`));
  const tree = buildTree(sites);
  const flows = sites.flatMap((_, to) =>
    Array.from({ length: to }, (_, from) => ({ from, to, shape: [], dtype: "float32", back: false })),
  );
  const all = visibleEdges(tree, new Set([""]), flows);
  assert.equal(all.length, 780);
  assert.equal(keepNearest(all, 780), all);
  const kept = keepNearest(all, 80);
  assert.ok(kept.length <= 80);
  assert.deepEqual(
    kept.filter((edge) => edge.to.label === "m9").map((edge) => edge.from.label),
    ["m8", "m7"],
  );
});

test("without a worker the graph is an indented list that does not overlap", () => {
  const tree = buildTree(SITES);
  const { boxes } = layOutIndented(tree, openByDefault(tree, 100));
  assert.equal(boxes.length, 5);
  boxes.slice(1).forEach((box, i) => assert.ok(box.y >= boxes[i]!.y + boxes[i]!.height));
  boxes.forEach((box) => assert.ok(box.width >= boxWidth(box.node)));
});

test("sites of layers are cells by role, and sites outside of them rows of their own", () => {
  const sites = [
    makeSite(0, "n/embed"),
    makeSite(1, "n/b/0/a", { role: "a", stack: "n/b", depth: [0] }),
    makeSite(2, "n/b/0/c", { role: "c", stack: "n/b", depth: [0] }),
    makeSite(3, "n/b/1/a", { role: "a", stack: "n/b", depth: [1] }),
    makeSite(4, "n/head"),
  ];
  const grid = layOutLayers(sites);
  assert.deepEqual(grid.columns, ["", "a", "c"]);
  assert.deepEqual(
    grid.rows.map((row) => row.label),
    ["n/embed", "n/b/0", "n/b/1", "n/head"],
  );
  assert.deepEqual([...grid.rows[1]!.cells.keys()], [1, 2]);
  assert.equal(grid.rows[2]!.cells.get(1)![0]!.index, 3);
});

test("slices and statistics of an array are those of its axes", () => {
  const numbers = Float32Array.from({ length: 24 }, (_, i) => i);
  const slice = takeSlice(numbers, [2, 3, 4], [1, 0, 2], 1, 2);
  assert.deepEqual(
    [slice.rows, slice.columns, ...slice.numbers],
    [3, 4, ...Array.from({ length: 12 }, (_, i) => 12 + i)],
  );
  assert.deepEqual([...takeSlice(numbers, [2, 3, 4], [0, 2, 1], 0, 1).numbers], [1, 5, 9, 13, 17, 21]);
  assert.deepEqual([...takeSlice(new Float32Array([5]), [], [], -1, -1).numbers], [5]);
  const rms = axisStatistics(new Float32Array([3, 4, 0, 0]), [2, 2], 0);
  assert.ok(Math.abs(rms[0]! - Math.sqrt(12.5)) < 1e-9 && rms[1] === 0);
});

test("sites are compared within a tolerance, and one that is not finite in one of them differs", () => {
  const a = [1, 1, NaN, NaN, MISSING, 0];
  const b = [1.005, 1.5, 1, NaN, 1, 0];
  const sites = SITES.slice(0, 6);
  const found = compareSites(
    sites,
    (site) => a[site.index]!,
    (site) => b[site.index]!,
    0.01,
  );
  assert.deepEqual(
    found.map((each) => [each.site.index, each.differs]),
    [
      [0, false],
      [1, true],
      [2, true],
      [3, false],
      [5, false],
    ],
  );
});

test("a comparison of no sites does not call them equal", () => {
  const compare = (b: number) =>
    describeComparison(
      compareSites(
        SITES,
        () => 1,
        () => b,
        0.01,
      ),
    );
  assert.equal(compare(MISSING), "No site that the filter picks has this number in both");
  assert.equal(compare(1), "All 7 sites are equal within the tolerance");
  assert.equal(compare(2), "7 of 7 sites differ");
});

test("the state survives a round trip through the address", () => {
  const state = {
    ...readAddress(""),
    view: "sites",
    run: 1,
    site: "GPT/<img src=x>&a=b/3",
    stat: "grad.rms",
    filter: "**/attn, ~**/0/**",
    step: 120,
    theme: "dark" as const,
    more: { sort: "grad.rms", rows: "3-9" },
  };
  assert.deepEqual(readAddress(writeAddress(state)), state);
  assert.equal(writeAddress(readAddress("")), "#");
  assert.deepEqual(readAddress("#run=x&step=y&theme=z").run, 0);
  assert.equal(readAddress("#step=y").step, null);
});

test("two runs are compared at the last step of both, or at the last steps before another", () => {
  assert.equal(lastCommonStep([0, 10, 20, 30], [0, 15, 30, 45]), 30);
  assert.equal(lastCommonStep([1, 2, 3], [4, 6]), 3);
  assert.equal(lastCommonStep([], [4, 6]), 6);
  assert.equal(columnBefore([0, 10, 20], 10), 1);
  assert.equal(columnBefore([0, 10, 20], 19), 1);
  assert.equal(columnBefore([0, 10, 20], 100), 2);
  assert.equal(columnBefore([5, 10], 1), 0);
  assert.equal(columnBefore([], 7), 0);
});
