/** The viewer as a page: an HTML file with an embedded document, or `normscope serve`. */

import { Doc } from "./data/doc.svelte";
import { embedded } from "./data/embedded";
import { HttpLab } from "./data/http";
import { expose } from "./measure";
import { show } from "./mount";
import { serve } from "./serve";

async function start(): Promise<void> {
  const target = document.getElementById("normscope") ?? document.body.appendChild(document.createElement("div"));
  target.replaceChildren();
  document.body.style.margin = "0";
  const { store } = show(target, document.head, true);
  expose(() => ({ ...store.view, phase: store.phase, busy: store.progress !== null, playing: store.playing, model: store.doc?.header.model.name ?? null }));
  try {
    const source = await embedded(document);
    if (source) {
      store.recall(location.hash);
      await store.show(await Doc.open(source));
    } else await serve(store, new HttpLab());
  } catch (error) {
    store.phase = "empty";
    store.fail(error);
  }
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => void start());
else void start();
