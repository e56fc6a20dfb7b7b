/** Where the sites of one capture go in a grid of layers by roles. Sites outside of all layers have rows of their own. */
import type { Site } from "./subject";

export interface GridRow {
  label: string;
  /** The sites in the row by column; those outside of layers are in a column of their own, the first. */
  cells: Map<number, Site[]>;
  isOutside: boolean;
}

export interface LayerGrid {
  columns: string[];
  rows: GridRow[];
}

export function layOutLayers(sites: Site[]): LayerGrid {
  const outside = sites.some((site) => !site.depth.length);
  const columns = new Map<string, number>(outside ? [["", 0]] : []);
  const rows = new Map<string, GridRow>();
  for (const site of sites) {
    if (!site.depth.length) {
      rows.set(`site ${site.name}`, { label: site.name, cells: new Map([[0, [site]]]), isOutside: true });
      continue;
    }
    const label = `${site.stack}/${site.depth.join("/")}`;
    const row = rows.get(label) ?? { label, cells: new Map<number, Site[]>(), isOutside: false };
    rows.set(label, row);
    const role = site.role;
    if (!columns.has(role)) columns.set(role, columns.size);
    const column = columns.get(role)!;
    row.cells.set(column, [...(row.cells.get(column) ?? []), site]);
  }
  return { columns: [...columns.keys()], rows: orderRows([...rows.values()]) };
}

/** Layers of one stack stay together where the first of them was. */
function orderRows(rows: GridRow[]): GridRow[] {
  const before: GridRow[] = [];
  const layers: GridRow[] = [];
  const after: GridRow[] = [];
  for (const row of rows) {
    if (!row.isOutside) layers.push(row);
    else if (layers.length) after.push(row);
    else before.push(row);
  }
  return [...before, ...layers, ...after];
}
