/** The colour bar of a scale, with its ticks, its unit, and the mark of numbers that are not finite. */
import { fitCanvas } from "../ui/dom";
import { el } from "../ui/dom";
import { colourAt, css, type Palette } from "./colour";
import { type Scale, tickLabel, ticks } from "./scale";

const WIDTH = 220;
const BAR = 10;

export function legend(scale: Scale, palette: Palette, label: string, unit: string, ink: string): HTMLElement {
  const canvas = el("canvas", {
    class: "legend-bar",
    role: "img",
    "aria-label": `${label}: from ${tickLabel(scale.low)} to ${tickLabel(scale.high)} ${unit}`,
  });
  const context = fitCanvas(canvas, WIDTH + 40, BAR + 18);
  for (let x = 0; x < WIDTH; x++) {
    context.fillStyle = css(colourAt(palette, x / (WIDTH - 1)));
    context.fillRect(20 + x, 0, 1.5, BAR);
  }
  context.fillStyle = ink;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  let end = -Infinity;
  for (const tick of ticks(scale, scale.kind === "log" ? 4 : 5)) {
    const x = 20 + scale.place(tick) * (WIDTH - 1);
    const text = tickLabel(tick);
    const half = context.measureText(text).width / 2;
    if (x - half < end + 6) continue;
    context.fillRect(x, BAR, 1, 3);
    context.fillText(text, x, BAR + 14);
    end = x + half;
  }
  const kind = scale.kind === "log" ? ", log scale" : "";
  return el(
    "div",
    { class: "legend" },
    el("span", { class: "legend-label" }, `${label}${unit ? ` (${unit})` : ""}${kind}`),
    canvas,
    el("span", { class: "legend-mark" }, swatch(css(palette.nonfinite)), "not finite"),
  );
}

function swatch(colour: string): HTMLElement {
  const box = el("span", { class: "swatch" });
  box.style.background = colour;
  return box;
}
