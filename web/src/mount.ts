/** Mount a viewer in an element. */

import { mount, unmount } from "svelte";
import style from "./look/base.css?inline";
import { Store } from "./state/store.svelte";
import App from "./ui/App.svelte";

export interface Mounted {
  store: Store;
  remove(): void;
}

/** Styles go into `root`: the document head or a shadow root. `whole`: the viewer fills the page. */
export function show(target: HTMLElement, root: HTMLElement | ShadowRoot, whole: boolean): Mounted {
  const sheet = document.createElement("style");
  sheet.textContent = style;
  root.append(sheet);
  const store = new Store();
  const app = mount(App, { target, props: { store, whole } });
  return {
    store,
    remove() {
      store.pause();
      store.cancel();
      void unmount(app);
      sheet.remove();
    },
  };
}
