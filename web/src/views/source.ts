/** The user's own source, with the sites of each line and their numbers in the margin. */
import { colourAt, css, paletteOf } from "../draw/colour";
import { fileName, formatNumber } from "../draw/format";
import type { Site } from "../model/subject";
import { outweighs } from "../payload/tiles";
import { MISSING } from "../payload/types";
import { emptyState, select } from "../ui/controls";
import { el } from "../ui/dom";
import { Toolbar } from "../ui/toolbar";
import type { PageContext, ViewInstance, ViewKind } from "./view";

class Source implements ViewInstance {
  private readonly toolbar = new Toolbar();
  private readonly code = el("div", { class: "code", tabindex: 0, role: "document", "aria-label": "Source" });
  private readonly texts = new Map<number, string[]>();
  private turn = 0;
  private shown: {
    file: string;
    lines: number;
    margins: { line: number; sites: string[]; number: number | null }[];
  } | null = null;
  private lastTarget = "";

  constructor(
    private readonly context: PageContext,
    host: HTMLElement,
  ) {
    host.append(this.toolbar.element, this.code);
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
    const { sources } = context.model.header;
    this.toolbar.clear();
    const state = context.store.state;
    const selected = context.subject().site(state.site);
    const wanted = state.more.file !== undefined && state.more.file !== "" ? Number(state.more.file) : undefined;
    const file =
      selected?.source?.[0] ?? wanted ?? context.subject().sites.find((site) => site.source)?.source?.[0] ?? 0;
    const line = selected?.source?.[1] ?? (wanted === file ? Number(state.more.line ?? 0) : 0);
    const entry = sources[file];
    if (!entry) {
      this.code.replaceChildren(
        emptyState(
          "No source",
          "A log has the names of sites, but not the source lines that mark them. View it together with a capture of the step:",
          "tapax.view(log, taps)",
        ),
      );
      return;
    }
    this.toolbar.append(
      select(
        "File",
        sources.map((source, i) => ({ value: String(i), label: fileName(source.path) })),
        String(file),
        (value) => context.store.set({ site: "", more: { file: value, line: "" } }),
      ),
      ...(context.statistic() ? context.statisticControls() : []),
      el("span", { class: "hint mono" }, entry.path),
    );
    if (!entry.text) {
      this.code.replaceChildren(
        emptyState(
          "This file was not read",
          "It is not a Python file of the program, or it could not be opened when the page was made.",
        ),
      );
      return;
    }
    if (!this.texts.has(file)) this.texts.set(file, (await context.model.reader.text(entry.text)).split("\n"));
    if (turn !== this.turn) return;
    this.show(file, line);
  }

  private show(file: number, target: number): void {
    const { context } = this;
    const lines = this.texts.get(file)!;
    const byLine = new Map<number, Site[]>();
    for (const site of context.filtered()) {
      if (site.source?.[0] !== file) continue;
      const known = byLine.get(site.source[1]);
      if (known) known.push(site);
      else byLine.set(site.source[1], [site]);
    }
    const statistic = context.statistic();
    const scale = statistic && context.scale(statistic);
    const palette = paletteOf(context.theme().name, scale?.kind === "diverging");
    const margins: { line: number; sites: string[]; number: number | null }[] = [];
    const rows = lines.map((text, i) => {
      const number = i + 1;
      const sites = byLine.get(number) ?? [];
      const margin = el("div", { class: "margin" });
      if (sites.length) {
        let shown = MISSING;
        for (const site of sites) {
          const row = statistic ? statistic.matrix.row(site.index) : -1;
          if (row < 0) continue;
          const numbers = statistic!.matrix.coarseRow(row);
          const last = numbers[numbers.length - 1] ?? MISSING;
          if (outweighs(last, shown)) shown = last;
        }
        margins.push({
          line: number,
          sites: sites.map((site) => site.name),
          number: shown === MISSING ? null : shown,
        });
        const button = el("button", {
          type: "button",
          class: "margin-site",
          title: sites
            .slice(0, 12)
            .map((site) => site.name)
            .join("\n"),
          onclick: () => context.selectSite(sites[0]!.name),
        });
        if (shown !== MISSING && scale) {
          const swatch = el("span", { class: "swatch" });
          swatch.style.background = css(
            Number.isFinite(shown) ? colourAt(palette, scale.place(shown)) : palette.nonfinite,
          );
          button.append(swatch, el("span", { class: "mono" }, formatNumber(shown)));
        }
        button.append(el("span", { class: "muted" }, sites.length === 1 ? sites[0]!.role : `${sites.length} sites`));
        margin.append(button);
      }
      const isTarget = number === target;
      return el(
        "div",
        { class: isTarget ? "line selected" : sites.length ? "line marked" : "line", id: `line-${number}` },
        margin,
        el("span", { class: "line-number" }, number),
        el("code", {}, text || " "),
      );
    });
    this.code.replaceChildren(...rows);
    this.shown = { file: this.context.model.header.sources[file]!.path, lines: lines.length, margins };
    const key = `${file}:${target}`;
    const goal = rows[(target || margins[0]?.line || 1) - 1];
    if (key !== this.lastTarget && goal) this.code.scrollTop = Math.max(0, goal.offsetTop - this.code.clientHeight / 3);
    this.lastTarget = key;
  }
}

export const source: ViewKind = {
  id: "source",
  title: "Source",
  group: "Program",
  has: (context) => context.subject().sites.some((site) => site.source),
  make: (context, host) => new Source(context, host),
};
