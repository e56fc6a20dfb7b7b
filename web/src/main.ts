/** Where the page starts: in a document of its own, or as a widget in a notebook. */
import { App } from "./app";
import { openDocument, openServer, openWidget, type Payload, type WidgetModel } from "./payload/hosts";

declare global {
  interface HTMLElement {
    tapaxPage?: App;
  }
}

function show(element: HTMLElement, address: { hash: string } | null, open: () => Promise<Payload>): void {
  const app = new App(element, address);
  element.tapaxPage = app;
  open()
    .then((payload) => app.start(payload))
    .catch((error: unknown) => app.fail(error));
}

/** The entry point of anywidget. */
export function render({ model, el }: { model: WidgetModel; el: HTMLElement }): void {
  const element = document.createElement("div");
  element.style.height = `${(model.get("height") as number | undefined) ?? 640}px`;
  el.append(element);
  show(element, null, () => Promise.resolve().then(() => openWidget(model)));
}

const own = typeof document === "undefined" ? null : document.getElementById("tapax-page");
if (own) {
  own.style.height = "100vh";
  const token = new URLSearchParams(location.search).get("token");
  show(own, location, () => (document.getElementById("tapax-header") ? openDocument() : openServer(token ?? "")));
}
