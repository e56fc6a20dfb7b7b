/** Every view, in the order of the list. */
import { arrays } from "./arrays";
import { compare } from "./compare";
import { dataset } from "./dataset";
import { events } from "./events";
import { heads } from "./heads";
import { histograms } from "./histograms";
import { layers } from "./layers";
import { modules } from "./modules";
import { sites } from "./sites";
import { source } from "./source";
import { tokens } from "./tokens";
import type { ViewKind } from "./view";

export const VIEWS: ViewKind[] = [
  layers,
  sites,
  histograms,
  events,
  modules,
  source,
  tokens,
  heads,
  arrays,
  compare,
  dataset,
];
