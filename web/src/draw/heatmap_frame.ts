/** What is around a heat map of sites by steps: the names of sites or layers, the steps, the selection. */
import { lowerBound } from "../model/windows";
import type { Site } from "../model/subject";
import type { Theme } from "../ui/theme";
import { formatCount, shorten } from "./format";
import type { Window } from "./heatmap";
import { niceTicks } from "./scale";

const LABEL_HEIGHT = 13;

export interface Area {
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface Frame {
  graphics: CanvasRenderingContext2D;
  area: Area;
  window: Window;
  theme: Theme;
  sites: Site[];
  /** The layer of each site, or its name if it is in none. */
  layers: string[];
  steps: number[];
  site: string;
  step: number | null;
}

export function layerOf(site: Site): string {
  return site.depth.length ? `${site.stack}/${site.depth.join("/")}` : site.name;
}

export function drawFrame(frame: Frame): void {
  drawLabels(frame);
  drawLayers(frame);
  drawSteps(frame);
  drawSelection(frame);
}

function rowHeight({ area, window }: Frame): number {
  return area.height / (window.rowTo - window.rowFrom);
}

function columnPlace({ area, window }: Frame, column: number): number {
  return area.x + ((column - window.columnFrom + 0.5) / (window.columnTo - window.columnFrom)) * area.width;
}

function drawLabels(frame: Frame): void {
  const { graphics, area, window, theme, sites } = frame;
  graphics.textAlign = "right";
  graphics.textBaseline = "middle";
  let end = -Infinity;
  for (const [i, text] of chooseLabels(frame)) {
    const y = area.y + (i - window.rowFrom + 0.5) * rowHeight(frame);
    if (y < end + LABEL_HEIGHT) continue;
    end = y;
    const chosen = sites[i]!.name === frame.site;
    graphics.fillStyle = chosen ? theme.accent : theme.muted;
    graphics.font = `${chosen ? "600 " : ""}11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace`;
    graphics.fillText(text, area.x - 8, y);
  }
  graphics.textBaseline = "alphabetic";
}

/** Rows with a label: every site if there is room, else the first of each layer, else every n-th site. */
function chooseLabels(frame: Frame): [number, string][] {
  const { area, window, sites, layers } = frame;
  const characters = Math.floor((area.x - 14) / 6.4);
  const stride = Math.max(1, Math.ceil(LABEL_HEIGHT / rowHeight(frame)));
  const made: [number, string][] = [];
  if (stride > 1) {
    for (let i = window.rowFrom; i < window.rowTo; i++) {
      if (i === window.rowFrom || layers[i] !== layers[i - 1]) made.push([i, shorten(layers[i]!, characters)]);
    }
    if (made.length <= (window.rowTo - window.rowFrom) / 2) return made;
    made.length = 0;
  }
  for (let i = window.rowFrom; i < window.rowTo; i += stride) made.push([i, shorten(sites[i]!.name, characters)]);
  return made;
}

/** Lines between layers, where rows are tall enough to be told apart. */
function drawLayers(frame: Frame): void {
  const { graphics, area, window, theme, layers } = frame;
  const height = rowHeight(frame);
  if (height < 3) return;
  graphics.fillStyle = theme.panel;
  for (let i = window.rowFrom + 1; i < window.rowTo; i++) {
    if (layers[i] === layers[i - 1]) continue;
    graphics.fillRect(area.x, area.y + (i - window.rowFrom) * height - 0.75, area.width, 1.5);
  }
}

function drawSteps(frame: Frame): void {
  const { graphics, area, window, theme, steps } = frame;
  const below = area.y + area.height;
  graphics.fillStyle = theme.muted;
  graphics.font = "11px system-ui, sans-serif";
  graphics.textAlign = "center";
  const [first, last] = [steps[window.columnFrom] ?? 0, steps[window.columnTo - 1] ?? 0];
  for (const tick of niceTicks(first, last, Math.max(2, area.width / 110))) {
    const column = lowerBound(steps, tick);
    if (column < window.columnFrom || column >= window.columnTo) continue;
    const x = columnPlace(frame, column);
    graphics.fillRect(Math.round(x), below, 1, 4);
    graphics.fillText(formatCount(tick), x, below + 17);
  }
  graphics.textAlign = "left";
  graphics.fillText("step", 12, below + 17);
}

function drawSelection(frame: Frame): void {
  const { graphics, area, window, theme, sites, steps, site, step } = frame;
  graphics.strokeStyle = theme.accent;
  graphics.lineWidth = 1.5;
  const row = sites.findIndex((each) => each.name === site);
  if (row >= window.rowFrom && row < window.rowTo) {
    const height = rowHeight(frame);
    const y = area.y + (row - window.rowFrom) * height;
    graphics.strokeRect(area.x - 0.75, y - 0.75, area.width + 1.5, Math.max(height, 2) + 1.5);
  }
  if (step === null) return;
  const column = lowerBound(steps, step);
  if (column < window.columnFrom || column >= window.columnTo) return;
  const x = columnPlace(frame, column);
  graphics.setLineDash([4, 3]);
  graphics.beginPath();
  graphics.moveTo(x, area.y);
  graphics.lineTo(x, area.y + area.height);
  graphics.stroke();
  graphics.setLineDash([]);
}
