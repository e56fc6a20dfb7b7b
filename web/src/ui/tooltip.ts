/** The one tooltip of the page: a few lines beside the pointer. */
import { append, clear, el } from "./dom";

export class Tooltip {
  readonly element = el("div", { class: "tooltip", role: "status", hidden: true });

  show(event: MouseEvent, lines: [string, string?][]): void {
    clear(this.element);
    append(
      this.element,
      lines.map(([text, kind]) => el("div", { class: kind ?? "" }, text)),
    );
    this.element.hidden = false;
    const host = (this.element.offsetParent ?? document.body).getBoundingClientRect();
    const box = this.element.getBoundingClientRect();
    const x = event.clientX - host.left + 14;
    const y = event.clientY - host.top + 14;
    this.element.style.left = `${Math.max(4, x + box.width > host.width - 4 ? x - box.width - 28 : x)}px`;
    this.element.style.top = `${Math.max(4, y + box.height > host.height - 4 ? y - box.height - 28 : y)}px`;
  }

  hide(): void {
    this.element.hidden = true;
  }
}
