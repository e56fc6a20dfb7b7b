/** What a view is, and what it gets from the page. */
import type { Site, SubjectModel } from "../model/subject";
import type { LoadedStatistic, Model } from "../model/subject";
import type { Scale, ScaleKind } from "../draw/scale";
import type { Store } from "../state";
import type { Theme } from "../ui/theme";
import type { Tooltip } from "../ui/tooltip";

export interface PageContext {
  model: Model;
  store: Store;
  tooltip: Tooltip;
  theme(): Theme;
  subject(): SubjectModel;
  /** The sites that the filter picks, in the order of the program. */
  filtered(): Site[];
  isFiltered(): boolean;
  /** The chosen statistic, if the subject has any. */
  statistic(): LoadedStatistic | undefined;
  /** The scale of the chosen statistic over all sites and steps. */
  scale(statistic: LoadedStatistic): Scale;
  scaleKind(statistic: LoadedStatistic): ScaleKind;
  selectSite(name: string, step?: number | null): void;
  /** The controls for the statistic and its scale. */
  statisticControls(): HTMLElement[];
  /** Tell of an error that happened later than the making of a view. */
  report(error: unknown): void;
}

export interface ViewInstance {
  /** Draw anew after the state, the data or the size has changed. */
  update(): void;
  destroy?(): void;
  /** What is drawn, for tests: numbers, labels and places. */
  inspect?(): unknown;
}

export interface ViewKind {
  id: string;
  title: string;
  group: string;
  /** Whether the subject has what the view shows. */
  has(context: PageContext): boolean;
  make(context: PageContext, host: HTMLElement): ViewInstance;
}
