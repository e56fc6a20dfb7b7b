/** Tokens by layers: norms, a logit lens, results of patching. */
import { colourAt, css, inkOn, paletteOf } from "../draw/colour";
import { formatWithUnit, shorten } from "../draw/format";
import { legend } from "../draw/legend";
import { fitScale, type Scale } from "../draw/scale";
import type { TokenGrid } from "../payload/types";
import { emptyState, select, slider } from "../ui/controls";
import { clear, el, fitCanvas } from "../ui/dom";
import { Toolbar } from "../ui/toolbar";
import type { PageContext, ViewInstance, ViewKind } from "./view";

const ROW = 20;
const TALLEST_ROW = 30;
/** Above this many positions cells are narrow, since a canvas cannot be of any width. */
const MANY = 256;

class Tokens implements ViewInstance {
  private readonly toolbar = new Toolbar();
  private readonly canvas = el("canvas", {
    class: "plot",
    role: "img",
    "aria-label": "Heat map of layers by tokens",
  });
  private readonly frame = el("div", { class: "plot-frame scrolls" }, this.canvas);
  private readonly footer = el("div", { class: "legend-row" });
  private readonly data = new Map<TokenGrid, { numbers: Float32Array; cells: Int32Array | null }>();
  private drawn: {
    grid: TokenGrid;
    rows: number[];
    example: number;
    numbers: Float32Array;
    cells: Int32Array | null;
    left: number;
    top: number;
    cell: number;
    row: number;
  } | null = null;
  private turn = 0;

  constructor(
    private readonly context: PageContext,
    host: HTMLElement,
  ) {
    host.append(this.toolbar.element, this.frame, this.footer);
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => context.tooltip.hide());
    this.canvas.addEventListener("click", (event) => {
      const found = this.find(event);
      const site = found && context.subject().sites[found.grid.sites[found.row]!];
      if (site) context.selectSite(site.name);
    });
  }

  inspect(): unknown {
    return (
      this.drawn && {
        ...this.drawn,
        grid: this.drawn.grid.label,
        numbers: Array.from(this.drawn.numbers),
        cells: null,
      }
    );
  }

  update(): void {
    this.draw().catch((error: unknown) => this.context.report(error));
  }

  private async draw(): Promise<void> {
    const turn = ++this.turn;
    const { context } = this;
    const grids = context.subject().data.tokens;
    const { more } = context.store.state;
    this.toolbar.clear();
    if (!grids.length) {
      clear(this.footer);
      this.frame.replaceChildren(
        emptyState(
          "No tokens",
          "No captured value has the shape [examples, positions, width], so there are no tokens to show.",
          "_, taps = tapax.capture(model)(tokens)\ntapax.view(taps, tokens=texts)",
        ),
      );
      return;
    }
    const grid = grids.find((each) => each.label === more.grid) ?? grids[0]!;
    const example = Math.min(grid.examples - 1, Math.max(0, Number(more.example ?? 0) || 0));
    this.toolbar.append(
      select(
        "Show",
        grids.map((each) => ({ value: each.label, label: each.label })),
        grid.label,
        (label) => context.store.set({ more: { grid: label } }),
      ),
    );
    if (grid.examples > 1) {
      this.toolbar.append(
        slider("Example", example, grid.examples - 1, `${example + 1} of ${grid.examples}`, (value) =>
          context.store.set({ more: { example: String(value) } }),
        ),
      );
    }
    let data = this.data.get(grid);
    if (!data) {
      const { reader } = context.model;
      data = {
        numbers: await reader.floats(grid.data),
        cells: grid.cells ? await reader.integers(grid.cells) : null,
      };
      this.data.set(grid, data);
    }
    if (turn !== this.turn) return;
    if (this.canvas.parentElement !== this.frame) this.frame.replaceChildren(this.canvas);
    const picked = new Set(context.filtered().map((site) => site.index));
    const rows = grid.sites.map((_, i) => i).filter((i) => grid.sites[i]! < 0 || picked.has(grid.sites[i]!));
    this.paint(grid, rows, example, data.numbers, data.cells);
  }

  private paint(
    grid: TokenGrid,
    rows: number[],
    example: number,
    numbers: Float32Array,
    cells: Int32Array | null,
  ): void {
    const theme = this.context.theme();
    const left = this.frame.clientWidth < 620 ? 120 : 210;
    const top = grid.tokens ? 40 : 24;
    const row = Math.max(ROW, Math.min(TALLEST_ROW, (this.frame.clientHeight - top - 30) / Math.max(1, rows.length)));
    const least = cells ? 64 : grid.positions > MANY ? 8 : 14;
    const cell = Math.max(least, Math.min(40, (this.frame.clientWidth - left - 16) / grid.positions));
    const height = top + rows.length * row + 26;
    const graphics = fitCanvas(
      this.canvas,
      Math.max(left + cell * grid.positions + 8, this.frame.clientWidth - 2),
      height,
    );
    const scale: Scale = fitScale(grid.scale, numbers);
    const palette = paletteOf(theme.name, scale.kind === "diverging");
    graphics.font = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
    graphics.textBaseline = "middle";
    rows.forEach((i, y) => {
      const site = this.context.subject().sites[grid.sites[i]!];
      graphics.fillStyle = site && site.name === this.context.store.state.site ? theme.accent : theme.muted;
      graphics.textAlign = "right";
      graphics.fillText(shorten(grid.rowLabels[i]!, Math.floor((left - 14) / 6.7)), left - 8, top + (y + 0.5) * row);
      for (let x = 0; x < grid.positions; x++) {
        const at = (i * grid.examples + example) * grid.positions + x;
        const number = numbers[at]!;
        const colour = Number.isFinite(number) ? colourAt(palette, scale.place(number)) : palette.nonfinite;
        graphics.fillStyle = css(colour);
        graphics.fillRect(left + x * cell, top + y * row, cell - 0.5, row - 0.5);
        const text = cells ? grid.texts?.[cells[at]!] : undefined;
        if (text !== undefined) {
          graphics.fillStyle = inkOn(colour);
          graphics.textAlign = "center";
          graphics.fillText(visible(text).slice(0, 8), left + (x + 0.5) * cell, top + (y + 0.5) * row);
        }
      }
    });
    graphics.fillStyle = theme.muted;
    graphics.textAlign = "center";
    const every = Math.max(1, Math.ceil((grid.tokens ? 14 : 40) / cell));
    for (let x = 0; x < grid.positions; x += every) {
      const text = grid.tokens ? visible(grid.tokens[example]?.[x] ?? "") : String(x);
      graphics.fillText(
        text.slice(0, Math.max(1, Math.floor((cell * every) / 6.8))),
        left + (x + 0.5) * cell,
        top - 10,
      );
    }
    graphics.textAlign = "right";
    graphics.fillText(grid.tokens ? "token" : "position", left - 8, top - 10);
    this.drawn = { grid, rows, example, numbers, cells, left, top, cell, row };
    this.footer.replaceChildren(legend(scale, palette, grid.label, grid.unit, theme.muted));
  }

  private find(event: MouseEvent): { grid: TokenGrid; row: number; position: number; at: number } | null {
    const { drawn } = this;
    if (!drawn) return null;
    const box = this.canvas.getBoundingClientRect();
    const position = Math.floor((event.clientX - box.left - drawn.left) / drawn.cell);
    const row = drawn.rows[Math.floor((event.clientY - box.top - drawn.top) / drawn.row)];
    if (row === undefined || position < 0 || position >= drawn.grid.positions) return null;
    return {
      grid: drawn.grid,
      row,
      position,
      at: (row * drawn.grid.examples + drawn.example) * drawn.grid.positions + position,
    };
  }

  private hover(event: MouseEvent): void {
    const found = this.find(event);
    if (!found || !this.drawn) return this.context.tooltip.hide();
    const { grid, row, position, at } = found;
    const token = grid.tokens?.[this.drawn.example]?.[position];
    const lines: [string, string?][] = [
      [formatWithUnit(this.drawn.numbers[at]!, grid.unit), "big"],
      [grid.label, "muted"],
      [grid.rowLabels[row]!, "mono"],
      [`position ${position}${token === undefined ? "" : `, token ${JSON.stringify(token)}`}`],
    ];
    const text = this.drawn.cells ? grid.texts?.[this.drawn.cells[at]!] : undefined;
    if (text !== undefined) lines.splice(1, 0, [JSON.stringify(text), "mono"]);
    this.context.tooltip.show(event, lines);
  }
}

/** White space as a sign, so that a token of spaces can be seen. */
function visible(text: string): string {
  return text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "·");
}

export const tokens: ViewKind = {
  id: "tokens",
  title: "Tokens",
  group: "Activations",
  has: (context) => context.subject().data.tokens.length > 0,
  make: (context, host) => new Tokens(context, host),
};
