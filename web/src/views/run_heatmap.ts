/** Sites by steps: the heat map of a run. Wheel and keys zoom, a drag moves, a click selects site and step. */
import { paletteOf } from "../draw/colour";
import { formatCount, formatWithUnit } from "../draw/format";
import { type Aggregate, aggregate, drawPixels, paint, type Window } from "../draw/heatmap";
import { type Area, drawFrame, layerOf } from "../draw/heatmap_frame";
import { legend } from "../draw/legend";
import type { LoadedStatistic, Site } from "../model/subject";
import { bound, lowerBound, parseWindow, zoomRange } from "../model/windows";
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

export class RunHeatmap implements ViewInstance {
  private readonly toolbar = new Toolbar();
  private readonly canvas = el("canvas", {
    class: "plot",
    tabindex: 0,
    role: "application",
    "aria-label": "Heat map of sites by steps",
  });
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

  constructor(
    private readonly context: PageContext,
    host: HTMLElement,
  ) {
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
      this.frame.replaceChildren(
        emptyState(
          "No numbers yet",
          "The log has no statistics of sites. The page shows them as soon as the run writes some.",
        ),
      );
      return;
    }
    if (this.canvas.parentElement !== this.frame) this.frame.replaceChildren(this.canvas);
    const zoomed = el(
      "button",
      { type: "button", class: "quiet", onclick: () => this.zoomTo(null), title: "Show everything (0)" },
      "Fit",
    );
    const hint = el("span", { class: "hint" }, "Wheel zooms steps, Shift + wheel sites; drag moves");
    this.toolbar.append(...context.statisticControls(), zoomed, hint);
    const { matrix } = this.statistic;
    this.sites = context.filtered().filter((site) => matrix.row(site.index) >= 0);
    this.rows = Int32Array.from(this.sites, (site) => matrix.row(site.index));
    this.layers = this.sites.map(layerOf);
    const { rows, columns } = context.store.state.more;
    this.window = parseWindow(rows, columns, this.rows.length, matrix.columns);
    this.draw();
  }

  inspect(): unknown {
    const { drawn } = this;
    return (
      drawn && {
        statistic: this.statistic?.key,
        sites: this.sites.map((site) => site.name),
        window: this.full(),
        ...drawn,
        numbers: Array.from(drawn.numbers),
        columnEdges: [...drawn.columnEdges],
        rowEdges: [...drawn.rowEdges],
        area: this.area(),
      }
    );
  }

  private area(): Area {
    const { clientWidth, clientHeight } = this.frame;
    const gutter = clientWidth < 620 ? NARROW_GUTTER : GUTTER;
    return {
      x: gutter,
      y: TOP,
      width: Math.max(20, clientWidth - gutter - RIGHT),
      height: Math.max(20, clientHeight - TOP - BOTTOM),
    };
  }

  private full(): Window {
    return (
      this.window ?? {
        rowFrom: 0,
        rowTo: this.rows.length,
        columnFrom: 0,
        columnTo: this.statistic?.matrix.columns ?? 0,
      }
    );
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
      graphics.fillText(
        this.rows.length ? "No steps yet" : "No site that the filter picks has this statistic",
        clientWidth / 2,
        clientHeight / 2,
      );
      return;
    }
    const window = this.full();
    const scale = context.scale(statistic);
    const palette = paletteOf(theme.name, scale.kind === "diverging");
    const made = aggregate(statistic.matrix, this.rows, window, Math.floor(area.width), Math.floor(area.height));
    this.drawn = made;
    drawPixels(
      graphics,
      paint(made.numbers, made.width, made.height, scale, palette),
      area.x,
      area.y,
      area.width,
      area.height,
    );
    const { sites, layers } = this;
    const { site, step } = context.store.state;
    drawFrame({ graphics, area, window, theme, sites, layers, steps: context.subject().steps, site, step });
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
    Promise.all(some).then(
      () => {
        this.isReading = false;
        const remaining = wanted.slice(some.length);
        if (!this.drawn || !remaining.length || this.drawn.wanted.length !== this.wantedCount) return this.schedule();
        this.readNext(remaining);
      },
      (error: unknown) => context.report(error),
    );
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
        found =
          exact === undefined
            ? {
                row: i,
                column: start,
                columnTo: Math.min(matrix.columns, start + matrix.coarseFactor),
                number,
              }
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
    const where =
      first === last ? `step ${formatCount(first!)}` : `steps ${formatCount(first!)} to ${formatCount(last!)}`;
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
    const columnFrom = bound(
      window.columnFrom - ((event.clientX - drag.x) / area.width) * columns,
      columns,
      this.statistic!.matrix.columns,
    );
    const rowFrom = bound(window.rowFrom - ((event.clientY - drag.y) / area.height) * rows, rows, this.rows.length);
    this.window = { rowFrom, rowTo: rowFrom + rows, columnFrom, columnTo: columnFrom + columns };
    this.schedule();
  }

  private wheel(event: WheelEvent): void {
    event.preventDefault();
    const area = this.area();
    const box = this.canvas.getBoundingClientRect();
    const factor = Math.exp(Math.max(-1, Math.min(1, (event.deltaY || event.deltaX) / 240)));
    this.zoom(
      factor,
      (event.clientX - box.left - area.x) / area.width,
      (event.clientY - box.top - area.y) / area.height,
      event.shiftKey,
    );
  }

  private zoom(factor: number, x: number, y: number, rowsInstead: boolean): void {
    const window = this.full();
    const next = { ...window };
    if (rowsInstead) [next.rowFrom, next.rowTo] = zoomRange(window.rowFrom, window.rowTo, factor, y, this.rows.length);
    else
      [next.columnFrom, next.columnTo] = zoomRange(
        window.columnFrom,
        window.columnTo,
        factor,
        x,
        this.statistic!.matrix.columns,
      );
    this.zoomTo(next);
  }

  private zoomTo(window: Window | null): void {
    this.window = window;
    this.schedule();
    // The address follows when the zooming has come to rest.
    clearTimeout(this.writing);
    this.writing = window ? (setTimeout(() => this.writeWindow(), 180) as unknown as number) : 0;
    if (!window) this.writeWindow();
  }

  private writeWindow(): void {
    const window = this.full();
    const rows = window.rowFrom > 0 || window.rowTo < this.rows.length ? `${window.rowFrom}-${window.rowTo}` : "";
    const columns =
      window.columnFrom > 0 || window.columnTo < this.statistic!.matrix.columns
        ? `${window.columnFrom}-${window.columnTo}`
        : "";
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
