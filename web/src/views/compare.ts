/** Two runs, two steps, or a `Difference`: the first site that differs, and all of them side by side. */
import { colourAt, css, paletteOf } from "../draw/colour";
import { formatCount, formatNumber, shorten } from "../draw/format";
import { makeScale } from "../draw/scale";
import {
  columnBefore,
  compareSites,
  type ComparedSite,
  describeComparison,
  lastCommonStep,
  numberAt,
} from "../model/comparison";
import type { SubjectModel } from "../model/subject";
import type { DifferenceEntry, SiteDifference } from "../payload/types";
import { emptyState, segmented, select } from "../ui/controls";
import { clear, el } from "../ui/dom";
import { Toolbar } from "../ui/toolbar";
import type { PageContext, ViewInstance, ViewKind } from "./view";

const SHOWN = 600;
const TOLERANCES = [
  { value: "0", label: "exact" },
  { value: "0.001", label: "0.1 %" },
  { value: "0.01", label: "1 %" },
  { value: "0.1", label: "10 %" },
];

/** The name of a run with the step of a column; a capture has no steps. */
function titleAt(subject: SubjectModel, column: number): string {
  const { steps, data } = subject;
  return steps.length ? `${data.name}, step ${formatCount(steps[column]!)}` : data.name;
}

function countSites(count: number): string {
  return `${formatCount(count)} ${count === 1 ? "site" : "sites"}`;
}

class Compare implements ViewInstance {
  private readonly toolbar = new Toolbar();
  private readonly summary = el("div", { class: "summary" });
  private readonly body = el("div", { class: "compare scrolls" });
  private shown: unknown = null;

  constructor(
    private readonly context: PageContext,
    host: HTMLElement,
  ) {
    host.append(this.toolbar.element, this.summary, this.body);
  }

  inspect(): unknown {
    return this.shown;
  }

  update(): void {
    const subject = this.context.subject();
    this.toolbar.clear();
    clear(this.summary);
    if (subject.data.difference) this.showDifference(subject.data.difference);
    else if (this.context.model.subjects.length > 1) this.showRuns();
    else if (subject.steps.length > 1) this.showSteps();
    else
      this.body.replaceChildren(
        emptyState(
          "Nothing to compare with",
          "View two captures or two runs together, or a difference:",
          "tapax.view(before, after)\ntapax.view(tapax.diff(before, after))",
        ),
      );
  }

  private showRuns(): void {
    const { context } = this;
    const { store, model } = context;
    const a = context.subject();
    const b = model.subjects[store.state.other] ?? model.subjects.find((each) => each !== a)!;
    const statistic = context.statistic();
    const options = model.subjects
      .filter((each) => each !== a)
      .map((each) => ({ value: String(each.index), label: each.data.name }));
    this.toolbar.append(
      select("With", options, String(b.index), (value) => store.set({ other: Number(value) })),
      ...context.statisticControls().slice(0, 1),
      this.toleranceControl(),
    );
    if (!statistic)
      return void this.body.replaceChildren(emptyState("No numbers", "The first of them has no statistics."));
    const twin = b.statistic(statistic.key);
    const step = store.state.step ?? lastCommonStep(a.steps, b.steps);
    const [columnA, columnB] = [columnBefore(a.steps, step), columnBefore(b.steps, step)];
    const compared = compareSites(
      context.filtered(),
      (site) => numberAt(a, statistic, site, columnA),
      (site) => numberAt(b, twin, b.site(site.name), columnB),
      this.tolerance(),
    );
    const onlyA = context.filtered().filter((site) => !b.site(site.name)).length;
    const skipped = context.filtered().length - onlyA - compared.length;
    const onlyB = b.sites.filter((site) => !a.site(site.name)).length;
    this.showTable(
      compared,
      titleAt(a, columnA),
      titleAt(b, columnB),
      [
        skipped ? `${countSites(skipped)} without this number in both` : "",
        onlyA ? `${countSites(onlyA)} only in ${a.data.name}` : "",
        onlyB ? `${formatCount(onlyB)} only in ${b.data.name}` : "",
      ]
        .filter(Boolean)
        .join(", "),
    );
  }

  private showSteps(): void {
    const { context } = this;
    const { store } = context;
    const subject = context.subject();
    const statistic = context.statistic();
    const { steps } = subject;
    const at = (text: string | undefined, fallback: number) => {
      const found = steps.indexOf(Number(text));
      return text && found >= 0 ? found : fallback;
    };
    const from = at(store.state.more.from, 0);
    const to = at(store.state.more.to, steps.length - 1);
    const input = (label: string, name: string, column: number) => {
      const field = el("input", {
        type: "number",
        list: "",
        min: steps[0],
        max: steps[steps.length - 1],
        value: steps[column],
        "aria-label": label,
      });
      field.addEventListener("change", () => {
        const wanted = Number(field.value);
        const nearest = steps.reduce(
          (best, each) => (Math.abs(each - wanted) < Math.abs(best - wanted) ? each : best),
          steps[0]!,
        );
        store.set({ more: { [name]: String(nearest) } });
      });
      return el("label", { class: "control" }, el("span", { class: "control-label" }, label), field);
    };
    this.toolbar.append(
      input("Step", "from", from),
      input("and step", "to", to),
      ...context.statisticControls().slice(0, 1),
      this.toleranceControl(),
    );
    if (!statistic) return void this.body.replaceChildren(emptyState("No numbers", "The log has no statistics yet."));
    const compared = compareSites(
      context.filtered(),
      (site) => numberAt(subject, statistic, site, from),
      (site) => numberAt(subject, statistic, site, to),
      this.tolerance(),
    );
    const skipped = context.filtered().length - compared.length;
    const remark = skipped ? `${countSites(skipped)} without this number at both` : "";
    this.showTable(compared, `step ${formatCount(steps[from]!)}`, `step ${formatCount(steps[to]!)}`, remark);
  }

  private tolerance(): number {
    return Number(this.context.store.state.more.tolerance || "0.01");
  }

  private toleranceControl(): HTMLElement {
    return segmented("Tolerance", TOLERANCES, this.context.store.state.more.tolerance || "0.01", (value) =>
      this.context.store.set({ more: { tolerance: value } }),
    );
  }

  private showTable(compared: ComparedSite[], a: string, b: string, remark: string): void {
    const { context } = this;
    const { order = "program" } = context.store.state.more;
    const first = compared.find((each) => each.differs);
    this.toolbar.append(
      segmented(
        "Order",
        [
          { value: "program", label: "Program" },
          { value: "change", label: "Change" },
        ],
        order,
        (value) => context.store.set({ more: { order: value } }),
      ),
    );
    this.summary.replaceChildren(
      el(
        "strong",
        {},
        describeComparison(compared),
      ),
      first
        ? el(
            "span",
            {},
            " first: ",
            el(
              "button",
              { type: "button", class: "link mono", onclick: () => context.selectSite(first.site.name) },
              first.site.name,
            ),
          )
        : "",
      remark ? el("span", { class: "muted" }, ` ${remark}`) : "",
    );
    const size = (each: ComparedSite) =>
      Number.isFinite(each.change)
        ? Math.abs(each.change)
        : Number.isNaN(each.change)
          ? each.differs
            ? Infinity
            : 0
          : Infinity;
    const sorted = order === "change" ? [...compared].sort((x, y) => size(y) - size(x)) : compared;
    const most = Math.max(1, ...compared.map((each) => (Number.isFinite(each.change) ? Math.abs(each.change) : 0)));
    const scale = makeScale("diverging", -most, most);
    this.shown = {
      a,
      b,
      first: first?.site.name ?? null,
      rows: compared.map((each) => ({ site: each.site.name, a: each.a, b: each.b, differs: each.differs })),
    };
    const palette = paletteOf(context.theme().name, true);
    const selected = context.store.state.site;
    const rows = sorted.slice(0, SHOWN).map((each) => {
      const bar = el("span", { class: "change-bar" });
      const t = scale.place(Number.isFinite(each.change) ? each.change : 0);
      bar.style.left = `${Math.min(0.5, t) * 100}%`;
      bar.style.width = `${Math.abs(t - 0.5) * 100}%`;
      bar.style.background = css(colourAt(palette, t < 0.5 ? 0.18 : 0.82));
      return el(
        "tr",
        {
          class: `${each.site.name === selected ? "selected " : ""}${each === first ? "first" : ""}`,
          onclick: () => context.selectSite(each.site.name),
        },
        el("td", { class: "mono site-name", title: each.site.name }, shorten(each.site.name, 64)),
        el("td", { class: "number" }, formatNumber(each.a)),
        el("td", { class: "number" }, formatNumber(each.b)),
        el("td", { class: "number" }, Number.isFinite(each.change) ? `× ${formatNumber(2 ** each.change)}` : ""),
        el("td", { class: "change" }, el("span", { class: "change-track" }, bar)),
      );
    });
    this.body.replaceChildren(
      el(
        "table",
        { class: "plain" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", {}, "Site"),
            el("th", { class: "number" }, a),
            el("th", { class: "number" }, b),
            el("th", { class: "number" }, "Ratio"),
            el("th", {}, "Smaller or larger"),
          ),
        ),
        el("tbody", {}, ...rows),
      ),
      sorted.length > SHOWN
        ? el(
            "p",
            { class: "hint padded" },
            `and ${formatCount(sorted.length - SHOWN)} more; filter by site, or order by change.`,
          )
        : "",
    );
  }

  private showDifference(difference: DifferenceEntry): void {
    const { context } = this;
    const { sites } = context.subject();
    // The name of a site in a loop has its iteration already.
    const name = (entry: SiteDifference) => sites[entry.site]!.name;
    const link = (label: string, at: number | null) => {
      if (at === null) return el("div", {}, `${label}: none differs`);
      const entry = difference.entries[at]!;
      return el(
        "div",
        {},
        `${label}: `,
        el(
          "button",
          { type: "button", class: "link mono", onclick: () => context.selectSite(sites[entry.site]!.name) },
          name(entry),
        ),
        el("div", { class: "muted" }, entry.sentence),
      );
    };
    this.summary.replaceChildren(
      link("First value that differs, forward", difference.first),
      link("First gradient that differs, backward", difference.firstGrad),
      el(
        "div",
        { class: "muted" },
        `Tolerance: ${difference.tolerance}.${difference.onlyA.length ? ` Only ${difference.a} has ${difference.onlyA.length} sites.` : ""}${difference.onlyB.length ? ` Only ${difference.b} has ${difference.onlyB.length} sites.` : ""}`,
      ),
    );
    const picked = new Set(context.filtered().map((site) => site.index));
    const entries = difference.entries.filter((entry) => picked.has(entry.site));
    this.shown = { first: difference.first, entries };
    const selected = context.store.state.site;
    const rows = entries.slice(0, SHOWN).map((entry) =>
      el(
        "tr",
        {
          class: `${sites[entry.site]!.name === selected ? "selected " : ""}${difference.entries[difference.first ?? -1] === entry ? "first" : ""}`,
          onclick: () => context.selectSite(sites[entry.site]!.name),
        },
        el("td", { class: "mono site-name" }, shorten(name(entry), 60)),
        el("td", {}, entry.of === "grad" ? "gradient" : "value"),
        el("td", { class: "number" }, entry.reason ? "" : formatNumber(Number(entry.absolute))),
        el("td", { class: "number" }, entry.reason ? "" : formatNumber(Number(entry.relative))),
        el("td", { class: "number" }, entry.reason ? "" : formatNumber(Number(entry.ulps))),
        el("td", { class: entry.differs ? "bad" : "muted" }, entry.reason || (entry.differs ? "differs" : "equal")),
      ),
    );
    this.body.replaceChildren(
      el(
        "table",
        { class: "plain" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            ...["Site", "Of", "Error", "Relative", "Units in the last place", ""].map((title, i) =>
              el("th", { class: i > 1 && i < 5 ? "number" : "" }, title),
            ),
          ),
        ),
        el("tbody", {}, ...rows),
      ),
      entries.length > SHOWN
        ? el("p", { class: "hint padded" }, `and ${formatCount(entries.length - SHOWN)} more; filter by site.`)
        : "",
    );
  }
}

export const compare: ViewKind = {
  id: "compare",
  title: "Compare",
  group: "More",
  has: (context) =>
    Boolean(context.subject().data.difference) ||
    context.model.subjects.length > 1 ||
    context.subject().steps.length > 1,
  make: (context, host) => new Compare(context, host),
};
