/** Blobs and the columns in them: reading, inflating, typing. */
import type { Column } from "./types";

/** Where the blobs of a payload come from: the document, a server or a notebook. */
export interface BlobSource {
  /** The bytes of a blob, still compressed. */
  read(blob: number): Promise<Uint8Array>;
}

export async function inflate(bytes: Uint8Array): Promise<Uint8Array> {
  const stream = new Blob([bytes as BlobPart]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

export function decodeBase64(text: string): Uint8Array {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

const SIZES = { f32: 4, f64: 8, i32: 4, u8: 1, utf8: 1 };
const KEPT_BLOBS = 8;

export class BlobReader {
  /** The last blobs that several columns share, inflated. */
  private readonly shared = new Map<number, Promise<Uint8Array>>();

  constructor(private readonly source: BlobSource) {}

  async bytes(blob: number): Promise<Uint8Array> {
    return inflate(await this.source.read(blob));
  }

  async floats(column: Column): Promise<Float32Array> {
    const bytes = await this.checked(column, "f32");
    return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 4);
  }

  async doubles(column: Column): Promise<Float64Array> {
    const bytes = await this.checked(column, "f64");
    return new Float64Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 8);
  }

  async integers(column: Column): Promise<Int32Array> {
    const bytes = await this.checked(column, "i32");
    return new Int32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 4);
  }

  async text(column: Column): Promise<string> {
    return new TextDecoder().decode(await this.checked(column, "utf8"));
  }

  private async checked(column: Column, dtype: Column["dtype"]): Promise<Uint8Array> {
    if (column.dtype !== dtype)
      throw new Error(`Blob ${column.blob} holds ${column.dtype}, but ${dtype} was expected.`);
    const size = SIZES[dtype];
    const wanted = size * column.shape.reduce((product, n) => product * n, 1);
    const start = size * (column.offset ?? 0);
    const bytes = await (column.offset === undefined ? this.bytes(column.blob) : this.sharedBytes(column.blob));
    const isWhole = column.offset === undefined ? bytes.byteLength === wanted : bytes.byteLength >= start + wanted;
    if (!isWhole)
      throw new Error(`Blob ${column.blob} has ${bytes.byteLength} bytes, but ${start + wanted} were expected.`);
    return column.offset === undefined ? bytes : bytes.slice(start, start + wanted);
  }

  private sharedBytes(blob: number): Promise<Uint8Array> {
    let bytes = this.shared.get(blob);
    if (!bytes) {
      bytes = this.bytes(blob);
      this.shared.set(blob, bytes);
      if (this.shared.size > KEPT_BLOBS) this.shared.delete(this.shared.keys().next().value!);
    }
    return bytes;
  }
}
