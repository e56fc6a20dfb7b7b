/** Alerts and non-finite values on a timeline; a mark leads to its site, iteration, example, device and source line. */
import { fileName, formatCount, formatNumber, formatType } from "../draw/format";
import { niceTicks } from "../draw/scale";
import type { PageEvent } from "../payload/types";
import { emptyState } from "../ui/controls";
import { clear, el, fitCanvas } from "../ui/dom";
import type { PageContext, ViewInstance, ViewKind } from "./view";

const LEFT = 16;
const HEIGHT = 96;
const ROW = 200;

class Events implements ViewInstance {
  private readonly canvas = el("canvas", { class: "plot", role: "img", "aria-label": "Timeline of alerts" });
  private readonly frame = el("div", { class: "timeline" }, this.canvas);
  private readonly list = el("div", { class: "events", role: "list" });
  private marks: { x: number; event: PageEvent; number: number }[] = [];

  constructor(
    private readonly context: PageContext,
    private readonly host: HTMLElement,
  ) {
    this.canvas.addEventListener("click", (event) => {
      const mark = this.nearest(event);
      if (mark) this.choose(mark.number, mark.event);
    });
    this.canvas.addEventListener("mousemove", (event) => {
      const mark = this.nearest(event);
      if (mark) context.tooltip.show(event, [[mark.event.message], [mark.event.siteName, "mono muted"]]);
      else context.tooltip.hide();
    });
    this.canvas.addEventListener("mouseleave", () => context.tooltip.hide());
  }

  inspect(): unknown {
    return this.marks.map(({ x, event }) => ({
      x,
      step: event.step,
      site: event.siteName,
      message: event.message,
    }));
  }

  update(): void {
    const subject = this.context.subject();
    const { events } = subject.data;
    if (!events.length) {
      this.host.replaceChildren(
        emptyState(
          "No alerts",
          subject.isRun
            ? "No alert went off in this run."
            : "A capture has no alerts. A monitor with rules has them:",
          subject.isRun ? "" : "tapax.monitor(step, alerts=[tapax.alert.nonfinite()])",
        ),
      );
      return;
    }
    const shown = this.context.isFiltered()
      ? events.filter((event) => this.context.filtered().some((site) => site.index === event.site))
      : events;
    const timed = events.some((event) => event.step !== null);
    this.host.replaceChildren(...(timed ? [this.frame] : []), this.list);
    if (timed) this.drawTimeline(shown, subject.steps);
    const chosen = Number(this.context.store.state.more.event ?? -1);
    clear(this.list);
    if (!shown.length)
      this.list.append(el("p", { class: "hint padded" }, "No alert is of a site that the filter picks."));
    shown.slice(0, ROW).forEach((event) => this.list.append(this.entry(event, events.indexOf(event), chosen)));
    if (shown.length > ROW)
      this.list.append(
        el("p", { class: "hint padded" }, `and ${formatCount(shown.length - ROW)} more. Filter by site to see them.`),
      );
  }

  private drawTimeline(events: PageEvent[], steps: number[]): void {
    const theme = this.context.theme();
    const width = this.frame.clientWidth;
    if (!width) return;
    const graphics = fitCanvas(this.canvas, width, HEIGHT);
    const timed = events.filter((event) => event.step !== null);
    const first = Math.min(steps[0] ?? 0, ...timed.map((event) => event.step!));
    const last = Math.max(steps[steps.length - 1] ?? 1, ...timed.map((event) => event.step!));
    const place = (step: number) => LEFT + ((step - first) / Math.max(1, last - first)) * (width - 2 * LEFT);
    const base = HEIGHT - 26;
    graphics.fillStyle = theme.line;
    graphics.fillRect(LEFT, base, width - 2 * LEFT, 1);
    graphics.font = "11px system-ui, sans-serif";
    graphics.fillStyle = theme.muted;
    graphics.textAlign = "center";
    for (const tick of niceTicks(first, last, Math.max(2, width / 120))) {
      graphics.fillRect(place(tick), base, 1, 4);
      graphics.fillText(formatCount(tick), place(tick), base + 18);
    }
    graphics.textAlign = "left";
    graphics.fillText("step", LEFT, 12);
    const height = new Map<number, number>();
    const selected = this.context.store.state.site;
    this.marks = timed.map((event) => {
      const x = place(event.step!);
      const column = Math.round(x / 9);
      const level = height.get(column) ?? 0;
      height.set(column, level + 1);
      const y = base - 8 - Math.min(level, 5) * 9;
      graphics.beginPath();
      graphics.arc(column * 9, y, 3.6, 0, 7);
      graphics.fillStyle =
        event.kind === "finding" || !Number.isFinite(Number(event.number ?? 0)) ? theme.bad : theme.warning;
      graphics.globalAlpha = selected && event.siteName !== selected ? 0.45 : 1;
      graphics.fill();
      graphics.globalAlpha = 1;
      return { x: column * 9, event, number: this.context.subject().data.events.indexOf(event) };
    });
  }

  private nearest(event: MouseEvent): { event: PageEvent; number: number } | undefined {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    const near = this.marks.filter((mark) => Math.abs(mark.x - x) < 10);
    return near.sort((a, b) => Math.abs(a.x - x) - Math.abs(b.x - x))[0];
  }

  private choose(number: number, event: PageEvent): void {
    this.context.store.set({ site: event.siteName, step: event.step, more: { event: String(number) } });
  }

  private entry(event: PageEvent, number: number, chosen: number): HTMLElement {
    const isChosen = number === chosen;
    const facts: [string, string][] = [];
    if (event.step !== null) facts.push(["step", formatCount(event.step)]);
    if (event.stat) facts.push([event.stat.replace(/_/g, " "), formatNumber(Number(event.number ?? NaN))]);
    if (event.operation) facts.push(["operation", event.operation]);
    if (event.phase) facts.push(["pass", event.phase]);
    for (const [loop, iteration] of event.iterations ?? []) facts.push([`iteration of ${loop}`, String(iteration)]);
    for (const [example, size] of event.examples ?? []) facts.push(["example", `${example} of ${size}`]);
    for (const [axis, index] of event.device ?? []) facts.push([`device along ${axis}`, String(index)]);
    if (event.index) facts.push(["first bad element", `[${event.index.join(", ")}]`]);
    if (event.shape) facts.push(["type", formatType(event.dtype ?? "", event.shape)]);
    if (event.count !== undefined) facts.push(["bad elements", formatCount(event.count)]);
    const source = event.source ?? this.context.subject().site(event.siteName)?.source ?? null;
    const path = source ? (this.context.model.header.sources[source[0]]?.path ?? "") : "";
    return el(
      "article",
      { class: `event ${event.kind}${isChosen ? " selected" : ""}`, role: "listitem" },
      el(
        "button",
        { type: "button", class: "event-title", onclick: () => this.choose(number, event) },
        el("span", {
          class: `event-mark ${event.kind === "finding" || !Number.isFinite(Number(event.number ?? 0)) ? "bad" : "warning"}`,
        }),
        event.message,
      ),
      el(
        "dl",
        { class: "facts" },
        ...facts.flatMap(([term, text]) => [el("dt", {}, term), el("dd", { class: "mono" }, text)]),
      ),
      el(
        "div",
        { class: "event-links" },
        event.siteName
          ? el(
              "button",
              { type: "button", class: "link mono", onclick: () => this.choose(number, event) },
              event.siteName,
            )
          : null,
        source
          ? el(
              "button",
              {
                type: "button",
                class: "link mono",
                title: `${path}:${source[1]}`,
                onclick: () =>
                  this.context.store.set({
                    view: "source",
                    site: event.siteName,
                    more: { file: String(source[0]), line: String(source[1]) },
                  }),
              },
              `${fileName(path)}:${source[1]}`,
            )
          : null,
      ),
      event.operands?.length
        ? el(
            "table",
            { class: "operands" },
            ...event.operands.map((operand) =>
              el(
                "tr",
                {},
                el("th", {}, operand.label),
                el("td", { class: "mono" }, operand.type),
                el("td", {}, operand.text),
              ),
            ),
          )
        : null,
    );
  }
}

export const events: ViewKind = {
  id: "alerts",
  title: "Alerts",
  group: "Numbers",
  has: (context) => context.subject().data.events.length > 0,
  make: (context, host) => new Events(context, host),
};
