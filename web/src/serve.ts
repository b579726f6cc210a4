/** The viewer of `normscope serve`: a list of models, and the analysis given by the URL fragment. */

import type { ExplanationRequest } from "./data/explanation";
import { sameInput, type Lab, type ModelInfo, type Request } from "./data/source";
import { fromFragment } from "./state/address";
import type { Store } from "./state/store.svelte";

export const EXAMPLE = "Colin Fleming played the highway tiny soap opera.";

/** A complete request: missing fields get their defaults. */
export const requestOf = (part: Partial<Request>, models: readonly ModelInfo[]): Request => ({
  model: models.find((one) => one.name === part.model)?.name ?? models[0]?.name ?? "",
  text: part.text ?? "",
  second: part.second || null,
  target: part.target || null,
  generate: part.generate ?? null,
  image: part.image ?? null,
  heads: part.heads ?? false,
  flow: part.flow ?? null,
});

/** The request to explain `generate` tokens, or with 0 the given answer. */
export const explanationOf = (part: Partial<Request>, generate: number, models: readonly ModelInfo[]): ExplanationRequest => {
  const { model, text, target } = requestOf(part, models);
  return { model, text, generate: generate || !target ? generate || 1 : null, answer: generate ? null : target, contrast: null };
};

/** Whether two requests are equivalent. Heads do not count: they belong to the view. */
const alike = (a: Partial<Request>, b: Partial<Request>): boolean =>
  sameInput(a, b) && JSON.stringify(a.flow ?? null) === JSON.stringify(b.flow ?? null);

/** Apply a URL fragment: another view and, if there is a server, other texts or models. `now` is the fragment of the
 *  page: a later one takes over. */
export async function follow(store: Store, fragment: string, now = (): string => fragment): Promise<void> {
  const before = store.asked;
  const { request, other, explain } = store.recall(fragment);
  if (!store.lab) return;
  if (request.text && typeof explain === "number") {
    if (explain !== before.explain || !alike(request, before.request)) await store.explain(explanationOf(request, explain, store.models));
    return;
  }
  if (store.explained && store.doc) store.closeExplanation();
  if (request.text && !alike(request, before.request)) await store.analyse(requestOf({ ...request, heads: store.view.heads }, store.models));
  if (!store.doc || now() !== fragment) return;
  const second = other && requestOf({ ...request, ...other }, store.models);
  const known = before.other && requestOf({ ...before.request, ...before.other }, store.models);
  if (!second) store.compareWith(null);
  else if (!store.other || !known || !alike(second, known)) await store.analyse(second, true);
}

/** Whether the step from one fragment to another deserves an entry in the history: another input, map or mode, not
 *  another colour or selection. */
export function isStep(from: string, to: string): boolean {
  if (!from) return false;
  const [a, b] = [from, to].map((fragment) => {
    const { view, asked } = fromFragment(fragment);
    const { band, layer, scope, against, head, heads, path, beside } = view;
    return JSON.stringify([asked, band, layer, scope, against, head, heads, path, beside !== null]);
  });
  return a !== b;
}

export async function serve(store: Store, lab: Lab): Promise<void> {
  store.lab = lab;
  const asked = store.recall(location.hash);
  store.asked = asked;
  store.models = await lab.models();
  const request = requestOf({ ...asked.request, heads: store.view.heads }, store.models);
  if (!request.text) {
    const able = store.models.find((one) => one.kind !== "vision");
    store.phase = "empty";
    if (!able || store.typed) return; // never over what somebody types
    return store.analyse({ ...request, model: able.name, text: EXAMPLE });
  }
  if (typeof asked.explain === "number") return store.explain(explanationOf(request, asked.explain, store.models));
  await store.analyse(request);
  if (store.doc && asked.other) await store.analyse(requestOf({ ...request, ...asked.other }, store.models), true);
}
