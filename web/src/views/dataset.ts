/** A dataset of activations: its columns, a sample of its rows, and the contexts in which a latent is most active. */
import { colourAt, css, inkOn, paletteOf } from "../draw/colour";
import { formatCount, formatNumber, formatType } from "../draw/format";
import { makeScale } from "../draw/scale";
import type { Dataset, TopContexts } from "../payload/types";
import { emptyState, select } from "../ui/controls";
import { el } from "../ui/dom";
import { Toolbar } from "../ui/toolbar";
import type { PageContext, ViewInstance, ViewKind } from "./view";

class DatasetView implements ViewInstance {
  private readonly toolbar = new Toolbar();
  private readonly body = el("div", { class: "dataset scrolls" });
  private shown: unknown = null;

  constructor(
    private readonly context: PageContext,
    host: HTMLElement,
  ) {
    host.append(this.toolbar.element, this.body);
  }

  inspect(): unknown {
    return this.shown;
  }

  update(): void {
    const { context } = this;
    const { dataset } = context.subject().data;
    this.toolbar.clear();
    if (!dataset) {
      this.body.replaceChildren(
        emptyState(
          "No dataset",
          "This is not a dataset of activations. A harvest makes one:",
          'acts = tapax.harvest(model, batches, to="acts", values="GPT/blocks/*")\ntapax.view(acts)',
        ),
      );
      return;
    }
    const top = dataset.tops.find((each) => each.label === context.store.state.more.top) ?? dataset.tops[0];
    if (top)
      this.toolbar.append(
        select(
          "Most active",
          dataset.tops.map((each) => ({ value: each.label, label: each.label })),
          top.label,
          (label) => context.store.set({ more: { top: label } }),
        ),
      );
    this.toolbar.append(
      el("span", { class: "hint" }, `${formatCount(dataset.rows)} rows, ${dataset.columns.length} columns`),
    );
    this.shown = { rows: dataset.rows, top: top?.label ?? null, contexts: top?.contexts.length ?? 0 };
    this.body.replaceChildren(...(top ? [this.contexts(top)] : []), this.table(dataset));
  }

  private contexts(top: TopContexts): HTMLElement {
    const palette = paletteOf(this.context.theme().name, true);
    const all = top.contexts.flatMap((each) => each.activations.map((x) => Math.abs(Number(x))));
    const most = Math.max(...all.filter(Number.isFinite), 1e-30);
    const scale = makeScale("diverging", -most, most);
    return el(
      "section",
      {},
      el("h2", {}, `Contexts in which ${top.label} is most active`),
      ...top.contexts.map((context) =>
        el(
          "div",
          { class: "top-context" },
          el(
            "div",
            { class: "top-facts" },
            el("strong", { class: "mono" }, formatNumber(context.activation)),
            el("span", { class: "muted" }, `row ${formatCount(context.row)}`),
          ),
          el(
            "p",
            { class: "top-tokens mono" },
            ...context.tokens.map((token, i) => {
              const activation = Number(context.activations[i]);
              const span = el("span", { title: formatNumber(activation) }, token);
              const isFinite = Number.isFinite(activation);
              const colour = isFinite ? colourAt(palette, scale.place(activation)) : palette.nonfinite;
              span.style.background = css(colour);
              span.style.color = inkOn(colour);
              return span;
            }),
          ),
        ),
      ),
    );
  }

  private table(dataset: Dataset): HTMLElement {
    return el(
      "section",
      {},
      el("h2", {}, "Rows"),
      el(
        "table",
        { class: "plain" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", { class: "number" }, "row"),
            ...dataset.columns.map((column) =>
              el("th", {}, column.name, el("div", { class: "mono muted" }, formatType(column.dtype, column.shape))),
            ),
          ),
        ),
        el(
          "tbody",
          {},
          ...dataset.sample.row.map((row, i) =>
            el(
              "tr",
              {},
              el("td", { class: "number" }, formatCount(row)),
              ...(dataset.sample.cells[i] ?? []).map((cell) => el("td", { class: "mono" }, cell)),
            ),
          ),
        ),
      ),
    );
  }
}

export const dataset: ViewKind = {
  id: "dataset",
  title: "Dataset",
  group: "More",
  has: (context) => Boolean(context.subject().data.dataset),
  make: (context, host) => new DatasetView(context, host),
};
