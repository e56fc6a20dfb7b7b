/** The table of sites. Only the rows in sight are elements, so ten thousand scroll like ten. */
import { LINES } from "../draw/colour";
import { fileName, formatBytes, formatNumber, formatType, shorten } from "../draw/format";
import { fitScale } from "../draw/scale";
import { drawSparkline } from "../draw/sparkline";
import type { LoadedStatistic, Site } from "../model/subject";
import { MISSING, type Of } from "../payload/types";
import { emptyState } from "../ui/controls";
import { clear, el, fitCanvas } from "../ui/dom";
import { Toolbar } from "../ui/toolbar";
import type { PageContext, ViewInstance, ViewKind } from "./view";

const ROW = 30;
const BEYOND = 8;

interface Column {
  id: string;
  title: string;
  width: string;
  isNumber?: boolean;
  /** The key by which the table is sorted. */
  key(site: Site): string | number;
  cell(site: Site): Node | string;
}

class SitesTable implements ViewInstance {
  private readonly toolbar = new Toolbar();
  private readonly head = el("div", { class: "table-head", role: "row" });
  private readonly body = el("div", { class: "table-body", role: "rowgroup" });
  private readonly scroller = el(
    "div",
    { class: "table-scroller", tabindex: 0, role: "table", "aria-label": "Sites" },
    this.head,
    this.body,
  );
  private columns: Column[] = [];
  private sorted: Site[] = [];
  private range: [number, number] = [0, 0];
  private lastSite = "";
  private readonly rows = new Map<number, HTMLElement>();

  constructor(
    private readonly context: PageContext,
    host: HTMLElement,
  ) {
    host.append(this.toolbar.element, this.scroller);
    this.scroller.addEventListener("scroll", () => this.fill(false));
    this.scroller.addEventListener("keydown", (event) => this.key(event));
  }

  update(): void {
    const { context } = this;
    const { sort = "", descending = "" } = context.store.state.more;
    this.toolbar.clear();
    this.toolbar.append(...context.statisticControls());
    this.columns = this.makeColumns();
    this.sorted = [...context.filtered()];
    const column = this.columns.find((each) => each.id === sort);
    if (column) {
      const sign = descending ? -1 : 1;
      this.sorted.sort((a, b) => sign * compare(column.key(a), column.key(b)) || a.index - b.index);
    }
    this.drawHead(sort, Boolean(descending));
    this.body.style.height = `${this.sorted.length * ROW}px`;
    const { site } = context.store.state;
    if (site !== this.lastSite) this.reveal(site);
    this.lastSite = site;
    this.fill(true);
  }

  inspect(): unknown {
    return {
      sites: this.sorted.map((site) => site.name),
      range: this.range,
      columns: this.columns.map((column) => column.id),
    };
  }

  private makeColumns(): Column[] {
    const { context } = this;
    const subject = context.subject();
    const { sites } = subject;
    const made: Column[] = [
      {
        id: "site",
        title: "Site",
        width: "minmax(240px, 2.2fr)",
        key: (site) => site.name,
        cell: (site) => el("span", { class: "mono site-name", title: site.name }, shorten(site.name, 70)),
      },
    ];
    if (sites.some((site) => site.module)) {
      made.push({
        id: "class",
        title: "Class",
        width: "minmax(80px, 0.8fr)",
        key: (site) => site.module,
        cell: (site) => site.module,
      });
    }
    if (sites.some((site) => site.shape)) {
      made.push(
        {
          id: "type",
          title: "Type",
          width: "minmax(130px, 1fr)",
          key: (site) => formatType(site.dtype, site.shape),
          cell: (site) => el("span", { class: "mono muted" }, formatType(site.dtype, site.shape)),
        },
        {
          id: "bytes",
          title: "Size",
          width: "84px",
          isNumber: true,
          key: (site) => site.nbytes,
          cell: (site) => formatBytes(site.nbytes),
        },
      );
    }
    const chosen = context.statistic();
    if (chosen) {
      const pairs: [Of, string][] =
        chosen.of === "value" || chosen.of === "grad"
          ? [
              ["value", "Value"],
              ["grad", "Gradient"],
            ]
          : [[chosen.of, chosen.label]];
      for (const [of, title] of pairs) {
        const statistic = subject.statistics.find((each) => each.of === of && each.stat === chosen.stat);
        if (statistic) made.push(this.numberColumn(statistic, title));
        if (statistic && subject.steps.length > 1) made.push(this.seriesColumn(statistic, of === "grad" ? 1 : 0));
      }
    }
    if (sites.some((site) => site.source)) {
      made.push({
        id: "source",
        title: "Source",
        width: "minmax(110px, 0.8fr)",
        key: (site) => (site.source ? site.source[0] * 1e6 + site.source[1] : -1),
        cell: (site) => this.sourceLink(site),
      });
    }
    return made;
  }

  private sourceLink(site: Site): Node | string {
    if (!site.source) return "";
    const [file, line] = site.source;
    const path = this.context.model.header.sources[file]?.path ?? "";
    const open = (event: Event) => {
      event.stopPropagation();
      this.context.store.set({ view: "source", site: site.name });
    };
    return el(
      "button",
      { type: "button", class: "link mono", title: `${path}:${line}`, onclick: open },
      `${fileName(path)}:${line}`,
    );
  }

  private latest(statistic: LoadedStatistic, site: Site): number {
    const row = statistic.matrix.row(site.index);
    if (row < 0) return MISSING;
    const numbers = statistic.matrix.coarseRow(row);
    for (let i = numbers.length - 1; i >= 0; i--) if (numbers[i] !== MISSING) return numbers[i]!;
    return MISSING;
  }

  private numberColumn(statistic: LoadedStatistic, title: string): Column {
    return {
      id: statistic.key,
      title:
        `${title} ${statistic.of ? statistic.stat.replace(/_/g, " ") : ""}${statistic.unit ? `, ${statistic.unit}` : ""}`.trim(),
      width: "minmax(92px, 0.6fr)",
      isNumber: true,
      key: (site) => this.latest(statistic, site),
      cell: (site) => {
        const number = this.latest(statistic, site);
        return number === MISSING
          ? ""
          : el("span", { class: Number.isFinite(number) ? "" : "bad" }, formatNumber(number));
      },
    };
  }

  private seriesColumn(statistic: LoadedStatistic, line: number): Column {
    const kind = this.context.scaleKind(statistic);
    return {
      id: `${statistic.key}.series`,
      title: "over steps",
      width: "132px",
      key: (site) => this.latest(statistic, site),
      cell: (site) => {
        const row = statistic.matrix.row(site.index);
        if (row < 0) return "";
        const canvas = el("canvas", { "aria-hidden": "true" });
        const graphics = fitCanvas(canvas, 116, 20);
        const numbers = statistic.matrix.coarseRow(row);
        const theme = this.context.theme();
        drawSparkline(
          graphics,
          numbers,
          fitScale(kind, numbers, 0),
          LINES[theme.name][line]!,
          theme.bad,
          1,
          2,
          114,
          16,
        );
        return canvas;
      },
    };
  }

  private drawHead(sort: string, descending: boolean): void {
    const template = this.columns.map((column) => column.width).join(" ");
    this.scroller.style.setProperty("--columns", template);
    this.head.replaceChildren(
      ...this.columns.map((column) => {
        const isSorted = column.id === sort;
        const onclick = () => {
          const next = !isSorted
            ? { sort: column.id, descending: column.isNumber ? "1" : "" }
            : descending === Boolean(column.isNumber)
              ? { sort: column.id, descending: column.isNumber ? "" : "1" }
              : { sort: "", descending: "" };
          this.context.store.set({ more: next });
        };
        return el(
          "div",
          {
            role: "columnheader",
            class: column.isNumber ? "number" : "",
            "aria-sort": isSorted ? (descending ? "descending" : "ascending") : "none",
          },
          el(
            "button",
            { type: "button", onclick },
            column.title,
            isSorted ? el("span", { class: "sort-mark" }, descending ? " ↓" : " ↑") : null,
          ),
        );
      }),
    );
  }

  private fill(always: boolean): void {
    const top = Math.max(0, Math.floor(this.scroller.scrollTop / ROW) - BEYOND);
    const end = Math.min(
      this.sorted.length,
      Math.ceil((this.scroller.scrollTop + this.scroller.clientHeight) / ROW) + BEYOND,
    );
    if (!always && top === this.range[0] && end === this.range[1]) return;
    this.range = [top, end];
    if (always) {
      this.rows.clear();
      clear(this.body);
    }
    if (!this.sorted.length) {
      this.body.replaceChildren(
        emptyState(
          "No site matches",
          "A glob picks whole names: ** spans any number of segments, * stays inside one.",
          "**/mlp",
        ),
      );
      return;
    }
    for (const [i, row] of this.rows) {
      if (i >= top && i < end) continue;
      row.remove();
      this.rows.delete(i);
    }
    for (let i = top; i < end; i++) {
      if (this.rows.has(i)) continue;
      const row = this.makeRow(this.sorted[i]!, i);
      this.rows.set(i, row);
      this.body.append(row);
    }
  }

  private makeRow(site: Site, i: number): HTMLElement {
    const isSelected = site.name === this.context.store.state.site;
    const row = el(
      "div",
      {
        class: isSelected ? "row selected" : "row",
        role: "row",
        "aria-selected": String(isSelected),
        "aria-rowindex": i + 1,
        onclick: () => this.context.selectSite(site.name),
      },
      ...this.columns.map((column) =>
        el("div", { role: "cell", class: column.isNumber ? "number" : "" }, column.cell(site)),
      ),
    );
    row.style.top = `${i * ROW}px`;
    return row;
  }

  private reveal(name: string): void {
    const at = this.sorted.findIndex((site) => site.name === name);
    if (at < 0) return;
    const { scrollTop, clientHeight } = this.scroller;
    const head = this.head.offsetHeight;
    if (at * ROW < scrollTop) this.scroller.scrollTop = at * ROW;
    else if ((at + 1) * ROW + head > scrollTop + clientHeight)
      this.scroller.scrollTop = (at + 1) * ROW + head - clientHeight;
  }

  private key(event: KeyboardEvent): void {
    const moves: Record<string, number> = {
      ArrowDown: 1,
      ArrowUp: -1,
      PageDown: 15,
      PageUp: -15,
      Home: -Infinity,
      End: Infinity,
    };
    const by = moves[event.key];
    if (by === undefined || !this.sorted.length) return;
    event.preventDefault();
    event.stopPropagation();
    const at = this.sorted.findIndex((site) => site.name === this.context.store.state.site);
    const next = Math.max(0, Math.min(this.sorted.length - 1, at + by));
    this.context.selectSite(this.sorted[next]!.name);
  }
}

function compare(a: string | number, b: string | number): number {
  if (typeof a === "string" && typeof b === "string") return a < b ? -1 : a > b ? 1 : 0;
  const [x, y] = [Number(a), Number(b)];
  // What is not finite counts as larger than any number: it is what people look for.
  const rank = (n: number) => (Number.isFinite(n) ? n : Infinity);
  return rank(x) < rank(y) ? -1 : rank(x) > rank(y) ? 1 : 0;
}

export const sites: ViewKind = {
  id: "sites",
  title: "Sites",
  group: "Numbers",
  has: (context) => context.subject().sites.length > 0,
  make: (context, host) => new SitesTable(context, host),
};
