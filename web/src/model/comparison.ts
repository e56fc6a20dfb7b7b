/** Two columns of numbers by site, compared: two runs, or two steps of one. */
import { formatCount } from "../draw/format";
import { MISSING } from "../payload/types";
import type { LoadedStatistic, Site, SubjectModel } from "./subject";

export interface ComparedSite {
  site: Site;
  a: number;
  b: number;
  /** log2 of b over a, of magnitudes; NaN if it is not a number. */
  change: number;
  /** Whether they differ by more than the tolerance, or one of them alone is not finite. */
  differs: boolean;
}

export function numberAt(
  subject: SubjectModel,
  statistic: LoadedStatistic | undefined,
  site: Site | undefined,
  column: number,
): number {
  if (!statistic || !site) return MISSING;
  const row = statistic.matrix.row(site.index);
  if (row < 0) return MISSING;
  const at = subject.steps.length ? Math.min(column, subject.steps.length - 1) : 0;
  const { matrix } = statistic;
  return (
    matrix.at(row, at) ?? matrix.coarse[row * matrix.coarseColumns + Math.floor(at / matrix.coarseFactor)] ?? MISSING
  );
}

/** The last step that both runs have; without one, the last step of the run that ends first. */
export function lastCommonStep(a: number[], b: number[]): number {
  const inB = new Set(b);
  const common = a.filter((step) => inB.has(step));
  return common[common.length - 1] ?? Math.min(a[a.length - 1] ?? Infinity, b[b.length - 1] ?? Infinity);
}

/** The column of the last step up to `step`; the first column if all steps are later. */
export function columnBefore(steps: number[], step: number): number {
  const later = steps.findIndex((each) => each > step);
  return Math.max(0, (later < 0 ? steps.length : later) - 1);
}

export function compareSites(
  sites: Site[],
  readA: (site: Site) => number,
  readB: (site: Site) => number,
  tolerance: number,
): ComparedSite[] {
  const made: ComparedSite[] = [];
  for (const site of sites) {
    const a = readA(site);
    const b = readB(site);
    if (a === MISSING || b === MISSING) continue;
    const bothFinite = Number.isFinite(a) && Number.isFinite(b);
    const same = Object.is(a, b) || (bothFinite && Math.abs(a - b) <= tolerance * Math.max(Math.abs(a), Math.abs(b)));
    made.push({ site, a, b, change: Math.log2(Math.abs(b) / Math.abs(a)), differs: !same });
  }
  return made;
}

/** The result of a comparison in one sentence; sites without numbers in both were not compared. */
export function describeComparison(compared: ComparedSite[]): string {
  if (!compared.length) return "No site that the filter picks has this number in both";
  const differing = compared.filter((each) => each.differs).length;
  return differing
    ? `${formatCount(differing)} of ${formatCount(compared.length)} sites differ`
    : `All ${formatCount(compared.length)} sites are equal within the tolerance`;
}
