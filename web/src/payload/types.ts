/**
 * The contract between Python and the page, version 2. `tapax/viewer/_format.py` is its other half and says what
 * every part means; these are the same shapes, as the page reads them.
 */

export const FORMAT = "tapax.page";
export const VERSION = 2;

/** A site has no number at this step. It is the negative number nearest to zero, which no statistic takes. */
export const MISSING = -(2 ** -149);

export interface Header {
  format: typeof FORMAT;
  version: number;
  title: string;
  subjects: Subject[];
  sources: SourceFile[];
  /** How many blobs there are; blob `i` is what `BlobSource.read(i)` returns. */
  blobs: number;
}

export type SubjectKind = "taps" | "sites" | "log" | "finding" | "difference" | "activations";

export interface Subject {
  kind: SubjectKind;
  name: string;
  sites: SiteColumns;
  /** The step of every column of the statistics, as f64; null for a single capture. */
  steps: Column | null;
  /** The number of the last update, of all runs together, that the subject has in it; absent if it is not followed. */
  revision?: number;
  statistics: Statistic[];
  histograms: Histogram[];
  arrays: ArrayEntry[];
  tokens: TokenGrid[];
  /** The flow of data between sites; null if it is not known. */
  edges: Edge[] | null;
  /** The sites to which data of more sites flow than `edges` has. */
  limited?: number[];
  events: PageEvent[];
  messages: Message[];
  difference?: DifferenceEntry;
  dataset?: Dataset;
}

/** One entry for each site in every column. Columns that are not known for any site are absent. */
export interface SiteColumns {
  /** Unique, with call and iteration: `GPT/blocks/mlp@1[3]`. */
  name: string[];
  /** Without call, pullback and iteration: what a glob is matched with. */
  path: string[];
  call?: number[];
  pullback?: number[];
  kind?: string[];
  /** The shape of one iteration. */
  shape?: (number[] | null)[];
  dtype?: string[];
  nbytes?: number[];
  /** The number of the file in `Header.sources` and the line; null if it is not known. */
  source?: ([number, number] | null)[];
  loops?: string[][];
  iteration?: number[][];
  module?: string[];
  method?: string[];
  op?: string[];
  /** Whether a condition decided that the site ran: the site is in a branch of `cond` or in a while loop. */
  conditional?: boolean[];
  /** The role of the site in its layer, the stack of layers it is in, and which of these; see `_sites/roles.py`. */
  role: string[];
  stack: string[];
  depth: number[][];
}

export type Of = "value" | "grad" | "param" | "param_grad" | "update" | "";

export interface Statistic {
  of: Of;
  /** `rms`, `grad_norm` ...; empty for a plain number such as a loss. */
  stat: string;
  unit: string;
  /** The scale to begin with: `diverging` for statistics that may be negative. */
  scale: "log" | "linear" | "diverging";
  matrix: Matrix;
}

/** A matrix [rows, steps] of float32, at one or several resolutions along the steps. */
export interface Matrix {
  /** The site of each row, ascending, as i32; null if row `i` is site `i`. */
  sites: Column | null;
  rows: number;
  columns: number;
  /** The finest first, with `factor` 1. */
  levels: Level[];
}

export interface Level {
  /** A column of this level summarises this many columns of the matrix: the number of largest magnitude. */
  factor: number;
  columns: number;
  codec: Codec;
  tileRows: number;
  tileColumns: number;
  /** The blob of the first tile. The others follow, row by row of tiles. */
  blob: number;
}

export type Codec = "f32" | "q13";

export interface Histogram {
  of: Of;
  stat: string;
  site: number;
  /** The step at which each line begins, f64 [lines]; null for a single capture. */
  steps: Column | null;
  /** f64 [bins + 1]. */
  edges: Column;
  /** f32 [lines, bins]; a line is the sum of the steps up to the next line. */
  counts: Column;
}

export interface ArrayEntry {
  site: number;
  of: "value" | "grad" | "valid";
  shape: number[];
  dtype: string;
  /** f32 of `shape`; null if it was left out, for the reason in `omitted`. */
  data: Column | null;
  omitted?: string;
  /** The text by which treescope shows it. */
  rendering?: string;
}

/** Numbers by site, example and position: norms, a logit lens, patching results. */
export interface TokenGrid {
  label: string;
  unit: string;
  scale: "log" | "linear" | "diverging";
  /** Sites of the rows, first layer first; -1 where a row is not a site. */
  sites: number[];
  rowLabels: string[];
  examples: number;
  positions: number;
  /** f32 [rows, examples, positions]. */
  data: Column;
  /** The token at every position, [examples][positions]. */
  tokens?: string[][];
  /** A text for every cell, such as the likeliest token: indices into `texts`, i32 [rows, examples, positions]. */
  cells?: Column;
  texts?: string[];
}

/** Data flow from one site to another; `shape` and `dtype` are those of the value. */
export interface Edge {
  from: number;
  to: number;
  shape: number[];
  dtype: string;
  /** Whether they flow to the same or an earlier site, through the carry of a loop. */
  back: boolean;
}

/** An alert that went off, or a non-finite value that was found. */
export interface PageEvent {
  kind: "alert" | "finding";
  step: number | null;
  /** -1 if the subject does not have the site. */
  site: number;
  siteName: string;
  message: string;
  stat?: string;
  number?: number | "NaN" | "Infinity" | "-Infinity";
  operation?: string;
  phase?: string;
  iterations?: [string, number][];
  examples?: [number, number][];
  device?: [string, number][];
  index?: number[];
  count?: number;
  shape?: number[];
  dtype?: string;
  operands?: { label: string; type: string; text: string }[];
  source?: [number, number] | null;
}

export interface Message {
  level: "info" | "warning" | "error";
  text: string;
}

export interface SourceFile {
  path: string;
  /** utf8; null if the file could not be read. */
  text: Column | null;
}

export interface DifferenceEntry {
  a: string;
  b: string;
  tolerance: string;
  entries: SiteDifference[];
  /** Numbers of entries, or null. */
  first: number | null;
  firstGrad: number | null;
  onlyA: string[];
  onlyB: string[];
}

export interface SiteDifference {
  site: number;
  otherName: string;
  of: "value" | "grad";
  types: [string, string];
  differs: boolean;
  reason: string;
  /** JSON has no infinity: "Infinity" stands for it. */
  absolute: number | "Infinity";
  relative: number | "Infinity";
  ulps: number | "Infinity";
  index: number[] | null;
  iteration: number[];
  sentence: string;
}

export interface Dataset {
  rows: number;
  columns: { name: string; dtype: string; shape: number[] }[];
  /** The first rows, or those of a sample: a text for each cell. */
  sample: { row: number[]; cells: string[][] };
  tops: TopContexts[];
}

/** The rows in which a latent, a neuron or a direction is most active. */
export interface TopContexts {
  label: string;
  site: number;
  contexts: { row: number; activation: number; tokens: string[]; activations: (number | string)[] }[];
}

/** A blob that holds one array, little-endian. */
export interface Column {
  blob: number;
  dtype: "f32" | "f64" | "i32" | "u8" | "utf8";
  shape: number[];
  /** How many elements of the blob come before this array; absent if it is the only one. */
  offset?: number;
}

/** What a run that is followed sends when it has grown. Blob numbers continue those of the header. */
export interface Update {
  format: typeof FORMAT;
  version: number;
  subject: number;
  revision: number;
  /** How many of the known steps remain; later ones are replaced. */
  keep: number;
  /** Sites that were not known, appended to those that are. */
  sites: SiteColumns;
  steps: number[];
  statistics: Statistic[];
  /** In full: they replace those of the same site, kind and statistic. */
  histograms: Histogram[];
  /** In full, if they have changed. */
  edges?: Edge[];
  limited?: number[];
  /** In full. */
  events: PageEvent[];
  messages: Message[];
  blobs: number;
}
