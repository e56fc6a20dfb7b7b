import { CaptureGrid } from "./capture_grid";
import { RunHeatmap } from "./run_heatmap";
import type { ViewKind } from "./view";

export const layers: ViewKind = {
  id: "layers",
  title: "Layers",
  group: "Numbers",
  has: (context) => context.subject().statistics.length > 0,
  make: (context, host) => (context.subject().isRun ? new RunHeatmap(context, host) : new CaptureGrid(context, host)),
};
