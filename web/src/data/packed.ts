/** A document whose arrays are stored one after the other in a single byte array. */

import { checked, headScopes, type Header, type Side } from "./header";
import { decode, log16Table } from "./log16";
import type { Source } from "./source";

/** The offset of each array, in cells: by side, scope and layer, followed by the head-level maps of each side. */
export function places(header: Header): { at: Map<string, number>; total: number } {
  const at = new Map<string, number>();
  let total = 0;
  const put = (side: Side, scope: string, maps: number) => {
    for (const layer of side.layers) {
      at.set(`${side.side}|${scope}|${layer}`, total);
      total += maps * side.rows.length * side.columns.length;
    }
  };
  for (const side of header.sides) for (const scope of side.scopes) put(side, scope, 1);
  for (const side of header.sides) for (const scope of headScopes(side)) put(side, `heads/${scope}`, side.heads.length);
  return { at, total };
}

export class PackedSource implements Source {
  private readonly known: Header;
  private readonly at: Map<string, number>;
  private readonly tables = new Map<string, Float32Array>();

  constructor(
    header: unknown,
    private readonly bytes: Uint8Array,
  ) {
    this.known = checked(header);
    const { at, total } = places(this.known);
    const width = this.known.encoding === "log16" ? 2 : 4;
    if (bytes.length !== width * total)
      throw new Error(`The maps of this document are truncated: ${bytes.length} of ${width * total} bytes.`);
    this.at = at;
  }

  header(): Promise<Header> {
    return Promise.resolve(this.known);
  }

  cells(sideName: string, scope: string, layer: number): Promise<Float32Array> {
    const side = this.known.sides.find((one) => one.side === sideName);
    const start = this.at.get(`${sideName}|${scope}|${layer}`);
    if (!side || start === undefined)
      return Promise.reject(new Error(`This document has no map of ${scope}, layer ${layer + 1}.`));
    const count = side.rows.length * side.columns.length * (scope.startsWith("heads/") ? side.heads.length : 1);
    if (this.known.encoding === "log16")
      return Promise.resolve(decode(this.bytes, 2 * start, count, this.table(side, scope)));
    const from = this.bytes.byteOffset + 4 * start;
    return Promise.resolve(new Float32Array(this.bytes.buffer.slice(from, from + 4 * count) as ArrayBuffer));
  }

  private table(side: Side, scope: string): Float32Array {
    const key = `${side.side}|${scope}`;
    let table = this.tables.get(key);
    if (!table) {
      const range = side.ranges?.[scope] ?? side.ranges?.[scope.replace("heads/", "")] ?? [0, 0];
      this.tables.set(key, (table = log16Table(...range)));
    }
    return table;
  }
}
