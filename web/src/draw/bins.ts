/** The bins of histograms: their labels, and how the elements are shared out among them. */

/** The share of the elements of each line in each bin, the highest bin first. */
export function shareOf(lines: { counts: Float32Array }[]): Float32Array {
  const bins = lines[0]!.counts.length;
  const shares = new Float32Array(bins * lines.length);
  lines.forEach(({ counts }, x) => {
    const total = counts.reduce((sum, count) => sum + count, 0) || 1;
    for (let bin = 0; bin < Math.min(bins, counts.length); bin++)
      shares[(bins - 1 - bin) * lines.length + x] = counts[bin]! / total;
  });
  return shares;
}

export function clamp(x: number): number {
  return x < 0 ? 0 : x > 1 ? 1 : x;
}

/** A power of two as such: 2⁻¹². */
export function powerOfTwo(x: number): string {
  const digits = "⁰¹²³⁴⁵⁶⁷⁸⁹";
  const exponent = Math.round(Math.log2(Math.abs(x)));
  const text = String(Math.abs(exponent)).replace(/\d/g, (digit) => digits[Number(digit)]!);
  return x === 0 ? "0" : `${x < 0 ? "−" : ""}2${exponent < 0 ? "⁻" : ""}${text}`;
}

export function signedLog2(x: number): number {
  return Math.log2(Math.abs(x));
}

/** Whether edges are powers of two, infinities and zero apart: the bins of a log2 histogram. */
export function isGeometric(edges: Float64Array): boolean {
  const finite = [...edges].filter((edge) => Number.isFinite(edge) && edge !== 0);
  return finite.length > 2 && finite.every((edge) => Math.abs(Math.log2(Math.abs(edge)) % 1) < 1e-9);
}

/** The edges of all lines, in order, each once. */
export function mergeEdges(lines: { edges: Float64Array }[]): Float64Array {
  return Float64Array.from(new Set(lines.flatMap(({ edges }) => [...edges]))).sort();
}
