/** The graph of modules, folded by their paths. Loops are drawn once, with the number of their iterations. */
import { colourAt, css, inkOn, paletteOf } from "../draw/colour";
import { drawEdge } from "../draw/edges";
import { formatCount, formatType, formatWithUnit } from "../draw/format";
import { legend } from "../draw/legend";
import { SVG, shape } from "../draw/svg";
import { type Box, type GraphLayout, layOutGraph } from "../model/graph_layout";
import { keepNearest, type ModuleEdge, visibleEdges } from "../model/module_edges";
import { buildTree, type ModuleNode, openByDefault, visibleNodes } from "../model/module_tree";
import { outweighs } from "../payload/tiles";
import { MISSING } from "../payload/types";
import { emptyState } from "../ui/controls";
import { clear, el } from "../ui/dom";
import { Toolbar } from "../ui/toolbar";
import { lowerBound } from "../model/windows";
import type { PageContext, ViewInstance, ViewKind } from "./view";

/** How many modules are open at first, and how many can be laid out at once. */
const FIRST = 60;
const MOST = 1200;
/** How many lines can be laid out at once. */
const MOST_LINES = 2000;

class ModuleGraph implements ViewInstance {
  private readonly toolbar = new Toolbar();
  private readonly svg = document.createElementNS(SVG, "svg");
  private readonly frame = el("div", { class: "plot-frame graph-frame" });
  private readonly footer = el("div", { class: "legend-row" });
  private readonly layer = document.createElementNS(SVG, "g");
  private tree: ModuleNode = buildTree([]);
  private open: Set<string> | null = null;
  private layout: GraphLayout | null = null;
  private edges: ModuleEdge[] = [];
  private hidden = 0;
  private laidOut: [string, unknown] = ["", null];
  private transform = { x: 0, y: 0, k: 1 };
  private turn = 0;
  private numbers = new Map<string, number>();

  constructor(
    private readonly context: PageContext,
    host: HTMLElement,
  ) {
    host.append(this.toolbar.element, this.frame, this.footer);
    this.svg.setAttribute("class", "graph");
    this.svg.setAttribute("role", "group");
    this.svg.setAttribute("aria-label", "Graph of modules");
    this.svg.append(this.layer);
    this.frame.append(this.svg);
    this.listen();
  }

  inspect(): unknown {
    return (
      this.layout && {
        boxes: this.layout.boxes.map(({ node, x, y, width, height }) => ({
          path: node.path,
          repeats: node.repeats,
          x,
          y,
          width,
          height,
          number: this.numbers.get(node.path) ?? null,
        })),
        edges: this.edges
          .filter((edge) => this.layout!.lines.has(edge))
          .map(({ from, to, label, isBack, isOrder }) => ({
            from: from.path,
            to: to.path,
            label,
            isBack,
            isOrder,
          })),
      }
    );
  }

  update(): void {
    this.draw().catch((error: unknown) => this.context.report(error));
  }

  private async draw(): Promise<void> {
    const turn = ++this.turn;
    const { context } = this;
    const sites = context.filtered();
    this.toolbar.clear();
    if (!sites.length) {
      clear(this.layer);
      this.frame.replaceChildren(emptyState("No module matches", "The filter picks no site."));
      return;
    }
    if (this.svg.parentElement !== this.frame) this.frame.replaceChildren(this.svg);
    this.tree = buildTree(sites);
    const folded = context.store.state.more.open;
    this.open =
      folded === undefined ? openByDefault(this.tree, FIRST) : new Set(["", ...folded.split("|").filter(Boolean)]);
    const statistic = context.statistic();
    this.toolbar.append(
      ...(statistic ? context.statisticControls() : []),
      el(
        "button",
        { type: "button", class: "quiet", onclick: () => this.setOpen(openByDefault(this.tree, MOST)) },
        "Open all",
      ),
      el("button", { type: "button", class: "quiet", onclick: () => this.setOpen(new Set([""])) }, "Close all"),
      el("button", { type: "button", class: "quiet", onclick: () => this.fit() }, "Fit"),
    );
    const flow = context.subject().data.edges;
    const key = JSON.stringify([context.subject().index, visibleNodes(this.tree, this.open).map((node) => node.path)]);
    if (key !== this.laidOut[0] || flow !== this.laidOut[1]) {
      const all = visibleEdges(this.tree, this.open, flow);
      const edges = keepNearest(all, MOST_LINES);
      const layout = await layOutGraph(this.tree, this.open, edges);
      if (turn !== this.turn) return;
      const isSame = key === this.laidOut[0];
      this.layout = layout;
      this.edges = edges;
      this.hidden = all.length - edges.length;
      this.laidOut = [key, flow];
      if (!isSame) this.fit();
    }
    this.paint();
  }

  private setOpen(open: Set<string>): void {
    this.context.store.set({ more: { open: [...open].filter(Boolean).join("|") || "|" } });
  }

  private toggle(node: ModuleNode): void {
    const open = new Set(this.open);
    if (open.has(node.path)) open.delete(node.path);
    else open.add(node.path);
    this.setOpen(open);
  }

  /** The number of a module: of its own sites, or of all in it if it is closed. */
  private numberOf(node: ModuleNode, isOpen: boolean): number {
    const statistic = this.context.statistic();
    if (!statistic) return MISSING;
    const { matrix } = statistic;
    const { steps } = this.context.subject();
    const { step } = this.context.store.state;
    const column = steps.length
      ? Math.min(steps.length - 1, step === null ? steps.length - 1 : lowerBound(steps, step))
      : 0;
    let found = MISSING;
    const take = (each: ModuleNode, deep: boolean) => {
      for (const site of each.sites) {
        const row = matrix.row(site.index);
        const number =
          row < 0
            ? MISSING
            : (matrix.at(row, column) ??
              matrix.coarse[row * matrix.coarseColumns + Math.floor(column / matrix.coarseFactor)]!);
        if (outweighs(number, found)) found = number;
      }
      if (deep) each.children.forEach((child) => take(child, true));
    };
    take(node, !isOpen && !node.sites.length);
    return found;
  }

  private paint(): void {
    const { context, layout } = this;
    if (!layout) return;
    const theme = context.theme();
    const statistic = context.statistic();
    const scale = statistic && context.scale(statistic);
    const palette = paletteOf(theme.name, scale?.kind === "diverging");
    clear(this.layer);
    this.numbers.clear();
    for (const box of layout.boxes) {
      const isOpen = this.open!.has(box.node.path) && box.node.children.length > 0;
      const number = this.numberOf(box.node, isOpen);
      this.numbers.set(box.node.path, number);
      const colour =
        scale && number !== MISSING
          ? Number.isFinite(number)
            ? colourAt(palette, scale.place(number))
            : palette.nonfinite
          : null;
      this.layer.append(this.drawBox(box, isOpen, colour && css(colour), colour && inkOn(colour)));
    }
    for (const [edge, line] of layout.lines) this.layer.append(drawEdge(edge, line));
    this.footer.replaceChildren(
      ...(statistic && scale ? [legend(scale, palette, statistic.label, statistic.unit, theme.muted)] : []),
      el(
        "span",
        { class: "hint" },
        `${formatCount(layout.boxes.length)} boxes, ${formatCount(this.tree.count)} sites. ${this.describeLines()}`,
      ),
    );
  }

  private describeLines(): string {
    const { edges, limited } = this.context.subject().data;
    if (!edges)
      return "The flow of data is not known here: lines join modules in the order in which the program runs them.";
    const back = this.edges.some((edge) => edge.isBack) ? ", dashed through the carry of a loop" : "";
    const count = limited?.length ?? 0;
    const verb = count === 1 ? "site receives" : "sites receive";
    const rest = count ? ` ${formatCount(count)} ${verb} data of more sites than the lines show.` : "";
    const hidden = this.hidden ? ` ${formatCount(this.hidden)} more lines, from farther modules, are left out.` : "";
    return `Lines show the flow of data${back}.${rest}${hidden}`;
  }

  private drawBox(box: Box, isOpen: boolean, fill: string | null, ink: string | null): SVGElement {
    const { node } = box;
    const selected = this.context.store.state.site;
    const isSelected = node.sites.some((site) => site.name === selected);
    const group = shape("g", {
      class: `module${isOpen ? " open" : ""}${isSelected ? " selected" : ""}${node.isConditional ? " conditional" : ""}`,
      tabindex: 0,
      role: "button",
      transform: `translate(${box.x} ${box.y})`,
    });
    const rectangle = shape("rect", { width: box.width, height: box.height, rx: 6 });
    if (fill && !isOpen) rectangle.style.fill = fill;
    group.append(rectangle);
    if (fill && isOpen) {
      const chip = shape("rect", { x: 10, y: 9, width: 12, height: 12, rx: 3, class: "chip" });
      chip.style.fill = fill;
      group.append(chip);
    }
    const mark = node.children.length ? (isOpen ? "− " : "+ ") : "";
    const text = shape("text", { x: isOpen ? (fill ? 30 : 12) : 12, y: isOpen ? 19 : box.height / 2 + 4 });
    text.textContent = `${mark}${node.label}`;
    if (ink && !isOpen) text.style.fill = ink;
    group.append(text);
    const repeats = [node.repeats, node.isConditional ? "cond" : ""].filter(Boolean).join("  ");
    if (repeats) {
      const badge = shape("text", { x: box.width - 10, y: isOpen ? 19 : box.height / 2 + 4, class: "badge" });
      badge.textContent = repeats;
      if (ink && !isOpen) badge.style.fill = ink;
      group.append(badge);
    }
    group.addEventListener("mousemove", (event) => this.hover(event, node));
    group.addEventListener("mouseleave", () => this.context.tooltip.hide());
    const act = (event: Event) => {
      event.stopPropagation();
      if (node.children.length && (!node.sites.length || event.type === "dblclick" || isMark(event, box)))
        this.toggle(node);
      else if (node.sites[0]) this.context.selectSite(node.sites[0].name);
    };
    group.addEventListener("click", act);
    group.addEventListener("dblclick", act);
    group.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        if (node.sites[0] && event.key === "Enter") this.context.selectSite(node.sites[0].name);
        else if (node.children.length) this.toggle(node);
      }
    });
    return group;
  }

  private hover(event: MouseEvent, node: ModuleNode): void {
    const number = this.numbers.get(node.path) ?? MISSING;
    const statistic = this.context.statistic();
    const site = node.sites[0];
    const lines: [string, string?][] = [[node.path, "mono"]];
    if (site?.module) lines.push([site.module]);
    if (site?.shape) lines.push([formatType(site.dtype, site.shape), "mono muted"]);
    if (statistic && number !== MISSING)
      lines.unshift([formatWithUnit(number, statistic.unit), "big"], [statistic.label, "muted"]);
    if (node.children.length) lines.push([`${formatCount(node.count)} sites in it`, "muted"]);
    const limited = new Set(this.context.subject().data.limited);
    if (node.sites.some((each) => limited.has(each.index)))
      lines.push(["Data of more than 32 sites flow to it; lines show the last 32", "muted"]);
    this.context.tooltip.show(event, lines);
  }

  private fit(): void {
    if (!this.layout) return;
    const { clientWidth, clientHeight } = this.frame;
    const k = Math.max(
      0.35,
      Math.min(1, (clientWidth - 40) / this.layout.width, Math.max(0.9, (clientHeight - 30) / this.layout.height)),
    );
    this.transform = { k, x: Math.max(20, (clientWidth - this.layout.width * k) / 2), y: 14 };
    this.move();
  }

  private move(): void {
    const { x, y, k } = this.transform;
    this.layer.setAttribute("transform", `translate(${x} ${y}) scale(${k})`);
  }

  private listen(): void {
    let drag: { x: number; y: number } | null = null;
    this.svg.addEventListener(
      "pointerdown",
      (event) => (drag = { x: event.clientX - this.transform.x, y: event.clientY - this.transform.y }),
    );
    this.svg.addEventListener("pointermove", (event) => {
      if (!drag || !event.buttons) return;
      this.transform = { ...this.transform, x: event.clientX - drag.x, y: event.clientY - drag.y };
      this.move();
    });
    this.svg.addEventListener("pointerup", () => (drag = null));
    this.svg.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const box = this.svg.getBoundingClientRect();
        const [px, py] = [event.clientX - box.left, event.clientY - box.top];
        if (!event.ctrlKey && !event.metaKey && !event.shiftKey) {
          this.transform = {
            ...this.transform,
            x: this.transform.x - event.deltaX,
            y: this.transform.y - event.deltaY,
          };
        } else {
          const k = Math.max(0.15, Math.min(2.5, this.transform.k * Math.exp(-(event.deltaY || event.deltaX) / 300)));
          const ratio = k / this.transform.k;
          this.transform = {
            k,
            x: px - (px - this.transform.x) * ratio,
            y: py - (py - this.transform.y) * ratio,
          };
        }
        this.move();
      },
      { passive: false },
    );
  }
}

/** Whether a click is on the sign that opens or closes a container. */
function isMark(event: Event, box: Box): boolean {
  if (!(event instanceof MouseEvent)) return false;
  const target = (event.currentTarget as SVGElement).getBoundingClientRect();
  const scale = target.width / box.width || 1;
  return event.clientX - target.left < 44 * scale && event.clientY - target.top < 34 * scale;
}

export const modules: ViewKind = {
  id: "modules",
  title: "Modules",
  group: "Program",
  has: (context) => context.subject().sites.length > 0,
  make: (context, host) => new ModuleGraph(context, host),
};
