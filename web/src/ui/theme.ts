/** The colours of the page itself, for CSS and canvases alike. */
import type { ThemeName } from "../draw/colour";

export interface Theme {
  name: ThemeName;
  background: string;
  panel: string;
  raised: string;
  ink: string;
  muted: string;
  faint: string;
  line: string;
  accent: string;
  accentSoft: string;
  bad: string;
  warning: string;
}

export const THEMES: Record<ThemeName, Theme> = {
  light: {
    name: "light",
    background: "#f6f6f4",
    panel: "#ffffff",
    raised: "#ffffff",
    ink: "#1c1d20",
    muted: "#62666d",
    faint: "#9a9ea5",
    line: "#e4e4e0",
    accent: "#2f5fd0",
    accentSoft: "#e8eefc",
    bad: "#c2136d",
    warning: "#a85a00",
  },
  dark: {
    name: "dark",
    background: "#121315",
    panel: "#191b1e",
    raised: "#22252a",
    ink: "#e6e6e3",
    muted: "#9aa0a8",
    faint: "#6d737b",
    line: "#2b2e33",
    accent: "#86a9ff",
    accentSoft: "#232d47",
    bad: "#ff5aac",
    warning: "#f0a95a",
  },
};

export function applyTheme(root: HTMLElement, theme: Theme): void {
  root.dataset.theme = theme.name;
  for (const [name, value] of Object.entries(theme)) {
    if (name !== "name") root.style.setProperty(`--${name.replace(/[A-Z]/g, (c) => `-${c.toLowerCase()}`)}`, value);
  }
  root.style.colorScheme = theme.name;
}
