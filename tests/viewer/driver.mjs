// Drives a real Chromium for pytest: a line of JSON on stdin is a command, a line on stdout its answer.
// A browser of the machine is taken first, else the one that the npm package @sparticuz/chromium ships.
import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { delimiter, join } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const require = createRequire(join(process.argv[2], "package.json"));
const { chromium } = require("playwright-core");

async function findBrowser() {
  const names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
  for (const folder of (process.env.PATH ?? "").split(delimiter)) {
    for (const name of names) if (existsSync(join(folder, name))) return join(folder, name);
  }
  const { default: packaged } = await import(pathToFileURL(require.resolve("@sparticuz/chromium")).href);
  return (packaged.default ?? packaged).executablePath();
}

const browser = await chromium.launch({ executablePath: await findBrowser(), args: ["--no-sandbox"], headless: true });
const tabs = new Map();
let count = 0;

/** Playwright's own function evaluates its condition inside the page, where the content security policy forbids it. */
async function waitFor(page, script, timeout) {
  const end = Date.now() + timeout;
  while (!(await page.evaluate(script))) {
    if (Date.now() > end) throw new Error(`This did not come true in ${timeout} ms: ${script}`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

const commands = {
  async open({ url, width, height, dark, wait }) {
    const context = await browser.newContext({ viewport: { width, height }, colorScheme: dark ? "dark" : "light", locale: "en-US" });
    const page = await context.newPage();
    const seen = { errors: [], requests: [], failures: [] };
    page.on("console", (message) => {
      if (message.type() === "error") seen.errors.push(message.text());
    });
    page.on("pageerror", (error) => seen.errors.push(error.message));
    page.on("requestfailed", (request) => seen.failures.push(`${request.url()}: ${request.failure()?.errorText}`));
    page.on("request", (request) => {
      if (/^(https?|wss?|ftp):/.test(request.url())) seen.requests.push(request.url());
    });
    const start = performance.now();
    await page.goto(url, { waitUntil: "commit" });
    if (wait) await waitFor(page, wait, 60000);
    tabs.set(++count, { context, page, seen });
    return { tab: count, seconds: (performance.now() - start) / 1000 };
  },
  navigate: async ({ page }, { url }) => void (await page.goto(url, { waitUntil: "load" })),
  resize: ({ page }, { width, height }) => page.setViewportSize({ width, height }),
  evaluate: ({ page }, { script }) => page.evaluate(script),
  wait: ({ page }, { script, timeout }) => waitFor(page, script, timeout),
  click: ({ page }, { selector }) => page.click(selector),
  fill: ({ page }, { selector, text }) => page.fill(selector, text),
  press: ({ page }, { key }) => page.keyboard.press(key),
  move: ({ page }, { x, y }) => page.mouse.move(x, y),
  tap: ({ page }, { x, y }) => page.mouse.click(x, y),
  frames: ({ page }, { script }) => Promise.all(page.frames().map((frame) => frame.evaluate(script))),
  text: ({ page }, { selector }) => page.textContent(selector),
  media: ({ page }, { dark }) => page.emulateMedia({ colorScheme: dark ? "dark" : "light" }),
  screenshot: async ({ page }, { path }) => void (await page.screenshot({ path })),
  seen: ({ seen }) => seen,
  takeSeen: ({ seen }) => Object.fromEntries(Object.entries(seen).map(([kind, list]) => [kind, list.splice(0)])),
  close: async ({ context }, _, tab) => {
    tabs.delete(tab);
    await context.close();
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { command, tab, ...rest } = JSON.parse(line);
  try {
    const result = command === "open" ? await commands.open(rest) : await commands[command](tabs.get(tab), rest, tab);
    process.stdout.write(`${JSON.stringify({ result: result ?? null })}\n`);
  } catch (error) {
    process.stdout.write(`${JSON.stringify({ error: String(error.message ?? error) })}\n`);
  }
}
await browser.close();
