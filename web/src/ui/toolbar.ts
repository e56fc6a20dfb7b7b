/**
 * A row of controls that is made anew with every drawing, but touches the document only where something has changed: a
 * list that is open stays open while a run is followed, and a slider stays under the pointer that drags it.
 */
import { el } from "./dom";

export class Toolbar {
  readonly element: HTMLElement;
  private next: HTMLElement[] = [];
  private shown = "";
  private isPending = false;

  constructor(name = "toolbar") {
    this.element = el("div", { class: name });
  }

  clear(): void {
    this.next = [];
    this.commitLater();
  }

  append(...controls: HTMLElement[]): void {
    this.next.push(...controls);
    this.commitLater();
  }

  private commitLater(): void {
    if (this.isPending) return;
    this.isPending = true;
    queueMicrotask(() => {
      this.isPending = false;
      this.commit();
    });
  }

  private commit(): void {
    const made = el("div", {}, ...this.next);
    const signature = signatureOf(made);
    if (signature !== this.shown || !this.element.childElementCount) {
      this.element.replaceChildren(...made.childNodes);
      this.shown = signature;
      return;
    }
    const values = made.querySelectorAll<HTMLInputElement>("input[type=range]");
    this.element
      .querySelectorAll<HTMLInputElement>("input[type=range]")
      .forEach((slider, i) => (slider.value = values[i]!.value));
    const texts = made.querySelectorAll("output");
    this.element.querySelectorAll("output").forEach((output, i) => (output.textContent = texts[i]!.textContent));
  }
}

/** The controls without the values of sliders, which are set in place. */
function signatureOf(controls: HTMLElement): string {
  const copy = controls.cloneNode(true) as HTMLElement;
  copy.querySelectorAll("input[type=range]").forEach((slider) => slider.removeAttribute("value"));
  copy.querySelectorAll("output").forEach((output) => (output.textContent = ""));
  return new XMLSerializer().serializeToString(copy);
}
