/** The modules of a program as a tree, from the paths of its sites; iterations and calls of one module are one node. */
import type { Edge } from "../payload/types";
import type { Site } from "./subject";

export interface ModuleNode {
  path: string;
  label: string;
  parent: ModuleNode | null;
  children: ModuleNode[];
  /** The sites with this very path: iterations, calls and leaves of one module. */
  sites: Site[];
  /** The number of the first site in it, which orders siblings as the program runs them. */
  first: number;
  /** How many sites are in it, its own included. */
  count: number;
  /** How often a loop runs it: "× 12", or "while". */
  repeats: string;
  isConditional: boolean;
}

export interface ModuleEdge {
  from: ModuleNode;
  to: ModuleNode;
  label: string;
  /** Whether it is only the order in which the program runs them, because its data flow is not known. */
  isOrder: boolean;
}

export function buildTree(sites: Site[]): ModuleNode {
  const root = makeNode("", "", null);
  const nodes = new Map<string, ModuleNode>([["", root]]);
  for (const site of sites) {
    const module = site.path.split(":", 1)[0]!;
    const segments = module.split("/");
    let node = root;
    let path = "";
    for (const segment of segments) {
      path = path ? `${path}/${segment}` : segment;
      let child = nodes.get(path);
      if (!child) {
        child = makeNode(path, segment, node);
        nodes.set(path, child);
        node.children.push(child);
      }
      node = child;
    }
    node.sites.push(site);
  }
  finish(root);
  return root;
}

function makeNode(path: string, label: string, parent: ModuleNode | null): ModuleNode {
  return {
    path,
    label,
    parent,
    children: [],
    sites: [],
    first: Infinity,
    count: 0,
    repeats: "",
    isConditional: false,
  };
}

function finish(node: ModuleNode): void {
  node.children.forEach(finish);
  node.children.sort((a, b) => a.first - b.first);
  node.first = Math.min(...node.sites.map((site) => site.index), ...node.children.map((child) => child.first));
  node.count = node.sites.length + node.children.reduce((sum, child) => sum + child.count, 0);
  node.isConditional = node.sites.some((site) => site.conditional && !site.loops.includes("while"));
  const iterations = new Set(node.sites.filter((site) => site.iteration.length).map((site) => site.iteration.join()));
  const inLoop = node.sites.some((site) => site.loops.includes("while"));
  node.repeats = iterations.size > 1 ? `× ${iterations.size}` : inLoop ? "while" : "";
}

/** Open containers from the root on, level by level, as long as at most `limit` nodes are visible. */
export function openByDefault(root: ModuleNode, limit: number): Set<string> {
  const open = new Set<string>([""]);
  let visible = root.children.length;
  let level = root.children;
  while (level.length) {
    const next = level.filter((node) => node.children.length);
    const added = next.reduce((sum, node) => sum + node.children.length, 0);
    if (!next.length || visible + added > limit) break;
    next.forEach((node) => open.add(node.path));
    visible += added;
    level = next.flatMap((node) => node.children);
  }
  return open;
}

export function visibleNodes(root: ModuleNode, open: Set<string>): ModuleNode[] {
  return root.children.flatMap((node) => [node, ...(open.has(node.path) ? visibleNodes(node, open) : [])]);
}

/** The edges between visible nodes: data flow where it is known, else the order of the program among siblings. */
export function visibleEdges(root: ModuleNode, open: Set<string>, sites: Site[], edges: Edge[]): ModuleEdge[] {
  if (!edges.length) return orderEdges(root, open);
  const owner = new Map<number, ModuleNode>();
  const visit = (node: ModuleNode, shown: ModuleNode) => {
    node.sites.forEach((site) => owner.set(site.index, shown));
    node.children.forEach((child) => visit(child, open.has(node.path) ? child : shown));
  };
  root.children.forEach((child) => visit(child, child));
  const made = new Map<string, ModuleEdge>();
  for (const edge of edges) {
    const [from, to] = [owner.get(edge.from), owner.get(edge.to)];
    if (!from || !to || from === to || contains(from, to) || contains(to, from)) continue;
    const key = `${from.path}>${to.path}`;
    if (!made.has(key))
      made.set(key, { from, to, label: shapeLabel(edge.shape ?? sites[edge.from]!.shape), isOrder: false });
  }
  return [...made.values()];
}

function contains(outer: ModuleNode, inner: ModuleNode): boolean {
  return inner.path.startsWith(`${outer.path}/`);
}

function orderEdges(node: ModuleNode, open: Set<string>): ModuleEdge[] {
  const made: ModuleEdge[] = [];
  node.children.forEach((child, i) => {
    const next = node.children[i + 1];
    if (next) made.push({ from: child, to: next, label: shapeLabel(outputShape(child)), isOrder: true });
    if (open.has(child.path)) made.push(...orderEdges(child, open));
  });
  return made;
}

/** The shape of what a module returns: of its own site, or of the last one in it. */
export function outputShape(node: ModuleNode): number[] | null {
  const own =
    node.sites.find((site) => site.shape && !site.path.includes(":")) ?? node.sites.find((site) => site.shape);
  if (own) return own.shape;
  for (let i = node.children.length - 1; i >= 0; i--) {
    const shape = outputShape(node.children[i]!);
    if (shape) return shape;
  }
  return null;
}

function shapeLabel(shape: number[] | null): string {
  return shape ? shape.join(" × ") : "";
}
