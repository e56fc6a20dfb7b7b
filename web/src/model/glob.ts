/**
 * Selections of sites by globs, with the meaning they have in `tapax.capture`: `*` stays inside one segment, `**` spans
 * any number of them, `?` is one character. A pattern without `@` stands for every call, one without `:` for every leaf.
 * Several patterns, with commas or spaces between them, pick what any of them picks; `~pattern` leaves sites out.
 */

export interface NamedSite {
  name: string;
  path: string;
  call: number;
  pullback: number;
}

const PARTS: Record<string, string> = { "**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]" };

function compile(pattern: string): RegExp {
  const parts = pattern.split(/(\*\*\/|\/\*\*|\*\*|\*|\?)/);
  const source = parts.map((part) => PARTS[part] ?? part.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&")).join("");
  return new RegExp(`^(?:${source})$`, "s");
}

/** The parts of a site's name that a pattern mentions. */
function subject(pattern: string, site: NamedSite): string {
  const path = pattern.includes(":") ? site.path : site.path.split(":", 1)[0]!;
  return path + (pattern.includes("@") ? `@${site.call}` : "") + (pattern.includes("~") ? `~${site.pullback}` : "");
}

export function compileSelection(text: string): (site: NamedSite) => boolean {
  const patterns = text.split(/[\s,]+/).filter(Boolean);
  const make = (pattern: string) => {
    const regex = compile(pattern);
    return (site: NamedSite) => pattern === site.name || regex.test(subject(pattern, site)) || regex.test(site.name);
  };
  const wanted = patterns.filter((p) => !p.startsWith("~")).map(make);
  const unwanted = patterns.filter((p) => p.startsWith("~") && p.length > 1).map((p) => make(p.slice(1)));
  return (site) =>
    (wanted.length === 0 || wanted.some((picks) => picks(site))) && !unwanted.some((picks) => picks(site));
}
