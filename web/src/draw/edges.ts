/** Edges of the graph of modules: a line, the head of an arrow, and the type of the value that flows. */
import type { Line, Point } from "../model/graph_layout";
import type { ModuleEdge } from "../model/module_edges";
import { shape } from "./svg";

export function drawEdge(edge: ModuleEdge, line: Line): SVGElement {
  const kind = edge.isOrder ? " order" : edge.isBack ? " back" : "";
  const group = shape("g", { class: `flow${kind}` });
  const points = line.points.map((point) => point.join(",")).join(" ");
  const title = shape("title", {});
  title.textContent = `${edge.from.path} → ${edge.to.path}${edge.label ? `  ${edge.label}` : ""}`;
  group.append(
    title,
    shape("polyline", { points, class: "edge-target" }),
    shape("polyline", { points, class: "edge" }),
    shape("path", { d: arrowHead(line.points), class: "edge arrow" }),
  );
  if (edge.label && line.label) {
    const text = shape("text", { x: line.label[0] + 4, y: line.label[1] + 10, class: "edge-label" });
    text.textContent = edge.label;
    group.append(text);
  }
  return group;
}

/** The head of an arrow at the last point, in the direction of the last part of the line. */
function arrowHead(points: Point[]): string {
  const [x, y] = points[points.length - 1]!;
  const [fromX, fromY] = points[points.length - 2] ?? [x, y - 1];
  const length = Math.hypot(x - fromX, y - fromY) || 1;
  const [dx, dy] = [(x - fromX) / length, (y - fromY) / length];
  const side = (sign: number) => `${x - 7 * dx - sign * 4 * dy} ${y - 7 * dy + sign * 4 * dx}`;
  return `M${side(1)} L${x} ${y} L${side(-1)}`;
}
