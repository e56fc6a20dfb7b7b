/** The modules of a program as a tree, from the paths of its sites; iterations and calls of one module are one node. */
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
