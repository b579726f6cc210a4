import { describe, expect, it, vi } from "vitest";
import { Doc } from "../src/data/doc.svelte";
import type { Lab, Request, Source } from "../src/data/source";
import { Store } from "../src/state/store.svelte";
import { header, side } from "./fake";

const request: Request = { model: "toy", text: "a b", second: null, target: null, generate: null, image: null, heads: false, flow: null };
const source = (layers: number[]): Source => {
  const one = header(side(["a", "b"], { layers }));
  return { header: async () => one, cells: async () => new Float32Array(4) };
};
const settled = () => new Promise((done) => setTimeout(done)); // all pending microtasks have run
const eventually = (check: () => void) => vi.waitFor(check, { timeout: 60_000 });

/** A store whose server returns the first of three layers and then waits. */
function waiting() {
  let finish = (): void => undefined;
  const lab: Lab = {
    models: async () => [],
    analyse: (_request, _on, signal, first) =>
      new Promise((done, fail) => {
        first?.(source([0]));
        finish = () => done(source([0, 1, 2]));
        signal.addEventListener("abort", () => fail(new DOMException("stopped", "AbortError")));
      }),
  };
  const store = new Store();
  store.lab = lab;
  return { store, finish: () => finish() };
}
const layers = (store: Store) => store.doc?.header.sides[0].layers ?? [];

describe("a long analysis", () => {
  it("shows its first layer early and keeps the view", async () => {
    const { store, finish } = waiting();
    const done = store.analyse(request);
    await eventually(() => expect(layers(store)).toEqual([0]));
    expect(store.progress).not.toBeNull();
    expect(store.asked.request.text).toBe("a b");
    store.change({ scope: "ATTNRESLN-N" });
    finish();
    await done;
    expect(layers(store)).toEqual([0, 1, 2]);
    expect(store.view.scope).toBe("ATTNRESLN-N");
    expect(store.progress).toBeNull();
  });
  it("adds layers as they are done, and keeps the maps that it has", async () => {
    const store = new Store();
    const asked: string[] = [];
    const part = (layers: number[]): Source => {
      const one = source(layers);
      return { ...one, cells: async (_side, scope, layer) => (asked.push(`${scope}|${layer}`), new Float32Array(4)) };
    };
    let more = (): void => undefined;
    let finish = (): void => undefined;
    store.lab = {
      models: async () => [],
      analyse: (_request, _on, _signal, first) =>
        new Promise((done) => {
          first?.(part([0]));
          more = () => first?.(part([0, 1]));
          finish = () => done(part([0, 1, 2]));
        }),
    };
    const done = store.analyse(request);
    await eventually(() => expect(layers(store)).toEqual([0]));
    more();
    await eventually(() => expect(layers(store)).toEqual([0, 1]));
    finish();
    await done;
    expect(layers(store)).toEqual([0, 1, 2]);
    const { scope } = store.view;
    expect(asked.filter((one) => one === `${scope}|0`).length).toBe(1);
  });
  it("keeps the layer given by the URL", async () => {
    const { store, finish } = waiting();
    store.change({ layer: 2 });
    const done = store.analyse(request);
    await settled();
    expect(store.doc).toBeNull();
    finish();
    await done;
    expect(store.view.layer).toBe(2);
  });
  it("keeps all layers on display if the input is the same", async () => {
    const { store, finish } = waiting();
    let done = store.analyse(request);
    finish();
    await done;
    done = store.analyse({ ...request, heads: true });
    await settled();
    expect(layers(store)).toEqual([0, 1, 2]);
    finish();
    await done;
    done = store.analyse({ ...request, text: "c d" });
    await eventually(() => expect(layers(store)).toEqual([0]));
    finish();
    await done;
  });
  it("shows the previous document when it is cancelled", async () => {
    const { store } = waiting();
    const done = store.analyse(request);
    await eventually(() => expect(layers(store)).toEqual([0]));
    store.cancel();
    await done;
    expect(layers(store)).toEqual([0]);
    expect(store.progress).toBeNull();
    expect(store.trouble).toBeNull();
  });
});

describe("the mixing ratio", () => {
  it("is that of the map on display, or none", async () => {
    const store = new Store();
    const one = header(side(["a", "b"], { heads: [0, 1], layers: [0] }));
    await store.show(await Doc.open({ header: async () => one, cells: async () => new Float32Array(8) }));
    store.change({ scope: "ATTN-N" });
    expect(store.mixingAt(store.main!)).toEqual([0.25, 0.25]);
    store.change({ head: 1 });
    expect(store.mixingAt(store.main!)).toBeUndefined();
    store.change({ head: null, against: "ATTNRES-N" });
    expect(store.mixingAt(store.main!)).toBeUndefined();
  });
});

describe("the side on display", () => {
  const open = (...sides: ReturnType<typeof side>[]) => {
    const one = header(...sides);
    return Doc.open({ header: async () => one, cells: async () => new Float32Array(4) });
  };
  it("is the decoder of a translation, also after a model with one side", async () => {
    const store = new Store();
    await store.show(await open(side(["a", "b"])));
    expect(store.view.band).toBe("encoder");
    await store.show(await open(side(["a", "b"], { side: "decoder" }), side(["a", "b"])));
    expect(store.view.band).toBe("decoder");
    store.change({ band: "encoder" });
    await store.show(await open(side(["a", "b"], { side: "decoder" }), side(["a", "b"])));
    expect(store.view.band).toBe("encoder"); // chosen
  });
});
