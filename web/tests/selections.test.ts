import assert from "node:assert/strict";
import { test } from "node:test";
import { compileSelection } from "../src/model/glob";

function site(name: string) {
  const found = /^(.*?)(?:@(\d+))?(?:~(\d+))?(?:\[[\d,]+\])?$/.exec(name)!;
  return { name, path: found[1]!, call: Number(found[2] ?? 0), pullback: Number(found[3] ?? 0) };
}

const NAMES = [
  "GPT",
  "GPT/embed",
  "GPT/blocks/0",
  "GPT/blocks/0/attn",
  "GPT/blocks/0/attn:weights",
  "GPT/blocks/1/attn",
  "GPT/head",
  "GPT/head@1",
  "GPT/scan/mlp[0]",
  "GPT/scan/mlp[1]",
  "a.b+c",
];

const CASES: [string, string[]][] = [
  ["", NAMES],
  ["**/attn", ["GPT/blocks/0/attn", "GPT/blocks/0/attn:weights", "GPT/blocks/1/attn"]],
  ["GPT/*", ["GPT/embed", "GPT/head", "GPT/head@1"]],
  ["GPT/**", NAMES.slice(0, 10)],
  ["*", ["GPT", "a.b+c"]],
  ["GPT/head@1", ["GPT/head@1"]],
  ["GPT/head@0", ["GPT/head"]],
  ["GPT/head", ["GPT/head", "GPT/head@1"]],
  ["**:weights", ["GPT/blocks/0/attn:weights"]],
  ["GPT/blocks/?", ["GPT/blocks/0"]],
  ["GPT/scan/mlp", ["GPT/scan/mlp[0]", "GPT/scan/mlp[1]"]],
  ["GPT/scan/mlp[1]", ["GPT/scan/mlp[1]"]],
  ["a.b+c", ["a.b+c"]],
  ["aXb+c", []],
  ["GPT/embed, GPT/head", ["GPT/embed", "GPT/head", "GPT/head@1"]],
  ["GPT/blocks/** ~**/attn", ["GPT/blocks/0"]],
];

for (const [pattern, wanted] of CASES) {
  test(`the selection ${JSON.stringify(pattern)} picks what it picks in Python`, () => {
    const picks = compileSelection(pattern);
    assert.deepEqual(
      NAMES.filter((name) => picks(site(name))),
      wanted,
    );
  });
}
