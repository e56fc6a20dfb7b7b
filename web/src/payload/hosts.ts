/** The three hosts of the page: a saved file, the local server, a notebook. */
import { type BlobSource, decodeBase64, inflate } from "./blobs";
import { FORMAT, type Header, type Update, VERSION } from "./types";

export interface Payload {
  header: Header;
  blobs: BlobSource;
  /** Calls back with every update of a run that is followed; absent for a saved file. */
  follow?(onUpdate: (update: Update) => void, onState: (state: "live" | "lost") => void): void;
}

export function checkHeader(header: Header): Header {
  if (header.format !== FORMAT) throw new Error("This is not a payload of tapax.");
  if (header.version !== VERSION) {
    throw new Error(
      `The payload has version ${header.version} of the format, but this page reads version ${VERSION}. ` +
        "Use the version of tapax that made it.",
    );
  }
  return header;
}

/** The number of the last update that a header has in it. */
function revisionOf(header: Header): number {
  return Math.max(0, ...header.subjects.map((subject) => subject.revision ?? 0));
}

function isFollowed(header: Header): boolean {
  return header.subjects.some((subject) => subject.revision !== undefined);
}

/** Blobs that are elements of the document, which may still be loading. */
class DocumentBlobs implements BlobSource {
  async read(blob: number): Promise<Uint8Array> {
    return decodeBase64(await this.text(`tapax-blob-${blob}`));
  }

  async text(id: string): Promise<string> {
    for (;;) {
      const element = document.getElementById(id);
      // The parser may be in the middle of an element; its text is whole once something follows.
      if (element && (document.readyState !== "loading" || element.nextSibling)) return element.textContent ?? "";
      if (document.readyState !== "loading") throw new Error(`The file is not complete: ${id} is missing.`);
      await new Promise((resolve) => setTimeout(resolve, 30));
    }
  }
}

export async function openDocument(): Promise<Payload> {
  const blobs = new DocumentBlobs();
  const bytes = await inflate(decodeBase64(await blobs.text("tapax-header")));
  return { header: checkHeader(JSON.parse(new TextDecoder().decode(bytes))), blobs };
}

/** The local server: `header`, `blob/N` and `updates` under the address of the page, each with its token. */
export async function openServer(token: string): Promise<Payload> {
  const get = async (path: string): Promise<Response> => {
    const response = await fetch(`${path}?token=${encodeURIComponent(token)}`, { cache: "no-store" });
    if (!response.ok) throw new Error(`The server answered ${response.status} for ${path}. It may have been stopped.`);
    return response;
  };
  const header = checkHeader(await (await get("header")).json());
  const blobs = { read: async (blob: number) => new Uint8Array(await (await get(`blob/${blob}`)).arrayBuffer()) };
  return {
    header,
    blobs,
    follow(onUpdate, onState) {
      // A page that is not followed listens too: the server goes on while someone listens.
      const events = new EventSource(`updates?token=${encodeURIComponent(token)}&after=${revisionOf(header)}`);
      events.onopen = () => {
        if (isFollowed(header)) onState("live");
      };
      events.onerror = () => onState("lost");
      events.onmessage = (event) => onUpdate(JSON.parse(event.data) as Update);
      events.addEventListener("reload", () => location.reload());
    },
  };
}

function bytesOf({ buffer, byteOffset, byteLength }: DataView): Uint8Array {
  return new Uint8Array(buffer as ArrayBuffer, byteOffset, byteLength);
}

/** What the page uses of the model of an anywidget. */
export interface WidgetModel {
  get(name: string): unknown;
  send(content: unknown): void;
  on(event: string, callback: (content: unknown, buffers?: DataView[]) => void): void;
}

/**
 * A notebook: the header and the blobs of the first view are traits, other blobs and updates come as messages. Messages
 * go to every view of the widget, so a view takes the next update alone, and asks for those that it missed.
 */
export function openWidget(model: WidgetModel): Payload {
  const header = checkHeader(JSON.parse(model.get("header") as string) as Header);
  const known = new Map<number, Uint8Array>();
  for (const [blob, content] of Object.entries((model.get("blobs") ?? {}) as Record<string, DataView>))
    known.set(Number(blob), bytesOf(content));
  const waiting = new Map<number, ((bytes: Uint8Array) => void)[]>();
  const listeners: ((update: Update) => void)[] = [];
  model.on("msg:custom", (content, buffers) => {
    const message = content as { kind: string; blob?: number; update?: Update; blobs?: number[] };
    if (message.kind === "blob" && message.blob !== undefined && buffers?.[0]) {
      const bytes = bytesOf(buffers[0]);
      waiting.get(message.blob)?.forEach((resolve) => resolve(bytes));
      waiting.delete(message.blob);
    } else if (message.kind === "update" && message.update) {
      message.blobs?.forEach((blob, i) => known.set(blob, bytesOf(buffers![i]!)));
      listeners.forEach((listener) => listener(message.update!));
    }
  });
  const read = (blob: number): Promise<Uint8Array> => {
    const bytes = known.get(blob);
    if (bytes) return Promise.resolve(bytes);
    return new Promise((resolve) => {
      const others = waiting.get(blob);
      if (others) others.push(resolve);
      else {
        waiting.set(blob, [resolve]);
        model.send({ kind: "blob", blob });
      }
    });
  };
  return {
    header,
    blobs: { read },
    follow(onUpdate, onState) {
      if (!isFollowed(header)) return;
      let revision = revisionOf(header);
      listeners.push((update) => {
        if (update.revision === revision + 1) {
          revision += 1;
          onUpdate(update);
        } else if (update.revision > revision) model.send({ kind: "follow", after: revision });
      });
      model.send({ kind: "follow", after: revision });
      onState("live");
    },
  };
}
