/** Keyboard shortcuts that work anywhere on the page. */

import type { Store } from "../state/store.svelte";

const TYPING = "input:not([type=checkbox]), textarea, select, [contenteditable], dialog";

export const KEYS: readonly [string, string][] = [
  ["← →", "previous and next scope"],
  ["↑ ↓", "previous and next layer"],
  ["space", "play or stop"],
  ["d", "difference from the previous scope"],
  ["h", "heads"],
  ["p", "path of a token through all layers"],
  ["n", "values: share of row, raw, share of column"],
  ["g", "diagonal: shown, hidden, own scale"],
  ["/", "go to the input"],
  ["shift + arrows", "move between the cells of the map or the tokens of the path"],
  ["enter", "select the token of the cell"],
  ["esc", "clear the selection"],
  ["?", "show this help"],
];

/** Give the focus to the map; if there is none, take it from the input. */
export function focusMap(from: HTMLElement): void {
  const map = from.closest(".normscope")?.querySelector<HTMLElement>("[data-map]");
  if (map) map.focus({ preventScroll: true });
  else from.blur();
}

/** Handle a key press. */
export function press(store: Store, event: KeyboardEvent, root: HTMLElement): void {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || store.dialog) return;
  const target = event.composedPath()[0];
  const at = target instanceof Element ? target : null;
  if (at?.closest(TYPING)) return;
  if (event.shiftKey && event.key.startsWith("Arrow")) return;
  const act = actionOf(store, event.key, at, root);
  if (!act) return;
  event.preventDefault();
  event.stopPropagation();
  act();
}

function actionOf(store: Store, key: string, at: Element | null, root: HTMLElement): (() => void) | null {
  if (key === "?") return () => (store.dialog = "help");
  if (key === "/") return () => root.querySelector<HTMLElement>("[data-input]")?.focus();
  if (!store.doc || store.explained) return null;
  switch (key) {
    case "ArrowLeft":
      return () => store.stepScope(-1);
    case "ArrowRight":
      return () => store.stepScope(1);
    case "ArrowUp":
      return () => store.stepLayer(-1);
    case "ArrowDown":
      return () => store.stepLayer(1);
    case " ": // the space bar activates a focused button or summary
      return at?.closest("button, input, summary, a") ? null : store.play;
    case "Escape":
      return () => store.change({ token: null, cell: null, head: null });
    default:
      return { d: store.toggleDifference, h: store.toggleHeads, p: store.togglePath, n: store.nextNorm, g: store.nextDiagonal }[key] ?? null;
  }
}
