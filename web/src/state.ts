/** What the page shows, kept in the address so that a view can be sent to a colleague. */

export interface State {
  view: string;
  run: number;
  /** The run that the first one is compared with. */
  other: number;
  site: string;
  stat: string;
  scale: string;
  filter: string;
  step: number | null;
  theme: "auto" | "light" | "dark";
  /** What one view alone keeps, by its own names. */
  more: Record<string, string>;
}

const PLAIN: State = {
  view: "",
  run: 0,
  other: -1,
  site: "",
  stat: "",
  scale: "",
  filter: "",
  step: null,
  theme: "auto",
  more: {},
};

export function readAddress(hash: string): State {
  const state: State = { ...PLAIN, more: {} };
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (name === "run" || name === "other") state[name] = Number.parseInt(value, 10) || 0;
    else if (name === "step") state.step = Number.isFinite(Number(value)) ? Number(value) : null;
    else if (name === "theme") state.theme = value === "light" || value === "dark" ? value : "auto";
    else if (name === "view" || name === "site" || name === "stat" || name === "scale" || name === "filter")
      state[name] = value;
    else state.more[name] = value;
  }
  return state;
}

export function writeAddress(state: State): string {
  const made = new URLSearchParams();
  for (const name of ["view", "run", "other", "site", "stat", "scale", "filter", "step", "theme"] as const) {
    const value = state[name];
    if (value !== PLAIN[name] && value !== null) made.set(name, String(value));
  }
  for (const [name, value] of Object.entries(state.more)) if (value) made.set(name, value);
  return `#${made}`;
}

export type Change = Partial<Omit<State, "more">> & { more?: Record<string, string> };

export class Store {
  state: State;
  private readonly listeners: ((state: State, before: State) => void)[] = [];

  /** `address` is the document's, or null where the page is a guest in another: a notebook. */
  constructor(private readonly address: { hash: string } | null) {
    this.state = readAddress(address?.hash ?? "");
    if (address) globalThis.addEventListener?.("hashchange", () => this.take(readAddress(address.hash)));
  }

  set(change: Change): void {
    const more = { ...this.state.more, ...change.more };
    this.take({ ...this.state, ...change, more });
    if (this.address) {
      const hash = writeAddress(this.state);
      if (hash !== this.address.hash) history.replaceState(null, "", hash);
    }
  }

  onChange(listener: (state: State, before: State) => void): void {
    this.listeners.push(listener);
  }

  private take(state: State): void {
    const before = this.state;
    if (JSON.stringify(before) === JSON.stringify(state)) return;
    this.state = state;
    for (const listener of this.listeners) listener(state, before);
  }
}
