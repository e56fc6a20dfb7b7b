/** A series in the height of a line of text. */
import { MISSING } from "../payload/types";
import type { Scale } from "./scale";

export function drawSparkline(
  graphics: CanvasRenderingContext2D,
  numbers: Float32Array,
  scale: Scale,
  colour: string,
  bad: string,
  x: number,
  y: number,
  width: number,
  height: number,
): void {
  graphics.strokeStyle = colour;
  graphics.lineWidth = 1.2;
  graphics.lineJoin = "round";
  graphics.beginPath();
  let isOpen = false;
  const bads: number[] = [];
  const count = numbers.length;
  for (let i = 0; i < count; i++) {
    const number = numbers[i]!;
    const px = count === 1 ? x + width / 2 : x + (i / (count - 1)) * width;
    if (number === MISSING || !Number.isFinite(number)) {
      if (number !== MISSING) bads.push(px);
      isOpen = false;
      continue;
    }
    const py = y + height - scale.place(number) * height;
    if (isOpen) graphics.lineTo(px, py);
    else graphics.moveTo(px, py);
    isOpen = true;
  }
  graphics.stroke();
  graphics.fillStyle = bad;
  for (const px of bads) graphics.fillRect(px - 1, y, 2, height);
}
