/** The selected site, beside every view: facts, numbers, and its series over steps. */
import uPlot from "uplot";
import { LINES } from "../draw/colour";
import { fileName, formatBytes, formatCount, formatNumber, formatType, formatWithUnit } from "../draw/format";
import { makeScale, tickLabel, ticks } from "../draw/scale";
import { numberAt } from "../model/comparison";
import type { LoadedStatistic, Site, SubjectModel } from "../model/subject";
import { MISSING } from "../payload/types";
import { clear, el } from "../ui/dom";
import { lowerBound } from "../model/windows";
import type { PageContext } from "./view";

interface Line {
  label: string;
  steps: number[];
  numbers: Float32Array;
}

export class Detail {
  readonly element = el("aside", { class: "detail", "aria-label": "Selected site" });
  private plots: uPlot[] = [];
  private turn = 0;
  private drawnKey = "";
  private lines: Line[] = [];

  constructor(private readonly context: PageContext) {}

  inspect(): unknown {
    return this.lines.map((line) => ({ label: line.label, steps: line.steps, numbers: Array.from(line.numbers) }));
  }

  update(): void {
    const { state } = this.context.store;
    const subject = this.context.subject();
    const { revision } = subject.data;
    const chosen = [subject.index, revision, subject.steps.length, state.site, state.step, state.stat, state.scale];
    const key = JSON.stringify([...chosen, this.context.theme().name, this.element.clientWidth]);
    if (key === this.drawnKey) return;
    this.drawnKey = key;
    this.draw().catch((error: unknown) => this.context.report(error));
  }

  private async draw(): Promise<void> {
    const turn = ++this.turn;
    const { context } = this;
    const subject = context.subject();
    const { site: name, step } = context.store.state;
    const site = subject.site(name);
    this.element.classList.toggle("is-empty", !name);
    this.plots.forEach((plot) => plot.destroy());
    this.plots = [];
    this.lines = [];
    clear(this.element);
    if (!site) {
      this.element.append(
        el(
          "p",
          { class: "hint padded" },
          name ? `This run has no site ${name}.` : "Select a site in any view to see it here.",
        ),
      );
      if (!name) return;
    }
    const close = el(
      "button",
      {
        type: "button",
        class: "close",
        "aria-label": "Deselect the site",
        title: "Deselect (Esc)",
        onclick: () => context.store.set({ site: "", step: null }),
      },
      "×",
    );
    this.element.append(el("header", {}, el("h2", { class: "mono" }, ...breakable(name)), close));
    if (!site) return;
    this.element.append(this.facts(site));
    const column = subject.steps.length
      ? step === null
        ? subject.steps.length - 1
        : Math.min(subject.steps.length - 1, lowerBound(subject.steps, step))
      : 0;
    this.element.append(this.numbers(subject, site, column));
    if (subject.steps.length > 1) {
      const host = el("div", { class: "series" });
      this.element.append(host);
      await this.drawSeries(host, subject, site, turn);
    }
  }

  private facts(site: Site): HTMLElement {
    const { context } = this;
    const facts: [string, Node | string][] = [];
    if (site.module) facts.push(["class", site.module]);
    if (site.kind) facts.push(["kind", site.op ? `${site.kind} ${site.op}` : site.kind]);
    if (site.shape)
      facts.push(
        ["type", el("span", { class: "mono" }, formatType(site.dtype, site.shape))],
        ["size", formatBytes(site.nbytes)],
      );
    if (site.loops.length) facts.push(["loops", el("span", { class: "mono" }, site.loops.join(" "))]);
    if (site.depth.length) facts.push(["layer", `${site.depth.join(", ")} of ${site.stack}`]);
    if (site.source) {
      const [file, line] = site.source;
      const path = context.model.header.sources[file]?.path ?? "";
      facts.push([
        "source",
        el(
          "button",
          {
            type: "button",
            class: "link mono",
            title: `${path}:${line}`,
            onclick: () => context.store.set({ view: "source" }),
          },
          `${fileName(path)}:${line}`,
        ),
      ]);
    }
    return el("dl", { class: "facts" }, ...facts.flatMap(([term, text]) => [el("dt", {}, term), el("dd", {}, text)]));
  }

  private numbers(subject: SubjectModel, site: Site, column: number): HTMLElement {
    const found = subject.statistics
      .map((statistic) => ({ statistic, number: numberAt(subject, statistic, site, column) }))
      .filter(({ number }) => number !== MISSING);
    if (!found.length) return el("p", { class: "hint padded" }, "It has no numbers at this step.");
    const chosen = this.context.statistic()?.key;
    const rows = found.map(({ statistic, number }) =>
      el(
        "tr",
        {
          class: statistic.key === chosen ? "selected" : "",
          onclick: () => this.context.store.set({ stat: statistic.key, scale: "" }),
        },
        el("th", {}, statistic.label),
        el("td", { class: Number.isFinite(number) ? "number" : "number bad" }, formatWithUnit(number, statistic.unit)),
      ),
    );
    const caption = subject.steps.length ? `At step ${formatCount(subject.steps[column]!)}` : "In this capture";
    return el("table", { class: "numbers" }, el("caption", {}, caption), el("tbody", {}, ...rows));
  }

  private async drawSeries(host: HTMLElement, subject: SubjectModel, site: Site, turn: number): Promise<void> {
    const { context } = this;
    const statistic = context.statistic();
    if (!statistic) return;
    const shown = [statistic];
    if (statistic.of === "value" || statistic.of === "grad") {
      const twin = subject.statistics.find(
        (each) => each.stat === statistic.stat && each.of === (statistic.of === "value" ? "grad" : "value"),
      );
      if (twin && twin.matrix.row(site.index) >= 0) shown.push(twin);
    }
    for (const each of shown) {
      const lines = await this.readLines(subject, each, site);
      if (turn !== this.turn) return;
      if (!lines.length) continue;
      this.lines.push(...lines);
      this.drawPlot(host, each, lines);
    }
  }

  /** The series of a site in this run, and in the runs beside it. */
  private async readLines(subject: SubjectModel, statistic: LoadedStatistic, site: Site): Promise<Line[]> {
    const lines: Line[] = [];
    const others = this.context.model.subjects.filter((each) => each !== subject && each.isRun);
    for (const each of [subject, ...others]) {
      const one = each.statistic(statistic.key);
      const row = one?.matrix.row(each.site(site.name)?.index ?? -1) ?? -1;
      if (one && row >= 0)
        lines.push({
          label: others.length ? `${statistic.label}, ${each.data.name}` : statistic.label,
          steps: [...each.steps],
          numbers: await one.matrix.readRow(row),
        });
    }
    return lines;
  }

  private drawPlot(host: HTMLElement, statistic: LoadedStatistic, lines: Line[]): void {
    const { context } = this;
    const theme = context.theme();
    const isLog = context.scaleKind(statistic) === "log";
    const clean = (x: number) => (x === MISSING || !Number.isFinite(x) || (isLog && x <= 0) ? null : x);
    const data = uPlot.join(lines.map((line) => [line.steps, Array.from(line.numbers, clean)] as uPlot.AlignedData));
    const axis = {
      stroke: theme.muted,
      grid: { stroke: theme.line, width: 1 },
      ticks: { stroke: theme.line, width: 1, size: 4 },
      font: "11px system-ui, sans-serif",
      gap: 3,
    };
    const colours = LINES[theme.name];
    const first = statistic.of === "grad" && lines.length === 1 ? 1 : 0;
    const readout = el("span", { class: "readout mono muted" });
    const legendBox =
      lines.length > 1
        ? el(
            "div",
            { class: "series-legend" },
            ...lines.map((line, i) => {
              const key = el("span", { class: "series-key" });
              key.style.background = colours[i % 5]!;
              return el("span", {}, key, line.label);
            }),
          )
        : null;
    host.append(
      el(
        "h3",
        {},
        `${statistic.label}${statistic.unit ? ` (${statistic.unit})` : ""}${isLog ? ", log scale" : ""}`,
        readout,
      ),
      ...(legendBox ? [legendBox] : []),
    );
    const plot = new uPlot(
      {
        width: Math.max(200, this.element.clientWidth - 24),
        height: 148,
        legend: { show: false },
        cursor: { drag: { x: true, y: false } },
        scales: { x: { time: false }, y: isLog ? { distr: 3, range: logRange } : {} },
        axes: [
          { ...axis, size: 26, values: (_, marks) => marks.map((x) => formatCount(x)) },
          {
            ...axis,
            size: 52,
            filter: (_, marks) => marks,
            splits: (_, __, low, high) => ticks(makeScale(isLog ? "log" : "linear", low, high), 4),
            values: (_, marks) => marks.map((x) => (x === null ? "" : tickLabel(x))),
          },
        ],
        series: [
          {},
          ...lines.map((line, i) => ({
            label: line.label,
            stroke: colours[(first + i) % 5]!,
            width: 1.5,
            points: { show: lines[0]!.steps.length < 40, size: 4 },
          })),
        ],
        hooks: {
          setCursor: [
            (each) => {
              const at = each.cursor.idx;
              if (at === null || at === undefined) return;
              const shown = lines
                .map((_, i) => data[i + 1]![at])
                .map((y) => (y === null || y === undefined ? "no number" : formatNumber(y)));
              readout.textContent = `step ${formatCount(data[0]![at]! as number)}: ${shown.join(", ")}`;
            },
          ],
        },
      },
      data,
      host,
    );
    this.plots.push(plot);
    plot.over.addEventListener("click", () => {
      const at = plot.cursor.idx;
      if (at !== null && at !== undefined) context.store.set({ step: data[0]![at]! as number });
    });
  }
}

/** The data with a little room, rather than whole decades. */
function logRange(_: uPlot, low: number | null, high: number | null): [number, number] {
  if (low === null || high === null || !(low > 0)) return [0.1, 10];
  const room = Math.max(1.15, (high / low) ** 0.06);
  return [low / room, high * room];
}

/** A name that may break after a slash. */
function breakable(name: string): (Node | string)[] {
  return name.split(/(?<=\/)/).flatMap((part) => [part, el("wbr")]);
}
