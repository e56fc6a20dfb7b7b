/** Positions of visible modules: elkjs in a worker, or an indented list where no worker can be started. */
import ELK from "elkjs/lib/elk-api.js";
import type { ElkNode } from "elkjs/lib/elk-api";
import workerText from "elkjs/lib/elk-worker.min.js?text";
import type { ModuleEdge } from "./module_edges";
import type { ModuleNode } from "./module_tree";

export interface Box {
  node: ModuleNode;
  x: number;
  y: number;
  width: number;
  height: number;
}

export type Point = [number, number];

export interface Line {
  points: Point[];
  /** Where the label begins, above its text; null if there is no space for labels. */
  label: Point | null;
}

export interface GraphLayout {
  boxes: Box[];
  lines: Map<ModuleEdge, Line>;
  width: number;
  height: number;
}

const HEIGHT = 34;
const TITLE = 26;
const LABEL_HEIGHT = 13;
const LABEL_WIDTH = 6.4;
/** The space beside a module for the line of a loop. */
const LOOP = 22;
/** With more edges than this, labels take more space than the graph. */
const MOST_LABELS = 150;
let engine: InstanceType<typeof ELK> | null = null;

function startEngine(): InstanceType<typeof ELK> {
  const address = URL.createObjectURL(new Blob([workerText], { type: "text/javascript" }));
  return new ELK({ workerUrl: address, workerFactory: (url?: string) => new Worker(url ?? address) });
}

export function boxWidth(node: ModuleNode): number {
  return Math.max(172, 7.2 * (node.label.length + node.repeats.length) + 44);
}

export async function layOutGraph(root: ModuleNode, open: Set<string>, edges: ModuleEdge[]): Promise<GraphLayout> {
  try {
    engine ??= startEngine();
    return read(await engine.layout(toElk(root, open, edges)), root, edges);
  } catch {
    return layOutIndented(root, open);
  }
}

function toElk(root: ModuleNode, open: Set<string>, edges: ModuleEdge[]): ElkNode {
  const convert = (node: ModuleNode): ElkNode => {
    const children = open.has(node.path) ? node.children.map(convert) : [];
    return children.length
      ? {
          id: node.path,
          children,
          layoutOptions: { "elk.padding": `[top=${TITLE + 10},left=14,bottom=14,right=14]` },
        }
      : { id: node.path, width: boxWidth(node), height: HEIGHT };
  };
  const isLabelled = edges.length <= MOST_LABELS;
  return {
    id: "\0root",
    children: root.children.map(convert),
    edges: edges.flatMap((edge, i) =>
      edge.from === edge.to
        ? []
        : {
            id: `e${i}`,
            // The layout puts the source of an edge first. An edge that goes back is laid out the other way round.
            sources: [edge.isBack ? edge.to.path : edge.from.path],
            targets: [edge.isBack ? edge.from.path : edge.to.path],
            labels:
              isLabelled && edge.label
                ? [{ text: edge.label, width: LABEL_WIDTH * edge.label.length + 8, height: LABEL_HEIGHT }]
                : [],
          },
    ),
    layoutOptions: {
      "elk.algorithm": "layered",
      "elk.direction": "DOWN",
      "elk.hierarchyHandling": "INCLUDE_CHILDREN",
      "elk.layered.spacing.nodeNodeBetweenLayers": "30",
      "elk.spacing.nodeNode": "18",
      "elk.layered.considerModelOrder.strategy": "NODES_AND_EDGES",
      "elk.json.edgeCoords": "ROOT",
      "elk.edgeLabels.inline": "false",
      "elk.spacing.edgeLabel": "3",
    },
  };
}

function read(laid: ElkNode, root: ModuleNode, edges: ModuleEdge[]): GraphLayout {
  const byPath = new Map<string, ModuleNode>();
  const index = (node: ModuleNode) => {
    byPath.set(node.path, node);
    node.children.forEach(index);
  };
  index(root);
  const boxes: Box[] = [];
  const place = (node: ElkNode, x: number, y: number) => {
    for (const child of node.children ?? []) {
      const box = {
        node: byPath.get(child.id)!,
        x: x + (child.x ?? 0),
        y: y + (child.y ?? 0),
        width: child.width ?? 0,
        height: child.height ?? 0,
      };
      boxes.push(box);
      place(child, box.x, box.y);
    }
  };
  place(laid, 0, 0);
  const lines = new Map<ModuleEdge, Line>();
  for (const edge of laid.edges ?? []) {
    const section = edge.sections?.[0];
    if (!section) continue;
    const points = [section.startPoint, ...(section.bendPoints ?? []), section.endPoint];
    const label = edge.labels?.[0];
    const which = edges[Number(edge.id.slice(1))]!;
    if (which.isBack) points.reverse();
    lines.set(which, {
      points: points.map(({ x, y }) => [x, y]),
      label: label ? [label.x ?? 0, label.y ?? 0] : null,
    });
  }
  const byNode = new Map(boxes.map((box) => [box.node, box]));
  for (const edge of edges) if (edge.from === edge.to) lines.set(edge, drawLoop(byNode.get(edge.from)!));
  return { boxes, lines, width: laid.width ?? 0, height: laid.height ?? 0 };
}

/** The line of a loop that carries data from a module to itself, at the right side of its box. */
function drawLoop({ x, y, width, height }: Box): Line {
  const [right, top, bottom] = [x + width, y + Math.min(10, height / 4), y + Math.min(height - 8, 28)];
  const points: Point[] = [
    [right, bottom],
    [right + LOOP / 2, bottom],
    [right + LOOP / 2, top],
    [right, top],
  ];
  return { points, label: null };
}

/** Every visible module on a line of its own, indented by its depth. */
export function layOutIndented(root: ModuleNode, open: Set<string>): GraphLayout {
  const boxes: Box[] = [];
  let [y, width] = [0, 0];
  const place = (node: ModuleNode, depth: number): void => {
    for (const child of node.children) {
      const box = { node: child, x: depth * 26, y, width: boxWidth(child), height: HEIGHT };
      boxes.push(box);
      width = Math.max(width, box.x + box.width);
      y += HEIGHT + 8;
      if (open.has(child.path)) place(child, depth + 1);
    }
  };
  place(root, 0);
  return { boxes, lines: new Map(), width, height: y };
}
