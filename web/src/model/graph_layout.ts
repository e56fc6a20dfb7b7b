/** Positions of visible modules: elkjs in a worker, or an indented list where no worker can be started. */
import ELK from "elkjs/lib/elk-api.js";
import type { ElkNode } from "elkjs/lib/elk-api";
import workerText from "elkjs/lib/elk-worker.min.js?text";
import type { ModuleEdge, ModuleNode } from "./module_tree";

export interface Box {
  node: ModuleNode;
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface GraphLayout {
  boxes: Box[];
  /** The corners of each edge, by the edge. */
  lines: Map<ModuleEdge, [number, number][]>;
  width: number;
  height: number;
}

const HEIGHT = 34;
const TITLE = 26;
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
  return {
    id: "\0root",
    children: root.children.map(convert),
    edges: edges.map((edge, i) => ({ id: `e${i}`, sources: [edge.from.path], targets: [edge.to.path] })),
    layoutOptions: {
      "elk.algorithm": "layered",
      "elk.direction": "DOWN",
      "elk.hierarchyHandling": "INCLUDE_CHILDREN",
      "elk.layered.spacing.nodeNodeBetweenLayers": "30",
      "elk.spacing.nodeNode": "18",
      "elk.layered.considerModelOrder.strategy": "NODES_AND_EDGES",
      "elk.json.edgeCoords": "ROOT",
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
  const lines = new Map<ModuleEdge, [number, number][]>();
  for (const edge of laid.edges ?? []) {
    const section = edge.sections?.[0];
    if (!section) continue;
    const points = [section.startPoint, ...(section.bendPoints ?? []), section.endPoint];
    lines.set(
      edges[Number(edge.id.slice(1))]!,
      points.map(({ x, y }) => [x, y]),
    );
  }
  return { boxes, lines, width: laid.width ?? 0, height: laid.height ?? 0 };
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
