/** Attention heads as small multiples: query positions down, key positions across. */
import { paletteOf } from "../draw/colour";
import { formatNumber, formatType, shorten } from "../draw/format";
import { drawPixels, paint } from "../draw/heatmap";
import { legend } from "../draw/legend";
import { makeScale } from "../draw/scale";
import type { ArrayEntry } from "../payload/types";
import { emptyState, select, slider } from "../ui/controls";
import { clear, el, fitCanvas } from "../ui/dom";
import { Toolbar } from "../ui/toolbar";
import type { PageContext, ViewInstance, ViewKind } from "./view";

/** Values of attention weights: [..., heads, queries, keys]. */
export function weightArrays(context: PageContext): ArrayEntry[] {
  const { sites } = context.subject();
  return context
    .subject()
    .data.arrays.filter(
      ({ of, site, shape }) =>
        of === "value" &&
        shape.length >= 3 &&
        (sites[site]!.kind === "weights" || sites[site]!.path.endsWith(":weights")),
    );
}

class Heads implements ViewInstance {
  private readonly toolbar = new Toolbar();
  private readonly frame = el("div", { class: "plot-frame scrolls multiples" });
  private readonly footer = el("div", { class: "legend-row" });
  private readonly data = new Map<ArrayEntry, Float32Array>();
  private turn = 0;
  private shown: { site: string; example: number; heads: { head: number; numbers: number[] }[] } | null = null;

  constructor(
    private readonly context: PageContext,
    host: HTMLElement,
  ) {
    host.append(this.toolbar.element, this.frame, this.footer);
  }

  inspect(): unknown {
    return this.shown;
  }

  update(): void {
    this.draw().catch((error: unknown) => this.context.report(error));
  }

  private async draw(): Promise<void> {
    const turn = ++this.turn;
    const { context } = this;
    const all = weightArrays(context);
    this.toolbar.clear();
    if (!all.length) {
      clear(this.footer);
      this.frame.replaceChildren(
        emptyState(
          "No attention weights",
          "A capture contains attention weights if a selection names them. If a fused kernel never stores them, tapax computes them from the queries and keys:",
          'tapax.capture(model, values="**:weights")(tokens)',
        ),
      );
      return;
    }
    const { sites } = context.subject();
    const chosen =
      all.find((entry) => sites[entry.site]!.name === context.store.state.site) ??
      all.find((entry) => sites[entry.site]!.name === context.store.state.more.weights) ??
      all[0]!;
    const name = sites[chosen.site]!.name;
    const shape = chosen.shape;
    const [heads, queries, keys] = shape.slice(-3) as [number, number, number];
    const examples = shape.slice(0, -3).reduce((product, n) => product * n, 1);
    const example = Math.min(examples - 1, Number(context.store.state.more.example ?? 0) || 0);
    this.toolbar.append(
      select(
        "Layer",
        all.map((entry) => ({ value: sites[entry.site]!.name, label: shorten(sites[entry.site]!.name, 46) })),
        name,
        (value) => context.store.set({ site: value, more: { weights: value } }),
      ),
    );
    if (examples > 1)
      this.toolbar.append(
        slider("Example", example, examples - 1, `${example + 1} of ${examples}`, (value) =>
          context.store.set({ more: { example: String(value), weights: name } }),
        ),
      );
    this.toolbar.append(el("span", { class: "hint mono" }, formatType(chosen.dtype, shape)));
    if (!chosen.data) {
      this.frame.replaceChildren(emptyState("These weights are not in the page", chosen.omitted ?? ""));
      return;
    }
    let numbers = this.data.get(chosen);
    if (!numbers) {
      numbers = await context.model.reader.floats(chosen.data);
      this.data.set(chosen, numbers);
    }
    if (turn !== this.turn) return;
    const theme = context.theme();
    const palette = paletteOf(theme.name, false);
    const scale = makeScale("linear", 0, 1);
    const size = Math.max(150, Math.min(300, (this.frame.clientWidth - 40) / Math.min(4, heads) - 18));
    this.shown = { site: name, example, heads: [] };
    clear(this.frame);
    for (let head = 0; head < heads; head++) {
      const at = (example * heads + head) * queries * keys;
      const part = numbers.subarray(at, at + queries * keys);
      this.shown.heads.push({ head, numbers: Array.from(part) });
      const canvas = el("canvas", { role: "img", "aria-label": `head ${head}` });
      drawPixels(
        fitCanvas(canvas, size, (size * queries) / keys),
        paint(part, keys, queries, scale, palette),
        0,
        0,
        size,
        (size * queries) / keys,
      );
      canvas.addEventListener("mousemove", (event) => {
        const box = canvas.getBoundingClientRect();
        const key = Math.min(keys - 1, Math.floor(((event.clientX - box.left) / box.width) * keys));
        const query = Math.min(queries - 1, Math.floor(((event.clientY - box.top) / box.height) * queries));
        const tokens = context.subject().data.tokens[0]?.tokens?.[example];
        const label = (i: number) => `${i}${tokens?.[i] === undefined ? "" : ` ${JSON.stringify(tokens[i])}`}`;
        context.tooltip.show(event, [
          [formatNumber(part[query * keys + key]!), "big"],
          ["attention weight", "muted"],
          [`query ${label(query)}`],
          [`key ${label(key)}`],
          [`head ${head}`, "muted"],
        ]);
      });
      canvas.addEventListener("mouseleave", () => context.tooltip.hide());
      this.frame.append(el("figure", { class: "panel" }, el("figcaption", {}, `head ${head}`), canvas));
    }
    this.footer.replaceChildren(
      legend(scale, palette, "attention weight", "", theme.muted),
      el("span", { class: "hint" }, "queries down, keys across"),
    );
  }
}

export const heads: ViewKind = {
  id: "heads",
  title: "Heads",
  group: "Activations",
  has: (context) => weightArrays(context).length > 0,
  make: (context, host) => new Heads(context, host),
};
