/** Small controls of the toolbars. */
import { el } from "./dom";

export interface Option {
  value: string;
  label: string;
  group?: string;
}

export function select(
  label: string,
  options: Option[],
  value: string,
  onChange: (value: string) => void,
): HTMLElement {
  const list = el("select", { "aria-label": label, onchange: () => onChange(list.value) });
  const groups = new Map<string, HTMLElement>();
  for (const option of options) {
    let parent: HTMLElement = list;
    if (option.group) {
      parent = groups.get(option.group) ?? el("optgroup", { label: option.group });
      groups.set(option.group, parent);
      list.append(parent);
    }
    parent.append(el("option", { value: option.value, selected: option.value === value }, option.label));
  }
  list.value = value;
  return el("label", { class: "control" }, el("span", { class: "control-label" }, label), list);
}

export function segmented(
  label: string,
  options: Option[],
  value: string,
  onChange: (value: string) => void,
): HTMLElement {
  const buttons = options.map((option) =>
    el(
      "button",
      { type: "button", "aria-pressed": String(option.value === value), onclick: () => onChange(option.value) },
      option.label,
    ),
  );
  return el(
    "div",
    { class: "control" },
    el("span", { class: "control-label" }, label),
    el("div", { class: "segmented", role: "group", "aria-label": label }, ...buttons),
  );
}

export function slider(
  label: string,
  value: number,
  maximum: number,
  text: string,
  onInput: (value: number) => void,
): HTMLElement {
  const input = el("input", {
    type: "range",
    min: 0,
    max: maximum,
    value,
    "aria-label": label,
    oninput: () => onInput(Number(input.value)),
  });
  return el(
    "label",
    { class: "control" },
    el("span", { class: "control-label" }, label),
    input,
    el("output", {}, text),
  );
}

/** What a view shows when there is nothing to show: why, and how to get it. */
export function emptyState(title: string, text: string, code = ""): HTMLElement {
  return el("div", { class: "empty" }, el("h2", {}, title), el("p", {}, text), code ? el("pre", {}, code) : null);
}
