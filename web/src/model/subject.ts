/** A subject as the views use it: sites as objects, statistics by key, updates merged in. */
import { BlobReader } from "../payload/blobs";
import { MatrixReader } from "../payload/tiles";
import type { Header, Of, SiteColumns, Statistic, Subject, Update } from "../payload/types";

export interface Site {
  index: number;
  name: string;
  path: string;
  call: number;
  pullback: number;
  iteration: number[];
  kind: string;
  shape: number[] | null;
  dtype: string;
  nbytes: number;
  source: [number, number] | null;
  loops: string[];
  module: string;
  op: string;
  conditional: boolean;
  role: string;
  stack: string;
  depth: number[];
}

export interface LoadedStatistic {
  key: string;
  of: Of;
  stat: string;
  label: string;
  unit: string;
  scale: Statistic["scale"];
  matrix: MatrixReader;
}

export const KINDS: Record<Of, string> = {
  value: "value",
  grad: "gradient",
  param: "parameter",
  param_grad: "parameter gradient",
  update: "update",
  "": "",
};

export function statisticKey(of: Of, stat: string): string {
  return of ? `${of}.${stat}` : stat || "number";
}

export function statisticLabel(of: Of, stat: string): string {
  const name = stat.replace(/_/g, " ");
  return of ? `${KINDS[of]} ${name}` : name || "number";
}

function makeSites(columns: SiteColumns, first = 0): Site[] {
  return columns.name.map((name, i) => ({
    index: first + i,
    name,
    path: columns.path[i]!,
    call: columns.call?.[i] ?? 0,
    pullback: columns.pullback?.[i] ?? 0,
    iteration: columns.iteration?.[i] ?? [],
    kind: columns.kind?.[i] ?? "",
    shape: columns.shape?.[i] ?? null,
    dtype: columns.dtype?.[i] ?? "",
    nbytes: columns.nbytes?.[i] ?? 0,
    source: columns.source?.[i] ?? null,
    loops: columns.loops?.[i] ?? [],
    module: columns.module?.[i] ?? "",
    op: columns.op?.[i] ?? "",
    conditional: columns.conditional?.[i] ?? false,
    role: columns.role[i]!,
    stack: columns.stack[i]!,
    depth: columns.depth[i]!,
  }));
}

export class SubjectModel {
  sites: Site[];
  steps: number[] = [];
  statistics: LoadedStatistic[] = [];
  private byName: Map<string, Site>;

  constructor(
    readonly index: number,
    public data: Subject,
    readonly reader: BlobReader,
  ) {
    this.sites = makeSites(data.sites);
    this.byName = new Map(this.sites.map((site) => [site.name, site]));
  }

  get isRun(): boolean {
    return this.data.kind === "log";
  }

  /** Read the steps, and the coarsest level of every statistic. */
  async load(): Promise<void> {
    if (this.data.steps) this.steps = Array.from(await this.reader.doubles(this.data.steps));
    this.statistics = await Promise.all(this.data.statistics.map((statistic) => this.loadStatistic(statistic)));
  }

  private async loadStatistic({ of, stat, unit, scale, matrix }: Statistic): Promise<LoadedStatistic> {
    const reader = new MatrixReader(matrix, this.reader);
    await reader.load();
    return { key: statisticKey(of, stat), of, stat, label: statisticLabel(of, stat), unit, scale, matrix: reader };
  }

  site(name: string): Site | undefined {
    return this.byName.get(name);
  }

  statistic(key: string): LoadedStatistic | undefined {
    return this.statistics.find((each) => each.key === key);
  }

  /** The statistic that a view shows unless another is chosen: the rms or the norm of values, else the first. */
  defaultStatistic(of: Of = "value"): LoadedStatistic | undefined {
    const wanted = [statisticKey(of, "rms"), statisticKey(of, "norm"), "value.rms", "grad.rms"];
    for (const key of wanted) {
      const found = this.statistic(key);
      if (found) return found;
    }
    return this.statistics.find((each) => each.of === of) ?? this.statistics[0];
  }

  async apply(update: Update): Promise<void> {
    const added = makeSites(update.sites, this.sites.length);
    this.sites.push(...added);
    for (const site of added) this.byName.set(site.name, site);
    for (const statistic of update.statistics) {
      const reader = new MatrixReader(statistic.matrix, this.reader);
      await reader.load();
      const rows = new Map<number, Float32Array>();
      for (let row = 0; row < reader.rows; row++) rows.set(reader.sites[row]!, reader.coarseRow(row));
      const known = this.statistic(statisticKey(statistic.of, statistic.stat));
      if (known) known.matrix.append(update.keep, update.steps.length, rows);
      else this.statistics.push(await this.emptyStatistic(statistic, update, rows));
    }
    for (const statistic of this.statistics) {
      const { matrix } = statistic;
      const total = update.keep + update.steps.length;
      if (matrix.columns !== total) matrix.append(update.keep, update.steps.length, new Map());
    }
    this.steps.length = update.keep;
    this.steps.push(...update.steps);
    const same = (a: { of: string; stat: string; site: number }, b: typeof a) =>
      a.of === b.of && a.stat === b.stat && a.site === b.site;
    const others = this.data.histograms.filter((old) => !update.histograms.some((each) => same(old, each)));
    this.data = {
      ...this.data,
      histograms: [...others, ...update.histograms].sort((a, b) => a.site - b.site),
      edges: update.edges ?? this.data.edges,
      limited: update.limited ?? this.data.limited ?? [],
      events: update.events,
      messages: update.messages,
      revision: update.revision,
    };
  }

  private async emptyStatistic(
    statistic: Statistic,
    update: Update,
    rows: Map<number, Float32Array>,
  ): Promise<LoadedStatistic> {
    const { of, stat, unit, scale } = statistic;
    const level = { factor: 1, columns: 0, codec: "f32" as const, tileRows: 1, tileColumns: 1, blob: 0 };
    const matrix = new MatrixReader({ sites: null, rows: 0, columns: 0, levels: [level] }, this.reader);
    await matrix.load();
    matrix.append(update.keep, update.steps.length, rows);
    return { key: statisticKey(of, stat), of, stat, label: statisticLabel(of, stat), unit, scale, matrix };
  }
}

export interface Model {
  header: Header;
  reader: BlobReader;
  subjects: SubjectModel[];
}
