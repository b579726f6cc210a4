/** A document and the maps loaded so far. Reading a map that is not loaded yet requests it. */

import { SvelteMap } from "svelte/reactivity";
import { headScopes, type Header, type Side } from "./header";
import type { Source } from "./source";

const SLICE = 8; // milliseconds of decoding before yielding to the page
const SMALL = 1_000_000; // cells
let made = 0;

interface Wanted {
  key: string;
  side: string;
  scope: string;
  layer: number;
}

export class Doc {
  readonly id = ++made;
  failure = $state<string | null>(null);
  loaded = $state(0); // number of maps loaded
  private tries = $state(0);
  private readonly maps = new SvelteMap<string, Float32Array>();
  private readonly asked = new Set<string>();
  private readonly queue: Wanted[] = [];
  private running = 0;
  private held = true; // until the first map is drawn, only urgent maps are loaded

  constructor(
    readonly header: Header,
    private readonly source: Source,
    readonly growing = false, // the server is still computing other layers
  ) {}

  /** `before`: the same document with fewer layers, whose maps are kept. */
  static async open(source: Source, growing = false, before: Doc | null = null): Promise<Doc> {
    const doc = new Doc(await source.header(), source, growing);
    before?.maps.forEach((cells, key) => doc.maps.set(key, cells));
    doc.maps.forEach((_, key) => doc.asked.add(key));
    doc.loaded = doc.maps.size;
    return doc;
  }

  /** The cells of a map, rows x columns; undefined until loaded. `urgent` maps are loaded first. */
  map(side: Side, scope: string, layer: number, urgent = false): Float32Array | undefined {
    const key = `${side.side}|${scope}|${layer}`;
    void this.tries; // makes readers depend on it, so that retry() requests the map again
    const found = this.maps.get(key);
    if (!found) this.ask({ key, side: side.side, scope, layer }, urgent);
    return found;
  }

  /** One head's map; `place` is its index among the heads of this document. */
  head(side: Side, scope: string, layer: number, place: number, urgent = false): Float32Array | undefined {
    if (!headScopes(side).includes(scope)) return undefined;
    const all = this.map(side, `heads/${scope}`, layer, urgent);
    const size = side.rows.length * side.columns.length;
    return all?.subarray(place * size, (place + 1) * size);
  }

  /** Load a map before it is read. */
  async load(side: Side, scope: string, layer: number): Promise<void> {
    const key = `${side.side}|${scope}|${layer}`;
    if (this.maps.has(key)) return;
    this.asked.add(key);
    this.put(key, await this.source.cells(side.side, scope, layer));
  }

  /** Load all maps of a small document, so that they are there when it is printed. */
  prefetch(): void {
    const { sides } = this.header;
    const cells = sides.reduce((sum, side) => sum + side.scopes.length * side.layers.length * side.rows.length * side.columns.length, 0);
    if (cells > SMALL || this.growing) return;
    for (const side of sides) for (const scope of side.scopes) for (const layer of side.layers) this.map(side, scope, layer);
  }

  /** Request again what failed to load. */
  retry(): void {
    this.failure = null;
    this.tries++;
  }

  private put(key: string, cells: Float32Array): void {
    this.maps.set(key, cells);
    this.loaded++;
  }

  private ask(wanted: Wanted, urgent: boolean): void {
    if (this.asked.has(wanted.key)) {
      const place = urgent ? this.queue.findIndex((one) => one.key === wanted.key) : -1;
      if (place < 0) return; // already being loaded
      this.queue.splice(place, 1);
    }
    this.asked.add(wanted.key);
    if (urgent) this.queue.unshift(wanted);
    else this.queue.push(wanted);
    if (this.running < 3 && (urgent || !this.held)) void this.work();
  }

  /** The first map is drawn: load the others. */
  release(): void {
    if (!this.held) return;
    this.held = false;
    if (this.queue.length) void this.work();
  }

  /** Work through the queue. */
  private async work(): Promise<void> {
    this.running++;
    await Promise.resolve(); // never change state inside a $derived computation
    let start = performance.now();
    for (let next = this.queue.shift(); next; next = this.queue.shift()) {
      try {
        this.put(next.key, await this.source.cells(next.side, next.scope, next.layer));
      } catch (error) {
        this.asked.delete(next.key);
        this.failure = error instanceof Error ? error.message : String(error);
      }
      if (performance.now() - start > SLICE) {
        await new Promise((done) => setTimeout(done));
        start = performance.now();
      }
    }
    this.running--;
  }
}
