// Bundles the page into one script, `../tapax/viewer/assets/page.js`, which defines the global `tapaxPage`.
// With --tests it bundles the unit tests instead, into build/tests/.
import { build } from "esbuild";
import { readdirSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const require = createRequire(import.meta.url);

/** Import `name?text` as a string: the worker that lays out graphs is started from one. */
const asText = {
  name: "as-text",
  setup(builder) {
    builder.onResolve({ filter: /\?text$/ }, ({ path }) => ({
      path: require.resolve(path.slice(0, -"?text".length)),
      namespace: "as-text",
    }));
    builder.onLoad({ filter: /.*/, namespace: "as-text" }, async ({ path }) => ({
      contents: await readFile(path, "utf8"),
      loader: "text",
    }));
  },
};

/** uPlot asks Intl for the language of the browser, and fails where that is no language: Chromium under LANG=C. */
const plainNumbers = {
  name: "plain-numbers",
  setup(builder) {
    builder.onLoad({ filter: /uPlot\.esm\.js$/ }, async ({ path }) => ({
      contents: (await readFile(path, "utf8")).replace("nav.language", '"en-US"'),
      loader: "js",
    }));
  },
};

const common = {
  bundle: true,
  logLevel: "warning",
  plugins: [asText, plainNumbers],
  loader: { ".css": "text" },
  absWorkingDir: here,
};

if (process.argv.includes("--tests")) {
  const tests = readdirSync(join(here, "tests")).filter((name) => name.endsWith(".test.ts"));
  await build({
    ...common,
    entryPoints: tests.map((name) => join(here, "tests", name)),
    outdir: join(here, "build", "tests"),
    format: "esm",
    platform: "node",
    outExtension: { ".js": ".mjs" },
    sourcemap: "inline",
  });
} else {
  await build({
    ...common,
    entryPoints: [join(here, "src", "main.ts")],
    outfile: join(here, "..", "tapax", "viewer", "assets", "page.js"),
    format: "iife",
    globalName: "tapaxPage",
    target: ["chrome110", "firefox115", "safari16.4"],
    minify: true,
    legalComments: "none",
    charset: "utf8",
  });
}
