/** The viewer in a notebook, as an anywidget module. */

import { Doc } from "./data/doc.svelte";
import { inflate } from "./data/embedded";
import { PackedSource } from "./data/packed";
import { show } from "./mount";

interface Model {
  get(name: string): unknown;
  on(event: string, call: () => void): void;
  off(event: string, call: () => void): void;
}

/** The bytes of a trait, which notebooks pass as a DataView or an ArrayBuffer. */
function bytesOf(value: unknown): Uint8Array<ArrayBuffer> {
  if (value instanceof ArrayBuffer) return new Uint8Array(value);
  const view = value as DataView<ArrayBuffer>;
  return new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const host = document.createElement("div");
  host.dataset.lmSuppressShortcuts = "true"; // the viewer handles keys while it has the focus
  el.append(host);
  const root = host.attachShadow({ mode: "open" });
  const target = document.createElement("div");
  root.append(target);
  const { store, remove } = show(target, root, false);
  const read = async () => {
    try {
      const bytes = await inflate(bytesOf(model.get("data")));
      await store.show(await Doc.open(new PackedSource(model.get("header"), bytes)));
    } catch (error) {
      store.phase = "empty";
      store.fail(error);
    }
  };
  const again = () => void read();
  model.on("change:data", again);
  again();
  return () => {
    model.off("change:data", again);
    remove();
  };
}

export default { render };
