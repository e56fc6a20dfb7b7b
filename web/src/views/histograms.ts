/** Histograms of the selected site: ridgelines over time or a heat map; of a capture, one outline for each site. */
import { colourAt, css, LINES, paletteOf } from "../draw/colour";
import { clamp, isGeometric, mergeEdges, powerOfTwo, shareOf, signedLog2 } from "../draw/bins";
import { formatCount, shorten } from "../draw/format";
import { drawPixels, paint } from "../draw/heatmap";
import { legend } from "../draw/legend";
import { makeScale, niceTicks, type Scale, tickLabel } from "../draw/scale";
import { statisticLabel } from "../model/subject";
import type { Histogram } from "../payload/types";
import { emptyState, segmented, select } from "../ui/controls";
import { clear, el, fitCanvas } from "../ui/dom";
import { Toolbar } from "../ui/toolbar";
import type { PageContext, ViewInstance, ViewKind } from "./view";

const LEFT = 76;
const RIGHT = 16;
const BOTTOM = 40;
const RIDGES = 48;

interface Loaded {
  entry: Histogram;
  edges: Float64Array;
  counts: Float32Array;
  lines: number;
  bins: number;
  /** What is written at each line: the step, or the site. */
  labels: string[];
}

interface Panel {
  title: string;
  lines: { label: string; edges: Float64Array; counts: Float32Array }[];
  axis: "step" | "site";
}

class Histograms implements ViewInstance {
  private readonly toolbar = new Toolbar();
  private readonly frame = el("div", { class: "plot-frame scrolls panels" });
  private readonly footer = el("div", { class: "legend-row" });
  private readonly cache = new Map<Histogram, Loaded>();
  private turn = 0;
  private panels: Panel[] = [];

  constructor(
    private readonly context: PageContext,
    host: HTMLElement,
  ) {
    host.append(this.toolbar.element, this.frame, this.footer);
  }

  inspect(): unknown {
    return this.panels.map((panel) => ({
      ...panel,
      lines: panel.lines.map((line) => ({ label: line.label, edges: [...line.edges], counts: [...line.counts] })),
    }));
  }

  update(): void {
    this.draw().catch((error: unknown) => this.context.report(error));
  }

  private async draw(): Promise<void> {
    const turn = ++this.turn;
    const { context } = this;
    const { store } = context;
    const subject = context.subject();
    const all = subject.data.histograms;
    this.toolbar.clear();
    if (!all.length) {
      clear(this.footer);
      this.frame.replaceChildren(
        emptyState(
          "No histograms",
          "There are none here. A monitor logs histograms if they are among its reducers:",
          'bins = tapax.reduce.histogram(log2=(-14, 4))\ntapax.monitor(step, values={"**": bins}, grads={"**": bins})',
        ),
      );
      return;
    }
    const { form = "ridges", range = "shared" } = store.state.more;
    const filtered = new Set(context.filtered().map((site) => site.index));
    const here = all.filter((each) => filtered.has(each.site));
    const withSite = [...new Set(here.map((each) => each.site))].map((index) => subject.sites[index]!);
    const chosen = withSite.find((site) => site.name === store.state.site) ?? withSite[0];
    if (subject.isRun) {
      this.toolbar.append(
        select(
          "Site",
          withSite.map((site) => ({ value: site.name, label: shorten(site.name, 46) })),
          chosen?.name ?? "",
          (name) => context.selectSite(name),
        ),
      );
    }
    this.toolbar.append(
      segmented(
        "Form",
        [
          { value: "ridges", label: "Ridgelines" },
          { value: "heat", label: "Heat map" },
        ],
        form,
        (value) => store.set({ more: { form: value } }),
      ),
      segmented(
        "Range",
        [
          { value: "shared", label: "Shared" },
          { value: "own", label: "Own" },
        ],
        range,
        (value) => store.set({ more: { range: value } }),
      ),
    );
    const wanted = subject.isRun ? here.filter((each) => each.site === chosen?.index) : here;
    const loaded = await Promise.all(wanted.map((entry) => this.load(entry)));
    if (turn !== this.turn) return;
    this.panels = subject.isRun ? loaded.map((each) => this.overTime(each)) : this.bySite(loaded);
    this.show(form, range);
  }

  private async load(entry: Histogram): Promise<Loaded> {
    const known = this.cache.get(entry);
    if (known) return known;
    const { reader } = this.context.model;
    const [edges, counts, steps] = await Promise.all([
      reader.doubles(entry.edges),
      reader.floats(entry.counts),
      entry.steps ? reader.doubles(entry.steps) : null,
    ]);
    const [lines, bins] = entry.counts.shape as [number, number];
    const made = {
      entry,
      edges,
      counts,
      lines,
      bins,
      labels: Array.from(steps ?? [], (step) => formatCount(step)),
    };
    this.cache.set(entry, made);
    return made;
  }

  private overTime(loaded: Loaded): Panel {
    const { entry, edges, counts, lines, bins, labels } = loaded;
    return {
      title: statisticLabel(entry.of, entry.stat),
      axis: "step",
      lines: Array.from({ length: lines }, (_, i) => ({
        label: labels[i] ?? "",
        edges,
        counts: counts.subarray(i * bins, (i + 1) * bins),
      })),
    };
  }

  /** Of a capture: one panel for values and one for gradients, a line for each site. */
  private bySite(loaded: Loaded[]): Panel[] {
    const panels = new Map<string, Panel>();
    const { sites } = this.context.subject();
    for (const { entry, edges, counts } of loaded) {
      const title = statisticLabel(entry.of, entry.stat);
      const panel = panels.get(title) ?? { title, axis: "site" as const, lines: [] };
      panels.set(title, panel);
      panel.lines.push({ label: sites[entry.site]!.name, edges, counts });
    }
    return [...panels.values()];
  }

  private show(form: string, range: string): void {
    if (!this.panels.length) {
      this.frame.replaceChildren(
        emptyState("No histogram of these sites", "No site that the filter picks has a histogram."),
      );
      return;
    }
    const width = Math.max(280, (this.frame.clientWidth - 24) / Math.min(2, this.panels.length) - 12);
    const isHeat = form === "heat" && this.panels[0]!.axis === "step";
    const shares = this.panels.map((panel) => shareOf(panel.lines));
    const scale = makeScale(
      "linear",
      0,
      Math.max(...shares.map((each) => each.reduce((most, x) => (x > most ? x : most), 0)), 1e-9),
    );
    const theme = this.context.theme();
    this.footer.replaceChildren(
      ...(isHeat ? [legend(scale, paletteOf(theme.name, false), "share of elements", "", theme.muted)] : []),
    );
    this.frame.replaceChildren(
      ...this.panels.map((panel, number) => {
        const isLong = panel.axis === "site";
        const height = isLong
          ? Math.max(220, 22 * panel.lines.length + BOTTOM + 50)
          : Math.max(260, this.frame.clientHeight - 48);
        const canvas = el("canvas", {
          role: "img",
          "aria-label": `${panel.title}: ${panel.lines.length} histograms`,
        });
        const figure = el("figure", { class: "panel" }, el("figcaption", {}, panel.title), canvas);
        const left = isLong ? Math.min(210, width * 0.42) : LEFT;
        if (isHeat) this.drawHeat(canvas, panel, shares[number]!, scale, width, height, left);
        else this.drawRidges(canvas, panel, width, height, left, range === "own");
        canvas.addEventListener("click", (event) => {
          if (!isLong) return;
          const y = event.clientY - canvas.getBoundingClientRect().top;
          const at = Math.floor(((y - 30) / (height - BOTTOM - 34)) * panel.lines.length);
          const line = panel.lines[Math.max(0, Math.min(panel.lines.length - 1, at))];
          if (line) this.context.selectSite(line.label);
        });
        return figure;
      }),
    );
  }

  /** Where a value is along the axis: on the bins themselves if they are log2 bins, else linear. */
  private axis(
    panel: Panel,
    own: boolean,
  ): { place(x: number, line: number): number; ticks: number[]; label: string; isLog: boolean } {
    const isLog = panel.lines.every(({ edges }) => isGeometric(edges));
    if (isLog) {
      const edges = mergeEdges(panel.lines);
      const bins = edges.length - 1;
      const exponents = Array.from(edges, (edge) => signedLog2(edge));
      const stride = Math.max(1, Math.ceil(bins / 8));
      return {
        place: (x) => edges.findIndex((edge) => edge >= x) / bins,
        ticks: exponents.flatMap((e, i) => (Number.isFinite(e) && i % stride === 0 ? [edges[i]!] : [])),
        label: "value, bins of powers of two",
        isLog: true,
      };
    }
    const quantile = (pick: (line: Panel["lines"][number]) => number) => panel.lines.map(pick).sort((a, b) => a - b);
    const lows = quantile((line) => line.edges[0]!);
    const highs = quantile((line) => line.edges[line.edges.length - 1]!);
    const low = lows[Math.floor(lows.length * 0.1)]!;
    const high = highs[Math.ceil(highs.length * 0.9) - 1] ?? highs[highs.length - 1]!;
    if (own) {
      return {
        place: (x, i) => {
          const { edges } = panel.lines[i]!;
          return (x - edges[0]!) / (edges[edges.length - 1]! - edges[0]!);
        },
        ticks: [],
        label: "each from its least to its largest value",
        isLog: false,
      };
    }
    return { place: (x) => (x - low) / (high - low), ticks: niceTicks(low, high, 5), label: "value", isLog: false };
  }

  private drawRidges(
    canvas: HTMLCanvasElement,
    panel: Panel,
    width: number,
    height: number,
    left: number,
    own: boolean,
  ): void {
    const theme = this.context.theme();
    const graphics = fitCanvas(canvas, width, height);
    const every = panel.axis === "step" ? Math.max(1, Math.ceil(panel.lines.length / RIDGES)) : 1;
    const lines = panel.lines.map((line, i) => ({ ...line, i })).filter((_, i) => i % every === 0);
    const axis = this.axis(panel, own);
    const plotWidth = width - left - RIGHT;
    const spacing = (height - BOTTOM - 34) / lines.length;
    const tall = panel.axis === "site" ? spacing * 1.5 : Math.max(spacing * 3.2, 22);
    const palette = paletteOf(theme.name, false);
    const peak = Math.max(...lines.map(({ counts }) => Math.max(...counts)));
    graphics.font = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
    graphics.save();
    lines.forEach(({ counts, edges, label, i }, n) => {
      const base = 34 + (n + 1) * spacing - 2;
      const top = panel.axis === "site" || own ? Math.max(...counts) || 1 : peak || 1;
      graphics.beginPath();
      let isOpen = false;
      for (let bin = 0; bin < counts.length; bin++) {
        const from = left + clamp(axis.place(edges[bin]!, i)) * plotWidth;
        const to = left + clamp(axis.place(edges[bin + 1]!, i)) * plotWidth;
        const y = base - (counts[bin]! / top) * tall;
        if (!isOpen) graphics.moveTo(from, base);
        isOpen = true;
        graphics.lineTo((from + to) / 2, y);
      }
      graphics.lineTo(left + clamp(axis.place(edges[edges.length - 1]!, i)) * plotWidth, base);
      const isSelected = panel.axis === "site" && label === this.context.store.state.site;
      const colour =
        panel.axis === "step"
          ? css(colourAt(palette, 0.25 + (0.55 * n) / Math.max(1, lines.length - 1)))
          : LINES[theme.name][panel.title.startsWith("gradient") ? 1 : 0]!;
      graphics.globalAlpha = panel.axis === "step" ? 0.82 : 0.35;
      graphics.fillStyle = colour;
      graphics.fill();
      graphics.globalAlpha = 1;
      graphics.strokeStyle = isSelected ? theme.accent : panel.axis === "step" ? theme.panel : colour;
      graphics.lineWidth = isSelected ? 2 : 1;
      graphics.stroke();
      const stride = Math.max(1, Math.ceil(14 / spacing));
      if (n % stride === 0) {
        graphics.fillStyle = isSelected ? theme.accent : theme.muted;
        graphics.textAlign = "right";
        graphics.fillText(shorten(label, Math.floor((left - 14) / 6.7)), left - 8, base + 1);
      }
    });
    graphics.restore();
    this.drawAxis(graphics, axis, panel, width, height, left);
  }

  private drawHeat(
    canvas: HTMLCanvasElement,
    panel: Panel,
    shares: Float32Array,
    scale: Scale,
    width: number,
    height: number,
    left: number,
  ): void {
    const theme = this.context.theme();
    const graphics = fitCanvas(canvas, width, height);
    const bins = panel.lines[0]!.counts.length;
    const plot = { x: left, y: 12, width: width - left - RIGHT, height: height - BOTTOM - 16 };
    drawPixels(
      graphics,
      paint(shares, panel.lines.length, bins, scale, paletteOf(theme.name, false)),
      plot.x,
      plot.y,
      plot.width,
      plot.height,
    );
    graphics.font = "11px system-ui, sans-serif";
    graphics.fillStyle = theme.muted;
    graphics.textAlign = "right";
    const { edges } = panel.lines[0]!;
    const stride = Math.max(1, Math.ceil(bins / (plot.height / 26)));
    for (let i = 0; i <= bins; i += stride) {
      if (Number.isFinite(edges[i]!))
        graphics.fillText(
          isGeometric(edges) ? powerOfTwo(edges[i]!) : tickLabel(edges[i]!),
          left - 8,
          plot.y + plot.height - (i / bins) * plot.height + 4,
        );
    }
    graphics.textAlign = "center";
    const across = Math.max(1, Math.ceil(panel.lines.length / (plot.width / 70)));
    for (let i = 0; i < panel.lines.length; i += across)
      graphics.fillText(
        panel.lines[i]!.label,
        plot.x + ((i + 0.5) / panel.lines.length) * plot.width,
        height - BOTTOM + 14,
      );
    graphics.fillText("step", plot.x + plot.width / 2, height - 8);
  }

  private drawAxis(
    graphics: CanvasRenderingContext2D,
    axis: ReturnType<Histograms["axis"]>,
    panel: Panel,
    width: number,
    height: number,
    left: number,
  ): void {
    const theme = this.context.theme();
    graphics.fillStyle = theme.muted;
    graphics.font = "11px system-ui, sans-serif";
    graphics.textAlign = "center";
    for (const tick of axis.ticks) {
      const x = left + axis.place(tick, 0) * (width - left - RIGHT);
      graphics.fillRect(x, height - BOTTOM, 1, 4);
      graphics.fillText(axis.isLog ? powerOfTwo(tick) : tickLabel(tick), x, height - BOTTOM + 16);
    }
    graphics.fillText(axis.label, left + (width - left - RIGHT) / 2, height - 6);
    if (panel.axis === "step") {
      graphics.textAlign = "right";
      graphics.fillText("step", left - 8, 24);
    }
  }
}

export const histograms: ViewKind = {
  id: "histograms",
  title: "Histograms",
  group: "Numbers",
  has: (context) => context.subject().data.histograms.length > 0,
  make: (context, host) => new Histograms(context, host),
};
