/** The array of one site: a slice of two axes as a heat map, statistics along every axis, and treescope's summary. */
import { LINES, paletteOf } from "../draw/colour";
import { formatNumber, formatType, shorten } from "../draw/format";
import { drawPixels, paint } from "../draw/heatmap";
import { legend } from "../draw/legend";
import { fitScale } from "../draw/scale";
import { axisStatistics, takeSlice } from "../model/slices";
import type { ArrayEntry } from "../payload/types";
import { emptyState, segmented, select, slider } from "../ui/controls";
import { clear, el, fitCanvas } from "../ui/dom";
import { Toolbar } from "../ui/toolbar";
import type { PageContext, ViewInstance, ViewKind } from "./view";

class Arrays implements ViewInstance {
  private readonly toolbar = new Toolbar();
  private readonly controls = new Toolbar("toolbar slice-controls");
  private readonly frame = el("div", { class: "plot-frame scrolls inspector" });
  private readonly footer = el("div", { class: "legend-row" });
  private readonly data = new Map<ArrayEntry, Float32Array>();
  private turn = 0;
  private shown: unknown = null;

  constructor(
    private readonly context: PageContext,
    host: HTMLElement,
  ) {
    host.append(this.toolbar.element, this.controls.element, this.frame, this.footer);
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
    const { store } = context;
    const subject = context.subject();
    this.toolbar.clear();
    this.controls.clear();
    clear(this.footer);
    const all = subject.data.arrays;
    if (!all.length) {
      this.frame.replaceChildren(
        emptyState(
          "No arrays",
          subject.data.dataset
            ? "This page has only some rows of the dataset. Read its arrays in Python, or view a capture:"
            : "A log contains only statistics. A capture contains arrays:",
          "_, taps = tapax.capture(step)(...)\ntapax.view(taps)",
        ),
      );
      return;
    }
    const { of = "value", axes = "", indices = "" } = store.state.more;
    const withArray = [...new Set(all.map((entry) => entry.site))];
    const picked = new Set(context.filtered().map((site) => site.index));
    const listed = withArray.filter((site) => picked.has(site));
    const site = subject.site(store.state.site)?.index ?? -1;
    const index = withArray.includes(site) ? site : (listed[0] ?? withArray[0]!);
    const entries = all.filter((entry) => entry.site === index);
    const entry = entries.find((each) => each.of === of) ?? entries[0]!;
    this.toolbar.append(
      select(
        "Site",
        (listed.includes(index) ? listed : [index, ...listed]).map((i) => ({
          value: subject.sites[i]!.name,
          label: shorten(subject.sites[i]!.name, 46),
        })),
        subject.sites[index]!.name,
        (name) => context.selectSite(name),
      ),
    );
    if (entries.length > 1) {
      this.toolbar.append(
        segmented(
          "Of",
          entries.map((each) => ({ value: each.of, label: each.of === "grad" ? "Gradient" : "Value" })),
          entry.of,
          (value) => store.set({ more: { of: value } }),
        ),
      );
    }
    this.toolbar.append(el("span", { class: "hint mono" }, formatType(entry.dtype, entry.shape)));
    if (!entry.data) {
      this.frame.replaceChildren(emptyState("This array is not in the page", entry.omitted ?? ""));
      return;
    }
    let numbers = this.data.get(entry);
    if (!numbers) {
      numbers = await context.model.reader.floats(entry.data);
      this.data.set(entry, numbers);
    }
    if (turn !== this.turn) return;
    this.showSlice(entry, numbers, axes, indices);
  }

  private showSlice(entry: ArrayEntry, numbers: Float32Array, axesText: string, indicesText: string): void {
    const { context } = this;
    const { store } = context;
    const theme = context.theme();
    const rank = entry.shape.length;
    const [a, b] = axesText.split(",").map((text) => (text === "" ? NaN : Number(text)));
    const valid = (axis: number | undefined): axis is number =>
      axis !== undefined && Number.isInteger(axis) && axis >= 0 && axis < rank;
    const across = rank ? (valid(b) ? b : rank - 1) : -1;
    const down = rank > 1 ? (valid(a) && a !== across ? a : across === rank - 2 ? rank - 1 : rank - 2) : -1;
    const given = indicesText.split(",").map((text) => Number.parseInt(text, 10));
    const indices = entry.shape.map((n, axis) => Math.max(0, Math.min(n - 1, given[axis] || 0)));
    const slice = takeSlice(numbers, entry.shape, indices, down, across);
    this.shown = {
      site: context.subject().sites[entry.site]!.name,
      of: entry.of,
      ...slice,
      numbers: Array.from(slice.numbers),
      indices,
    };
    const { controls } = this;
    controls.clear();
    if (rank > 1) {
      const options = entry.shape.map((n, axis) => ({ value: String(axis), label: `axis ${axis} (${n})` }));
      controls.append(
        select("Down", options, String(down), (value) =>
          store.set({ more: { axes: `${value},${Number(value) === across ? down : across}` } }),
        ),
        select("Across", options, String(across), (value) =>
          store.set({ more: { axes: `${Number(value) === down ? across : down},${value}` } }),
        ),
      );
    }
    entry.shape.forEach((n, axis) => {
      if (axis === down || axis === across || n < 2) return;
      controls.append(
        slider(`Axis ${axis}`, indices[axis]!, n - 1, `${indices[axis]} of ${n}`, (value) => {
          const now = (store.state.more.indices || "").split(",").map((text) => Number.parseInt(text, 10) || 0);
          store.set({
            more: { indices: entry.shape.map((_, i) => (i === axis ? value : (now[i] ?? 0))).join(",") },
          });
        }),
      );
    });
    const negative = slice.numbers.some((x) => x < 0);
    const scale = fitScale(negative ? "diverging" : "linear", slice.numbers);
    const palette = paletteOf(theme.name, negative);
    const room = Math.max(200, this.frame.clientWidth - 40);
    const cell = Math.max(
      1,
      Math.min(28, room / slice.columns, Math.max(2, (this.frame.clientHeight - 240) / slice.rows)),
    );
    const [width, height] = [cell * slice.columns, Math.min(2000, cell * slice.rows)];
    const canvas = el("canvas", { role: "img", "aria-label": "Slice of the array" });
    drawPixels(
      fitCanvas(canvas, width, Math.max(height, 14)),
      paint(slice.numbers, slice.columns, slice.rows, scale, palette),
      0,
      0,
      width,
      Math.max(height, 14),
    );
    canvas.addEventListener("mousemove", (event) => {
      const box = canvas.getBoundingClientRect();
      const column = Math.min(
        slice.columns - 1,
        Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * slice.columns)),
      );
      const row = Math.min(
        slice.rows - 1,
        Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * slice.rows)),
      );
      const place = indices.map((index, axis) => (axis === down ? row : axis === across ? column : index));
      context.tooltip.show(event, [
        [formatNumber(slice.numbers[row * slice.columns + column]!), "big"],
        [`element [${place.join(", ")}]`, "mono"],
      ]);
    });
    canvas.addEventListener("mouseleave", () => context.tooltip.hide());
    this.frame.replaceChildren(
      ...(entry.rendering ? [el("div", { class: "mono muted", title: "as treescope shows it" }, entry.rendering)] : []),
      el("div", { class: "slice" }, canvas),
      this.axisPanels(entry, numbers),
    );
    this.footer.replaceChildren(legend(scale, palette, entry.of === "grad" ? "gradient" : "value", "", theme.muted));
  }

  /** The root mean square along each axis: which channel, position or example is large. */
  private axisPanels(entry: ArrayEntry, numbers: Float32Array): HTMLElement {
    const theme = this.context.theme();
    const panels = entry.shape.map((n, axis) => {
      const canvas = el("canvas", { role: "img", "aria-label": `rms along axis ${axis}` });
      const [width, height] = [260, 74];
      const graphics = fitCanvas(canvas, width, height);
      const rms = axisStatistics(numbers, entry.shape, axis);
      const top = rms.reduce((most, x) => (Number.isFinite(x) && x > most ? x : most), 0) || 1;
      const bar = width / n;
      rms.forEach((x, i) => {
        graphics.fillStyle = Number.isFinite(x) ? LINES[theme.name][0]! : theme.bad;
        const h = Number.isFinite(x) ? Math.max(0.5, (x / top) * (height - 16)) : height - 16;
        graphics.fillRect(i * bar, height - h, Math.max(0.6, bar - (bar > 3 ? 1 : 0)), h);
      });
      graphics.fillStyle = theme.muted;
      graphics.font = "11px system-ui, sans-serif";
      graphics.fillText(`up to ${formatNumber(top)}`, 0, 10);
      canvas.addEventListener("mousemove", (event) => {
        const i = Math.min(n - 1, Math.max(0, Math.floor((event.offsetX / width) * n)));
        this.context.tooltip.show(event, [
          [formatNumber(rms[i]!), "big"],
          [`rms of all elements with index ${i} on axis ${axis}`, "muted"],
        ]);
      });
      canvas.addEventListener("mouseleave", () => this.context.tooltip.hide());
      return el("figure", { class: "panel" }, el("figcaption", {}, `rms along axis ${axis} (${n})`), canvas);
    });
    return el("div", { class: "axis-panels" }, ...panels);
  }
}

export const arrays: ViewKind = {
  id: "arrays",
  title: "Arrays",
  group: "Activations",
  has: (context) => context.subject().data.arrays.length > 0,
  make: (context, host) => new Arrays(context, host),
};
