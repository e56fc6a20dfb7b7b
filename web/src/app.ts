/** The page: its frame, the filter, the list of views, and the state that links them. */
import uplotCss from "uplot/dist/uPlot.min.css";
import { fitScale, type Scale, type ScaleKind } from "./draw/scale";
import { formatCount } from "./draw/format";
import { compileSelection } from "./model/glob";
import { type LoadedStatistic, type Model, type Site, SubjectModel } from "./model/subject";
import { BlobReader } from "./payload/blobs";
import type { Payload } from "./payload/hosts";
import type { SubjectKind } from "./payload/types";
import { type State, Store } from "./state";
import { emptyState, segmented, select } from "./ui/controls";
import { append, clear, el } from "./ui/dom";
import styles from "./ui/page.css";
import { applyTheme, type Theme, THEMES } from "./ui/theme";
import { Tooltip } from "./ui/tooltip";
import { Detail } from "./views/detail";
import { VIEWS } from "./views/all";
import type { PageContext, ViewInstance, ViewKind } from "./views/view";

const SCALES = [
  { value: "log", label: "Log" },
  { value: "linear", label: "Linear" },
  { value: "diverging", label: "±" },
];
const GROUPS: Record<string, string> = {
  value: "Values",
  grad: "Gradients",
  param: "Parameters",
  param_grad: "Parameter gradients",
  update: "Updates",
  "": "Numbers",
};

/** The view that a subject is shown in first, if that is not the first one that it has. */
const FIRST_VIEWS: Partial<Record<SubjectKind, string>> = {
  difference: "compare",
  finding: "alerts",
  activations: "dataset",
};

export class App implements PageContext {
  readonly tooltip = new Tooltip();
  readonly store: Store;
  model!: Model;
  private readonly root = el("div", { class: "page" });
  private readonly filterInput = el("input", {
    type: "search",
    class: "filter",
    placeholder: "Filter sites: **/attn",
    "aria-label": "Filter sites by a glob",
    spellcheck: "false",
    autocomplete: "off",
  });
  private readonly filterCount = el("span", { class: "filter-count", role: "status" });
  private readonly runs = el("div", { class: "runs" });
  private readonly liveMark = el("span", { class: "live", hidden: true });
  private readonly nav = el("nav", { "aria-label": "Views" });
  private readonly messages = el("div", { class: "messages" });
  private readonly host = el("section", { class: "view" });
  private readonly main = el("main", {}, this.messages, this.host);
  private readonly detail: Detail;
  private readonly systemDark = globalThis.matchMedia?.("(prefers-color-scheme: dark)");
  private instance: ViewInstance | null = null;
  private shownView = "";
  private selection: { key: string; sites: Site[] } | null = null;
  private readonly scales = new Map<string, Scale>();
  private errors: string[] = [];
  private readonly dismissed = new Set<string>();
  private readonly isGuest: boolean;

  constructor(element: HTMLElement, address: { hash: string } | null) {
    this.isGuest = address === null;
    this.store = new Store(address);
    this.detail = new Detail(this);
    const shadow = element.attachShadow({ mode: "open" });
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(`${uplotCss}\n${styles}`);
    shadow.adoptedStyleSheets = [sheet];
    shadow.append(this.root);
    applyTheme(this.root, this.theme());
    this.root.append(el("div", { class: "loading", role: "status" }, "Loading…"));
    this.systemDark?.addEventListener("change", () => this.update());
    new ResizeObserver(() => this.instance?.update()).observe(this.host);
  }

  async start(payload: Payload): Promise<void> {
    const reader = new BlobReader(payload.blobs);
    const { header } = payload;
    const subjects = header.subjects.map((subject, i) => new SubjectModel(i, subject, reader));
    this.model = { header, reader, subjects };
    await Promise.all(subjects.map((subject) => subject.load()));
    this.build();
    this.store.onChange((state, before) => this.changed(state, before));
    this.update();
    let applied = Promise.resolve();
    payload.follow?.(
      (update) => {
        // One after the other: each reads blobs before it appends.
        applied = applied
          .then(() => subjects[update.subject]?.apply(update))
          .then(
            () => this.refresh(),
            (error: unknown) => this.report(error),
          );
      },
      (state) => {
        this.liveMark.hidden = false;
        this.liveMark.textContent = state === "live" ? "live" : "connection lost";
        this.liveMark.classList.toggle("lost", state === "lost");
      },
    );
  }

  fail(error: unknown): void {
    this.root.replaceChildren(
      emptyState("The page cannot be shown", error instanceof Error ? error.message : String(error)),
    );
  }

  /** What is drawn, for tests. */
  inspect(): unknown {
    const { instance, detail } = this;
    return {
      state: this.store.state,
      view: this.shownView,
      errors: this.errors,
      // Copies of all numbers, made only for who asks.
      get drawn() {
        return instance?.inspect?.() ?? null;
      },
      get series() {
        return detail.inspect();
      },
    };
  }

  theme(): Theme {
    const { theme } = this.store.state;
    return THEMES[theme === "auto" ? (this.systemDark?.matches ? "dark" : "light") : theme];
  }

  subject(): SubjectModel {
    return this.model.subjects[this.store.state.run] ?? this.model.subjects[0]!;
  }

  isFiltered(): boolean {
    return this.store.state.filter.trim() !== "";
  }

  filtered(): Site[] {
    const subject = this.subject();
    const key = JSON.stringify([subject.index, this.store.state.filter, subject.sites.length]);
    if (this.selection?.key !== key)
      this.selection = {
        key,
        sites: this.isFiltered() ? subject.sites.filter(compileSelection(this.store.state.filter)) : subject.sites,
      };
    return this.selection.sites;
  }

  statistic(): LoadedStatistic | undefined {
    const subject = this.subject();
    return subject.statistic(this.store.state.stat) ?? subject.defaultStatistic();
  }

  scaleKind(statistic: LoadedStatistic): ScaleKind {
    const { scale } = this.store.state;
    return statistic.key === this.statistic()?.key && (scale === "log" || scale === "linear" || scale === "diverging")
      ? scale
      : statistic.scale;
  }

  scale(statistic: LoadedStatistic): Scale {
    const kind = this.scaleKind(statistic);
    const key = `${this.subject().index} ${statistic.key} ${kind} ${statistic.matrix.columns}`;
    let scale = this.scales.get(key);
    if (!scale) {
      scale = fitScale(
        kind,
        statistic.matrix.coarse.length
          ? statistic.matrix.coarse
          : Array.from(
              { length: statistic.matrix.rows },
              (_, row) => statistic.matrix.at(row, statistic.matrix.columns - 1) ?? NaN,
            ),
      );
      this.scales.set(key, scale);
    }
    return scale;
  }

  selectSite(name: string, step: number | null = this.store.state.step): void {
    this.store.set({ site: name, step });
  }

  statisticControls(): HTMLElement[] {
    const statistic = this.statistic();
    if (!statistic) return [];
    const options = this.subject().statistics.map((each) => ({
      value: each.key,
      label: each.label,
      group: GROUPS[each.of],
    }));
    return [
      select("Statistic", options, statistic.key, (key) => this.store.set({ stat: key, scale: "" })),
      segmented("Scale", SCALES, this.scaleKind(statistic), (scale) => this.store.set({ scale })),
    ];
  }

  report(error: unknown): void {
    this.errors.push(error instanceof Error ? error.message : String(error));
    this.showMessages();
  }

  private build(): void {
    const { header, subjects } = this.model;
    this.filterInput.value = this.store.state.filter;
    this.filterInput.addEventListener("input", () => this.store.set({ filter: this.filterInput.value }));
    const theme = el(
      "button",
      { type: "button", class: "quiet", title: "Light or dark (t)", onclick: () => this.toggleTheme() },
      "Theme",
    );
    this.root.replaceChildren(
      el(
        "header",
        { class: "top" },
        el(
          "div",
          { class: "brand" },
          el("span", { class: "wordmark" }, "tapax"),
          subjects.length > 1 ? null : el("span", { class: "title", title: header.title }, header.title),
          this.runs,
          this.liveMark,
        ),
        el("div", { class: "filter-box" }, this.filterInput, this.filterCount),
        theme,
      ),
      this.nav,
      this.main,
      this.detail.element,
      this.tooltip.element,
    );
    // In a document of its own the page has all keys; in a notebook only those pressed inside it.
    (this.isGuest ? this.root : document).addEventListener("keydown", (event) => this.key(event as KeyboardEvent));
    this.root.tabIndex = -1;
  }

  private changed(state: State, before: State): void {
    if (state.filter !== this.filterInput.value) this.filterInput.value = state.filter;
    if (state.run !== before.run || state.view !== before.view) this.tooltip.hide();
    this.update();
  }

  private refresh(): void {
    this.selection = null;
    this.scales.clear();
    this.update();
  }

  private view(): ViewKind {
    const { view } = this.store.state;
    const first = FIRST_VIEWS[this.subject().data.kind];
    return (
      VIEWS.find((each) => each.id === view) ??
      VIEWS.find((each) => each.id === first && each.has(this)) ??
      VIEWS.find((each) => each.has(this)) ??
      VIEWS[0]!
    );
  }

  private update(): void {
    if (!this.model) return applyTheme(this.root, this.theme());
    applyTheme(this.root, this.theme());
    this.showRuns();
    this.showNav();
    this.showMessages();
    const total = this.subject().sites.length;
    this.filterCount.textContent = this.isFiltered()
      ? `${formatCount(this.filtered().length)} of ${formatCount(total)} sites`
      : `${formatCount(total)} ${total === 1 ? "site" : "sites"}`;
    this.filterCount.classList.toggle("bad", this.isFiltered() && this.filtered().length === 0);
    this.root.classList.toggle("has-site", this.store.state.site !== "");
    const view = this.view();
    const key = `${view.id} ${this.subject().index}`;
    if (key !== this.shownView) {
      this.instance?.destroy?.();
      clear(this.host);
      this.host.dataset.view = view.id;
      this.instance = view.make(this, this.host);
      this.shownView = key;
    }
    try {
      this.instance!.update();
      this.detail.update();
    } catch (error) {
      this.report(error);
    }
  }

  private showRuns(): void {
    clear(this.runs);
    if (this.model.subjects.length < 2) return;
    append(
      this.runs,
      this.model.subjects.map((subject) =>
        el(
          "button",
          {
            type: "button",
            class: "run",
            "aria-pressed": String(subject === this.subject()),
            title: `Show ${subject.data.name}`,
            onclick: () => this.store.set({ run: subject.index }),
          },
          subject.data.name,
        ),
      ),
    );
  }

  private showNav(): void {
    clear(this.nav);
    let group = "";
    const current = this.view().id;
    VIEWS.forEach((view, i) => {
      if (view.group !== group) this.nav.append(el("div", { class: "nav-group" }, view.group));
      group = view.group;
      const count = view.id === "alerts" ? this.subject().data.events.length : 0;
      this.nav.append(
        el(
          "button",
          {
            type: "button",
            class: view.has(this) ? "nav-item" : "nav-item without",
            "aria-current": view.id === current ? "page" : undefined,
            title: i < 9 ? `${view.title} (${i + 1})` : view.title,
            onclick: () => this.store.set({ view: view.id }),
          },
          view.title,
          count ? el("span", { class: "count" }, formatCount(count)) : null,
        ),
      );
    });
  }

  private showMessages(): void {
    const found = this.subject().data.messages.filter(({ text }) => !this.dismissed.has(text));
    const entries = [
      ...found.map(({ level, text }) => [level, text] as const),
      ...this.errors.slice(-2).map((text) => ["error", text] as const),
    ];
    this.messages.replaceChildren(
      ...entries.map(([level, text]) =>
        el(
          "div",
          { class: `message ${level}`, role: level === "error" ? "alert" : "status" },
          el("span", {}, text),
          el(
            "button",
            {
              type: "button",
              class: "close",
              "aria-label": "Dismiss",
              onclick: () => {
                found.forEach(({ text }) => this.dismissed.add(text));
                this.errors = [];
                this.showMessages();
              },
            },
            "×",
          ),
        ),
      ),
    );
  }

  private toggleTheme(): void {
    this.store.set({ theme: this.theme().name === "light" ? "dark" : "light" });
  }

  private key(event: KeyboardEvent): void {
    const target = event.composedPath()[0];
    if (event.key === "Escape" && target === this.filterInput) return this.filterInput.blur();
    if (
      target instanceof HTMLInputElement ||
      target instanceof HTMLSelectElement ||
      event.ctrlKey ||
      event.metaKey ||
      event.altKey
    )
      return;
    const at = VIEWS.findIndex((view) => view.id === this.view().id);
    const digit = Number(event.key);
    if (digit >= 1 && digit <= 9) this.store.set({ view: VIEWS[digit - 1]!.id });
    else if (event.key === "]" || event.key === "[")
      this.store.set({ view: VIEWS[(at + (event.key === "]" ? 1 : VIEWS.length - 1)) % VIEWS.length]!.id });
    else if (event.key === "/") this.filterInput.focus();
    else if (event.key === "t") this.toggleTheme();
    else if (event.key === "Escape") this.store.set({ site: "", step: null });
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") this.moveSite(event.key === "ArrowDown" ? 1 : -1);
    else return;
    event.preventDefault();
  }

  private moveSite(by: number): void {
    const sites = this.filtered();
    if (!sites.length) return;
    const at = sites.findIndex((site) => site.name === this.store.state.site);
    this.selectSite(sites[Math.max(0, Math.min(sites.length - 1, at < 0 ? 0 : at + by))]!.name);
  }
}
