/** Layers by modules: one statistic of a capture, a cell for each site. */
import { colourAt, css, inkOn, paletteOf } from "../draw/colour";
import { formatNumber, formatType, formatWithUnit, shorten } from "../draw/format";
import { legend } from "../draw/legend";
import { type LayerGrid, layOutLayers } from "../model/layer_grid";
import type { LoadedStatistic, Site } from "../model/subject";
import { outweighs } from "../payload/tiles";
import { MISSING } from "../payload/types";
import { emptyState } from "../ui/controls";
import { clear, el, fitCanvas } from "../ui/dom";
import { Toolbar } from "../ui/toolbar";
import type { PageContext, ViewInstance } from "./view";

const HEADER = 92;
const ROW = 26;
const LEAST_COLUMN = 30;

interface Cell {
  sites: Site[];
  number: number;
  x: number;
  y: number;
  width: number;
  height: number;
}

export class CaptureGrid implements ViewInstance {
  private readonly toolbar = new Toolbar();
  private readonly canvas = el("canvas", {
    class: "plot",
    tabindex: 0,
    role: "application",
    "aria-label": "Heat map of layers by modules",
  });
  private readonly frame = el("div", { class: "plot-frame scrolls" }, this.canvas);
  private readonly footer = el("div", { class: "legend-row" });
  private cells: Cell[] = [];
  private statistic: LoadedStatistic | undefined;

  constructor(
    private readonly context: PageContext,
    host: HTMLElement,
  ) {
    host.append(this.toolbar.element, this.frame, this.footer);
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => context.tooltip.hide());
    this.canvas.addEventListener("click", (event) => {
      const cell = this.find(event);
      if (cell) context.selectSite(cell.sites[0]!.name);
    });
  }

  update(): void {
    const { context } = this;
    this.toolbar.clear();
    this.statistic = context.statistic();
    if (!this.statistic) {
      clear(this.footer);
      this.frame.replaceChildren(
        emptyState(
          "No numbers here",
          "A table of sites has types and sources, but no values. A capture has them:",
          "_, taps = tapax.capture(step)(...)\ntapax.view(taps)",
        ),
      );
      return;
    }
    this.toolbar.append(...context.statisticControls());
    if (this.canvas.parentElement !== this.frame) this.frame.replaceChildren(this.canvas);
    const { matrix } = this.statistic;
    this.draw(layOutLayers(context.filtered().filter((site) => matrix.row(site.index) >= 0)));
  }

  inspect(): unknown {
    return {
      statistic: this.statistic?.key,
      cells: this.cells.map((cell) => ({ ...cell, sites: cell.sites.map((site) => site.name) })),
    };
  }

  private draw(grid: LayerGrid): void {
    const statistic = this.statistic!;
    const theme = this.context.theme();
    const gutter = this.frame.clientWidth < 620 ? 120 : 200;
    const nColumns = Math.max(1, grid.columns.length);
    const room = Math.max(nColumns * LEAST_COLUMN, this.frame.clientWidth - gutter - 16);
    const cellWidth = Math.min(120, room / nColumns);
    const top = grid.columns.length > 1 ? HEADER : 12;
    const rowHeight = Math.min(34, Math.max(ROW, (this.frame.clientHeight - top - 12) / Math.max(1, grid.rows.length)));
    const height = top + rowHeight * grid.rows.length + 8;
    const width = gutter + cellWidth * nColumns + 8;
    const graphics = fitCanvas(this.canvas, Math.max(width, this.frame.clientWidth - 2), Math.max(height, 60));
    const scale = this.context.scale(statistic);
    const palette = paletteOf(theme.name, scale.kind === "diverging");
    this.cells = [];
    graphics.font = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
    grid.columns.forEach((label, i) => {
      graphics.save();
      graphics.translate(gutter + (i + 0.5) * cellWidth + 3, top - 8);
      graphics.rotate(cellWidth > 90 ? 0 : -Math.PI / 5);
      graphics.fillStyle = theme.muted;
      graphics.textAlign = cellWidth > 90 ? "center" : "left";
      graphics.fillText(shorten(label || (grid.columns.length > 1 ? "outside layers" : ""), 18), 0, 0);
      graphics.restore();
    });
    grid.rows.forEach((row, j) => {
      const y = top + j * rowHeight;
      graphics.fillStyle = theme.muted;
      graphics.textAlign = "right";
      graphics.textBaseline = "middle";
      graphics.fillText(shorten(row.label, Math.floor((gutter - 14) / 6.7)), gutter - 8, y + rowHeight / 2);
      for (const [column, sites] of row.cells) {
        let number = MISSING;
        for (const site of sites) {
          const each = statistic.matrix.at(statistic.matrix.row(site.index), 0) ?? MISSING;
          if (outweighs(each, number)) number = each;
        }
        const cell = {
          sites,
          number,
          x: gutter + column * cellWidth + 1,
          y: y + 1,
          width: cellWidth - 2,
          height: rowHeight - 2,
        };
        this.cells.push(cell);
        if (number === MISSING) continue;
        const colour = Number.isFinite(number) ? colourAt(palette, scale.place(number)) : palette.nonfinite;
        graphics.fillStyle = css(colour);
        graphics.beginPath();
        graphics.roundRect(cell.x, cell.y, cell.width, cell.height, 3);
        graphics.fill();
        if (cellWidth >= 52) {
          graphics.fillStyle = inkOn(colour);
          graphics.textAlign = "center";
          graphics.fillText(formatNumber(number), cell.x + cell.width / 2, y + rowHeight / 2 + 0.5);
        }
        if (sites.some((site) => site.name === this.context.store.state.site)) {
          graphics.strokeStyle = theme.accent;
          graphics.lineWidth = 2;
          graphics.stroke();
        }
      }
    });
    if (!grid.rows.length) {
      graphics.fillStyle = theme.muted;
      graphics.textAlign = "center";
      graphics.fillText("No site that the filter picks has this statistic", this.frame.clientWidth / 2, 40);
    }
    this.footer.replaceChildren(legend(scale, palette, statistic.label, statistic.unit, theme.muted));
  }

  private find(event: MouseEvent): Cell | undefined {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    return this.cells.find((cell) => x >= cell.x && x < cell.x + cell.width && y >= cell.y && y < cell.y + cell.height);
  }

  private hover(event: MouseEvent): void {
    const cell = this.find(event);
    if (!cell) return this.context.tooltip.hide();
    const site = cell.sites[0]!;
    const lines: [string, string?][] = [
      [formatWithUnit(cell.number, this.statistic!.unit), "big"],
      [this.statistic!.label, "muted"],
      [site.name, "mono"],
    ];
    if (site.shape) lines.push([formatType(site.dtype, site.shape), "mono muted"]);
    if (cell.sites.length > 1) lines.push([`the largest magnitude of ${cell.sites.length} sites`, "muted"]);
    this.context.tooltip.show(event, lines);
  }
}
