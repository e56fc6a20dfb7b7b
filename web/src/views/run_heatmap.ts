/** Sites by steps: the heat map of a run. Wheel and keys zoom, a drag moves, a click selects site and step. */
import { paletteOf } from "../draw/colour";
import { formatCount, formatWithUnit, shorten } from "../draw/format";
import { type Aggregate, aggregate, drawPixels, paint, type Window } from "../draw/heatmap";
import { legend } from "../draw/legend";
import { niceTicks } from "../draw/scale";
import type { LoadedStatistic, Site } from "../model/subject";
import { outweighs } from "../payload/tiles";
import { MISSING } from "../payload/types";
import { emptyState } from "../ui/controls";
import { clear, el, fitCanvas } from "../ui/dom";
import { Toolbar } from "../ui/toolbar";
import type { PageContext, ViewInstance } from "./view";

const GUTTER = 210;
const NARROW_GUTTER = 120;
const TOP = 6;
const BOTTOM = 30;
const RIGHT = 14;
const LABEL_HEIGHT = 13;

export class RunHeatmap implements ViewInstance {
  private readonly toolbar = new Toolbar();
  private readonly canvas = el("canvas", { class: "plot", tabindex: 0, role: "application", "aria-label": "Heat map of sites by steps" });
  private readonly frame = el("div", { class: "plot-frame" }, this.canvas);
  private readonly footer = el("div", { class: "legend-row" });
  private sites: Site[] = [];
  private rows = new Int32Array(0);
  private window: Window | null = null;
  private drawn: Aggregate | null = null;
  private drag: { x: number; y: number; window: Window; moved: boolean } | null = null;
  private statistic: LoadedStatistic | undefined;
  private frameRequest = 0;
  private writing = 0;
  private layers: string[] = [];
  private isReading = false;
  private wantedCount = 0;

  constructor(private readonly context: PageContext, host: HTMLElement) {
    host.append(this.toolbar.element, this.frame, this.footer);
    this.canvas.addEventListener("mousemove", (event) => this.move(event));
    this.canvas.addEventListener("mouseleave", () => this.context.tooltip.hide());
    this.canvas.addEventListener("mousedown", (event) => this.press(event));
    this.canvas.addEventListener("dblclick", () => this.zoomTo(null));
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    globalThis.addEventListener("mouseup", this.release);
  }

  destroy(): void {
    globalThis.removeEventListener("mouseup", this.release);
    cancelAnimationFrame(this.frameRequest);
    clearTimeout(this.writing);
  }

  update(): void {
    const { context } = this;
    this.toolbar.clear();
    this.statistic = context.statistic();
    if (!this.statistic) {
      this.frame.replaceChildren(emptyState("No numbers yet", "The log has no statistics of sites. The page shows them as soon as the run writes some."));
      return;
    }
    if (this.canvas.parentElement !== this.frame) this.frame.replaceChildren(this.canvas);
    const zoomed = el("button", { type: "button", class: "quiet", onclick: () => this.zoomTo(null), title: "Show everything (0)" }, "Fit");
    const hint = el("span", { class: "hint" }, "Wheel zooms steps, Shift + wheel sites; drag moves");
    this.toolbar.append(...context.statisticControls(), zoomed, hint);
    const { matrix } = this.statistic;
    this.sites = context.filtered().filter((site) => matrix.row(site.index) >= 0);
    this.rows = Int32Array.from(this.sites, (site) => matrix.row(site.index));
    this.layers = this.sites.map(layerOf);
    this.readWindow();
    this.draw();
  }

  inspect(): unknown {
    const { drawn } = this;
    return drawn && {
      statistic: this.statistic?.key, sites: this.sites.map((site) => site.name), window: this.full(), ...drawn,
      numbers: Array.from(drawn.numbers), columnEdges: [...drawn.columnEdges], rowEdges: [...drawn.rowEdges],
      area: this.area(),
    };
  }

  private area(): { x: number; y: number; width: number; height: number } {
    const { clientWidth, clientHeight } = this.frame;
    const gutter = clientWidth < 620 ? NARROW_GUTTER : GUTTER;
    return { x: gutter, y: TOP, width: Math.max(20, clientWidth - gutter - RIGHT), height: Math.max(20, clientHeight - TOP - BOTTOM) };
  }

  private full(): Window {
    return this.window ?? { rowFrom: 0, rowTo: this.rows.length, columnFrom: 0, columnTo: this.statistic?.matrix.columns ?? 0 };
  }

  private readWindow(): void {
    const { rows, columns } = this.context.store.state.more;
    const columnCount = this.statistic!.matrix.columns;
    const parse = (text: string | undefined, end: number): [number, number] | null => {
      const [from, to] = (text ?? "").split("-").map(Number);
      return from !== undefined && to !== undefined && from >= 0 && to > from && from < end ? [from, Math.min(to, end)] : null;
    };
    const rowRange = parse(rows, this.rows.length);
    const columnRange = parse(columns, columnCount);
    this.window = rowRange || columnRange
      ? { rowFrom: rowRange?.[0] ?? 0, rowTo: rowRange?.[1] ?? this.rows.length, columnFrom: columnRange?.[0] ?? 0, columnTo: columnRange?.[1] ?? columnCount }
      : null;
  }

  private draw = (): void => {
    const { statistic, context } = this;
    if (!statistic) return;
    const theme = context.theme();
    const { clientWidth, clientHeight } = this.frame;
    if (!clientWidth || !clientHeight) return;
    const graphics = fitCanvas(this.canvas, clientWidth, clientHeight);
    const area = this.area();
    if (!this.rows.length || !statistic.matrix.columns) {
      this.drawn = null;
      clear(this.footer);
      graphics.fillStyle = theme.muted;
      graphics.font = "13px system-ui, sans-serif";
      graphics.textAlign = "center";
      graphics.fillText(this.rows.length ? "No steps yet" : "No site that the filter picks has this statistic", clientWidth / 2, clientHeight / 2);
      return;
    }
    const window = this.full();
    const scale = context.scale(statistic);
    const palette = paletteOf(theme.name, scale.kind === "diverging");
    const made = aggregate(statistic.matrix, this.rows, window, Math.floor(area.width), Math.floor(area.height));
    this.drawn = made;
    drawPixels(graphics, paint(made.numbers, made.width, made.height, scale, palette), area.x, area.y, area.width, area.height);
    this.drawLabels(graphics, window);
    this.drawSteps(graphics, window);
    this.drawSelection(graphics, window);
    this.footer.replaceChildren(
      legend(scale, palette, statistic.label, statistic.unit, theme.muted),
      el("span", { class: "hint" }, this.describe(made, window)),
    );
    this.wantedCount = made.wanted.length;
    this.readNext(made.wanted);
  };

  /** Read the tiles that are missing, two at a time, and draw once they are there. */
  private readNext(wanted: [number, number][]): void {
    const { statistic, context } = this;
    if (!statistic || this.isReading || !wanted.length) return;
    this.isReading = true;
    const some = wanted.slice(0, 2).map(([row, column]) => statistic.matrix.readTile(row, column));
    Promise.all(some).then(() => {
      this.isReading = false;
      const remaining = wanted.slice(some.length);
      if (!this.drawn || !remaining.length || this.drawn.wanted.length !== this.wantedCount) return this.schedule();
      this.readNext(remaining);
    }, (error: unknown) => context.report(error));
  }

  private schedule(): void {
    cancelAnimationFrame(this.frameRequest);
    this.frameRequest = requestAnimationFrame(this.draw);
  }

  private describe(made: Aggregate, window: Window): string {
    const sites = window.rowTo - window.rowFrom;
    const steps = window.columnTo - window.columnFrom;
    const shown = `${formatCount(sites)} ${sites === 1 ? "site" : "sites"} × ${formatCount(steps)} ${steps === 1 ? "step" : "steps"}`;
    const folded = made.width < steps || made.height < sites || !made.isExact;
    return folded ? `${shown}; a pixel shows the largest magnitude in it` : shown;
  }

  private drawLabels(graphics: CanvasRenderingContext2D, window: Window): void {
    const theme = this.context.theme();
    const area = this.area();
    const selected = this.context.store.state.site;
    const height = area.height / (window.rowTo - window.rowFrom);
    const stride = Math.max(1, Math.ceil(LABEL_HEIGHT / height));
    const characters = Math.floor((area.x - 14) / 6.4);
    graphics.textAlign = "right";
    graphics.textBaseline = "middle";
    let end = -Infinity;
    for (const [i, text] of this.labels(window, stride, characters)) {
      const y = area.y + (i - window.rowFrom + 0.5) * height;
      if (y < end + LABEL_HEIGHT) continue;
      end = y;
      const chosen = this.sites[i]!.name === selected;
      graphics.fillStyle = chosen ? theme.accent : theme.muted;
      graphics.font = `${chosen ? "600 " : ""}11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace`;
      graphics.fillText(text, area.x - 8, y);
    }
    graphics.textBaseline = "alphabetic";
    if (height < 3) return;
    graphics.fillStyle = theme.panel;
    for (let i = window.rowFrom + 1; i < window.rowTo; i++) {
      if (this.layers[i] !== this.layers[i - 1]) graphics.fillRect(area.x, area.y + (i - window.rowFrom) * height - 0.75, area.width, 1.5);
    }
  }

  /** Rows with a label: every site if there is room, else the first of each layer, else every n-th site. */
  private labels(window: Window, stride: number, characters: number): [number, string][] {
    const made: [number, string][] = [];
    if (stride > 1) {
      let before = "";
      for (let i = window.rowFrom; i < window.rowTo; i++) {
        const layer = this.layers[i]!;
        if (layer !== before) made.push([i, shorten(layer, characters)]);
        before = layer;
      }
      if (made.length <= (window.rowTo - window.rowFrom) / 2) return made;
      made.length = 0;
    }
    for (let i = window.rowFrom; i < window.rowTo; i += stride) made.push([i, shorten(this.sites[i]!.name, characters)]);
    return made;
  }

  private drawSteps(graphics: CanvasRenderingContext2D, window: Window): void {
    const theme = this.context.theme();
    const { steps } = this.context.subject();
    const area = this.area();
    graphics.fillStyle = theme.muted;
    graphics.font = "11px system-ui, sans-serif";
    graphics.textAlign = "center";
    const [first, last] = [steps[window.columnFrom] ?? 0, steps[window.columnTo - 1] ?? 0];
    for (const tick of niceTicks(first, last, Math.max(2, area.width / 110))) {
      const column = lowerBound(steps, tick);
      if (column < window.columnFrom || column >= window.columnTo) continue;
      const x = area.x + ((column - window.columnFrom + 0.5) / (window.columnTo - window.columnFrom)) * area.width;
      graphics.fillRect(Math.round(x), area.y + area.height, 1, 4);
      graphics.fillText(formatCount(tick), x, area.y + area.height + 17);
    }
    graphics.textAlign = "left";
    graphics.fillText("step", 12, area.y + area.height + 17);
  }

  private drawSelection(graphics: CanvasRenderingContext2D, window: Window): void {
    const theme = this.context.theme();
    const { site, step } = this.context.store.state;
    const area = this.area();
    graphics.strokeStyle = theme.accent;
    graphics.lineWidth = 1.5;
    const row = this.sites.findIndex((each) => each.name === site);
    if (row >= window.rowFrom && row < window.rowTo) {
      const height = area.height / (window.rowTo - window.rowFrom);
      const y = area.y + (row - window.rowFrom) * height;
      graphics.strokeRect(area.x - 0.75, y - 0.75, area.width + 1.5, Math.max(height, 2) + 1.5);
    }
    if (step !== null) {
      const column = lowerBound(this.context.subject().steps, step);
      if (column >= window.columnFrom && column < window.columnTo) {
        const x = area.x + ((column - window.columnFrom + 0.5) / (window.columnTo - window.columnFrom)) * area.width;
        graphics.setLineDash([4, 3]);
        graphics.beginPath();
        graphics.moveTo(x, area.y);
        graphics.lineTo(x, area.y + area.height);
        graphics.stroke();
        graphics.setLineDash([]);
      }
    }
  }

  /** The number under the pointer: the one that its pixel shows, with its row and columns. */
  private find(event: MouseEvent): { site: Site; column: number; columnTo: number; number: number } | null {
    const { drawn, statistic } = this;
    if (!drawn || !statistic) return null;
    const area = this.area();
    const box = this.canvas.getBoundingClientRect();
    const x = (event.clientX - box.left - area.x) / area.width;
    const y = (event.clientY - box.top - area.y) / area.height;
    if (x < 0 || x >= 1 || y < 0 || y >= 1) return null;
    const px = Math.floor(x * drawn.width);
    const py = Math.floor(y * drawn.height);
    const { matrix } = statistic;
    const [from, to] = [drawn.columnEdges[px]!, drawn.columnEdges[px + 1]!];
    let found = { row: drawn.rowEdges[py]!, column: from, columnTo: to, number: MISSING };
    for (let i = drawn.rowEdges[py]!; i < drawn.rowEdges[py + 1]!; i++) {
      const row = this.rows[i]!;
      for (let column = from; column < to; column++) {
        const exact = matrix.at(row, column);
        const number = exact ?? matrix.coarse[row * matrix.coarseColumns + Math.floor(column / matrix.coarseFactor)]!;
        if (!outweighs(number, found.number)) continue;
        const start = Math.floor(column / matrix.coarseFactor) * matrix.coarseFactor;
        found = exact === undefined
          ? { row: i, column: start, columnTo: Math.min(matrix.columns, start + matrix.coarseFactor), number }
          : { row: i, column, columnTo: column + 1, number };
      }
    }
    return { site: this.sites[found.row]!, ...found };
  }

  private move(event: MouseEvent): void {
    if (this.drag) return this.pan(event);
    const found = this.find(event);
    if (!found) return this.context.tooltip.hide();
    const { steps } = this.context.subject();
    const [first, last] = [steps[found.column], steps[found.columnTo - 1]];
    const where = first === last ? `step ${formatCount(first!)}` : `steps ${formatCount(first!)} to ${formatCount(last!)}`;
    this.context.tooltip.show(event, [
      [formatWithUnit(found.number, this.statistic!.unit), "big"],
      [this.statistic!.label, "muted"],
      [found.site.name, "mono"],
      [where],
    ]);
  }

  private press(event: MouseEvent): void {
    if (event.button === 0) this.drag = { x: event.clientX, y: event.clientY, window: this.full(), moved: false };
  }

  private readonly release = (event: MouseEvent): void => {
    const { drag } = this;
    this.drag = null;
    if (!drag) return;
    if (drag.moved) return this.writeWindow();
    const found = this.find(event);
    if (found) this.context.selectSite(found.site.name, this.context.subject().steps[found.column] ?? null);
  };

  private pan(event: MouseEvent): void {
    const drag = this.drag!;
    if (Math.abs(event.clientX - drag.x) + Math.abs(event.clientY - drag.y) < 4 && !drag.moved) return;
    drag.moved = true;
    this.context.tooltip.hide();
    const area = this.area();
    const { window } = drag;
    const columns = window.columnTo - window.columnFrom;
    const rows = window.rowTo - window.rowFrom;
    const columnFrom = bound(window.columnFrom - ((event.clientX - drag.x) / area.width) * columns, columns, this.statistic!.matrix.columns);
    const rowFrom = bound(window.rowFrom - ((event.clientY - drag.y) / area.height) * rows, rows, this.rows.length);
    this.window = { rowFrom, rowTo: rowFrom + rows, columnFrom, columnTo: columnFrom + columns };
    this.schedule();
  }

  private wheel(event: WheelEvent): void {
    event.preventDefault();
    const area = this.area();
    const box = this.canvas.getBoundingClientRect();
    const factor = Math.exp(Math.max(-1, Math.min(1, (event.deltaY || event.deltaX) / 240)));
    this.zoom(factor, (event.clientX - box.left - area.x) / area.width, (event.clientY - box.top - area.y) / area.height, event.shiftKey);
  }

  private zoom(factor: number, x: number, y: number, rowsInstead: boolean): void {
    const window = this.full();
    const next = { ...window };
    if (rowsInstead) [next.rowFrom, next.rowTo] = zoomRange(window.rowFrom, window.rowTo, factor, y, this.rows.length);
    else [next.columnFrom, next.columnTo] = zoomRange(window.columnFrom, window.columnTo, factor, x, this.statistic!.matrix.columns);
    this.zoomTo(next);
  }

  private zoomTo(window: Window | null): void {
    this.window = window;
    this.schedule();
    // The address follows when the zooming has come to rest.
    clearTimeout(this.writing);
    this.writing = window ? setTimeout(() => this.writeWindow(), 180) as unknown as number : 0;
    if (!window) this.writeWindow();
  }

  private writeWindow(): void {
    const window = this.full();
    const rows = window.rowFrom > 0 || window.rowTo < this.rows.length ? `${window.rowFrom}-${window.rowTo}` : "";
    const columns = window.columnFrom > 0 || window.columnTo < this.statistic!.matrix.columns ? `${window.columnFrom}-${window.columnTo}` : "";
    this.context.store.set({ more: { rows, columns } });
  }

  private key(event: KeyboardEvent): void {
    const zooms: Record<string, number> = { "+": 0.7, "=": 0.7, "-": 1.4 };
    if (event.key in zooms) this.zoom(zooms[event.key]!, 0.5, 0.5, event.shiftKey);
    else if (event.key === "0") this.zoomTo(null);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") this.stepBy(event.key === "ArrowRight" ? 1 : -1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  private stepBy(by: number): void {
    const { steps } = this.context.subject();
    const { step } = this.context.store.state;
    const at = step === null ? (by > 0 ? 0 : steps.length - 1) : lowerBound(steps, step) + by;
    const next = steps[Math.max(0, Math.min(steps.length - 1, at))];
    if (next !== undefined) this.context.store.set({ step: next });
  }
}

function layerOf(site: Site): string {
  return site.depth.length ? `${site.stack}/${site.depth.join("/")}` : site.name;
}

function bound(from: number, size: number, end: number): number {
  return Math.max(0, Math.min(end - size, Math.round(from)));
}

function zoomRange(from: number, to: number, factor: number, at: number, end: number): [number, number] {
  const size = Math.max(2, Math.min(end, Math.round((to - from) * factor) + (factor > 1 ? 1 : 0)));
  const pivot = from + Math.max(0, Math.min(1, at)) * (to - from);
  const start = Math.max(0, Math.min(end - size, Math.round(pivot - at * size)));
  return [start, start + Math.min(size, end)];
}

/** The number of the first entry that is at least `x`. */
export function lowerBound(sorted: number[], x: number): number {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle]! < x) low = middle + 1;
    else high = middle;
  }
  return low;
}
