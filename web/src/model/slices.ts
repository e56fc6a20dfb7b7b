/** Slices of arrays in C order, and statistics along their axes. */

export interface Slice {
  rows: number;
  columns: number;
  numbers: Float32Array;
}

function strides(shape: number[]): number[] {
  const made = new Array<number>(shape.length).fill(1);
  for (let axis = shape.length - 2; axis >= 0; axis--) made[axis] = made[axis + 1]! * shape[axis + 1]!;
  return made;
}

/** Two axes of an array, with the others at fixed indices; an axis of -1 has one element. */
export function takeSlice(
  numbers: Float32Array,
  shape: number[],
  indices: number[],
  down: number,
  across: number,
): Slice {
  const steps = strides(shape);
  const rows = down < 0 ? 1 : shape[down]!;
  const columns = across < 0 ? 1 : shape[across]!;
  let base = 0;
  shape.forEach((_, axis) => {
    if (axis !== down && axis !== across) base += indices[axis]! * steps[axis]!;
  });
  const made = new Float32Array(rows * columns);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      made[row * columns + column] =
        numbers[base + (down < 0 ? 0 : row * steps[down]!) + (across < 0 ? 0 : column * steps[across]!)]!;
    }
  }
  return { rows, columns, numbers: made };
}

/** The root mean square of all elements at each index of an axis. */
export function axisStatistics(numbers: Float32Array, shape: number[], axis: number): Float64Array {
  const step = strides(shape)[axis]!;
  const n = shape[axis]!;
  const sums = new Float64Array(n);
  for (let i = 0; i < numbers.length; i++) sums[Math.floor(i / step) % n]! += numbers[i]! * numbers[i]!;
  return sums.map((sum) => Math.sqrt((sum * n) / Math.max(1, numbers.length)));
}
