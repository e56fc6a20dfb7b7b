/** The edges between visible modules: the flow of data if it is known, else the order of the program. */
import { formatType } from "../draw/format";
import type { Edge } from "../payload/types";
import type { ModuleNode } from "./module_tree";

export interface ModuleEdge {
  from: ModuleNode;
  to: ModuleNode;
  /** The types of the values that flow, or "" if they are not known. */
  label: string;
  /** Data flow through the carry of a loop, to the same or an earlier module. */
  isBack: boolean;
  /** The edge is only the order in which the program runs the modules, because the flow is not known. */
  isOrder: boolean;
}

/** The largest number of edges to one site that pass through hidden sites, as in `tapax/_results/flow.py`. */
const LIMIT = 32;
/** How many different types the label of an edge names. */
const NAMED_TYPES = 2;

/**
 * Fold the edges of sites to edges of visible modules: the union of the edges of the sites below them. `edges` is null
 * if the flow of data is not known.
 */
export function visibleEdges(root: ModuleNode, open: Set<string>, edges: Edge[] | null): ModuleEdge[] {
  if (!edges) return orderEdges(root, open);
  const owner = ownersOf(root, open);
  const numbers = new Map([...new Set(owner.values())].map((node, i) => [node, i]));
  const made = new Map<number, { edge: ModuleEdge; types: Set<string> }>();
  for (const edge of throughHidden(edges, owner)) {
    let [from, to] = [owner.get(edge.from), owner.get(edge.to)];
    if (!from || !to) continue;
    if (contains(from, to) || contains(to, from)) {
      // The result of a container comes from a module in it, which its box shows. Only a carry is drawn, at the container.
      if (!edge.back) continue;
      from = to = contains(from, to) ? from : to;
    }
    if (from === to && (!edge.back || hidesLoop(from, open))) continue;
    const key = numbers.get(from)! * numbers.size + numbers.get(to)!;
    const known = made.get(key);
    const type = formatType(edge.dtype, edge.shape);
    if (known) {
      known.types.add(type);
      known.edge.isBack &&= edge.back;
    } else
      made.set(key, { edge: { from, to, label: "", isBack: edge.back, isOrder: false }, types: new Set([type]) });
  }
  return [...made.values()].map(({ edge, types }) => ({ ...edge, label: labelOf(types) }));
}

/** Keep about `most` edges: to each module those from the nearest modules, in the order of the program. */
export function keepNearest(edges: ModuleEdge[], most: number): ModuleEdge[] {
  if (edges.length <= most) return edges;
  const byTarget = new Map<ModuleNode, ModuleEdge[]>();
  for (const edge of edges) {
    const known = byTarget.get(edge.to);
    if (known) known.push(edge);
    else byTarget.set(edge.to, [edge]);
  }
  const each = Math.max(1, Math.floor(most / byTarget.size));
  const distance = ({ from, to }: ModuleEdge) => Math.abs(to.first - from.first);
  return [...byTarget.values()].flatMap((list) => list.sort((a, b) => distance(a) - distance(b)).slice(0, each));
}

/** The visible module of each site: its own, or the closed container around it. */
function ownersOf(root: ModuleNode, open: Set<string>): Map<number, ModuleNode> {
  const owner = new Map<number, ModuleNode>();
  const visit = (node: ModuleNode, shown: ModuleNode) => {
    node.sites.forEach((site) => owner.set(site.index, shown));
    node.children.forEach((child) => visit(child, open.has(node.path) ? child : shown));
  };
  root.children.forEach((child) => visit(child, child));
  return owner;
}

/** Replace edges to and from sites that the filter hides by edges that pass through them. */
function throughHidden(edges: Edge[], shown: Map<number, ModuleNode>): Edge[] {
  if (edges.every(({ from, to }) => shown.has(from) && shown.has(to))) return edges;
  // The edges that reach a hidden site last; a second round follows edges that go back.
  const reaching = new Map<number, Map<number, Edge>>();
  const made: Edge[] = [];
  const ordered = [...edges].sort((a, b) => Number(a.back) - Number(b.back) || a.to - b.to);
  for (const isLast of [false, true]) {
    for (const edge of ordered) {
      const sources = shown.has(edge.from) ? [edge] : [...(reaching.get(edge.from)?.values() ?? [])];
      for (const { from, shape, dtype, back } of sources) {
        if (shown.has(edge.to)) {
          if (isLast) made.push({ from, to: edge.to, shape, dtype, back: back || edge.back });
        } else {
          const known = reaching.get(edge.to) ?? new Map<number, Edge>();
          reaching.set(edge.to, known);
          if (known.size < LIMIT) known.set(from, { from, to: edge.to, shape, dtype, back: back || edge.back });
        }
      }
    }
  }
  return made;
}

/** Whether a closed container hides a loop that is entirely inside of it, and so has no iterations itself. */
function hidesLoop(node: ModuleNode, open: Set<string>): boolean {
  return node.children.length > 0 && !open.has(node.path) && !node.sites.length;
}

function labelOf(types: Set<string>): string {
  return types.size <= NAMED_TYPES ? [...types].join(", ") : `${types.size} types`;
}

function contains(outer: ModuleNode, inner: ModuleNode): boolean {
  return inner.path.startsWith(`${outer.path}/`);
}

function orderEdges(node: ModuleNode, open: Set<string>): ModuleEdge[] {
  const made: ModuleEdge[] = [];
  node.children.forEach((child, i) => {
    const next = node.children[i + 1];
    if (next) made.push({ from: child, to: next, label: outputType(child), isBack: false, isOrder: true });
    if (open.has(child.path)) made.push(...orderEdges(child, open));
  });
  return made;
}

/** The type of what a module returns: of its own site, or of the last one in it. */
function outputType(node: ModuleNode): string {
  const own =
    node.sites.find((site) => site.shape && !site.path.includes(":")) ?? node.sites.find((site) => site.shape);
  if (own) return formatType(own.dtype, own.shape);
  for (let i = node.children.length - 1; i >= 0; i--) {
    const type = outputType(node.children[i]!);
    if (type) return type;
  }
  return "";
}
