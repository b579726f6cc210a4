/** The document embedded in an HTML file. */

import { PackedSource } from "./packed";

export function bytesOfBase64(text: string): Uint8Array<ArrayBuffer> {
  const { fromBase64 } = Uint8Array as { fromBase64?: (text: string) => Uint8Array<ArrayBuffer> };
  if (fromBase64) return fromBase64.call(Uint8Array, text); // much faster where supported
  const binary = atob(text.trim());
  const bytes = new Uint8Array(binary.length);
  for (let k = 0; k < binary.length; k++) bytes[k] = binary.charCodeAt(k);
  return bytes;
}

export async function inflate(bytes: Uint8Array<ArrayBuffer>): Promise<Uint8Array> {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The document embedded in this page; null if there is none. */
export async function embedded(page: Document): Promise<PackedSource | null> {
  const header = page.getElementById("normscope-header");
  const data = page.getElementById("normscope-data");
  if (!header || !data) return null;
  return new PackedSource(JSON.parse(header.textContent ?? ""), await inflate(bytesOfBase64(data.textContent ?? "")));
}
