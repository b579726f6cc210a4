/** `normscope serve`: models, analyses and their cells over HTTP. */

import type { Explanation, ExplanationRequest } from "./explanation";
import { checked, type Header } from "./header";
import type { Lab, ModelInfo, Request, Source } from "./source";

const WHOLE = 1 << 19; // if all layers of a scope have at most this many cells, they are fetched in one request
const SHORT = 2; // seconds that the first request waits for the result
const LONG = 20; // seconds that a long poll waits

export class ServerError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

interface State {
  id: string;
  state: "running" | "done" | "failed" | "cancelled";
  progress?: number;
  layers?: number; // whose cells are available
  error?: string | null;
  header?: unknown;
}

async function answer(response: Response): Promise<Response> {
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try {
    const body = (await response.json()) as { error?: unknown };
    if (typeof body.error === "string") message = body.error;
  } catch {
    // not JSON: only the status is known
  }
  throw new ServerError(message, response.status);
}

async function ask(path: string, options: RequestInit = {}): Promise<Response> {
  try {
    return await answer(await fetch(path, options));
  } catch (error) {
    if (error instanceof ServerError || (error as Error).name === "AbortError") throw error;
    throw new ServerError("The server is not responding. Is normscope serve still running?", 0);
  }
}

export class HttpSource implements Source {
  private readonly description: Promise<Header>;
  private readonly scopes = new Map<string, Promise<Float32Array>>();

  constructor(
    private readonly path: string,
    known?: unknown,
    private readonly growing = false, // the server is still computing other layers: fetch maps one by one
  ) {
    this.description = known ? Promise.resolve(checked(known)) : ask(`${path}/header`).then(async (found) => checked(await found.json()));
    this.description.catch(() => undefined); // reported by header() and cells()
  }

  header(): Promise<Header> {
    return this.description;
  }

  async cells(sideName: string, scope: string, layer: number): Promise<Float32Array> {
    const side = (await this.description).sides.find((one) => one.side === sideName);
    if (!side) throw new Error(`This document has no ${sideName}.`);
    const maps = scope.startsWith("heads/") ? side.heads.length : 1;
    const count = maps * side.rows.length * side.columns.length;
    const query = `side=${encodeURIComponent(sideName)}&scope=${encodeURIComponent(scope)}`;
    if (this.growing || count * side.layers.length > WHOLE) return this.fetched(`${query}&layer=${layer}`);
    let all = this.scopes.get(query);
    if (!all) {
      this.scopes.set(query, (all = this.fetched(query)));
      all.catch(() => this.scopes.delete(query));
    }
    const start = count * side.layers.indexOf(layer);
    return (await all).slice(start, start + count);
  }

  private async fetched(query: string): Promise<Float32Array> {
    return new Float32Array(await (await ask(`${this.path}/cells?${query}`)).arrayBuffer());
  }
}

export class HttpLab implements Lab {
  constructor(private readonly base = "api") {}

  async models(): Promise<ModelInfo[]> {
    return (await (await ask(`${this.base}/models`)).json()) as ModelInfo[];
  }

  /** Run an analysis. Aborting the signal also cancels it on the server. */
  async analyse(request: Request, on: (progress: number) => void, signal: AbortSignal, first?: (source: Source) => void): Promise<Source> {
    const started = this.start(request);
    try {
      let known = await unless(signal, started);
      let shown = known.layers ?? 0;
      if (known.state === "running" && known.header) first?.(new HttpSource(this.path(known.id), known.header, true));
      while (known.state === "running") {
        on(known.progress ?? 0);
        if (first && (known.layers ?? 0) > shown) {
          shown = known.layers ?? 0;
          const header = (await (await ask(`${this.path(known.id)}/header?first=true`, { signal })).json()) as unknown;
          first(new HttpSource(this.path(known.id), header, true));
        }
        known = (await (await ask(`${this.path(known.id)}?wait=${LONG}`, { signal })).json()) as State;
      }
      if (known.state === "cancelled") throw new DOMException("The analysis was cancelled.", "AbortError");
      if (known.state === "failed") throw new ServerError(fromOne(known.error ?? "The analysis failed."), 422);
      return new HttpSource(this.path(known.id), known.header);
    } catch (error) {
      if (signal.aborted) void started.then((known) => fetch(this.path(known.id), { method: "DELETE", keepalive: true })).catch(() => undefined);
      throw error;
    }
  }

  /** Run an explanation. Aborting the signal also cancels it on the server. */
  async explain(request: ExplanationRequest, on: (progress: number) => void, signal: AbortSignal): Promise<Explanation> {
    const headers = { "Content-Type": "application/json" };
    const started = ask(`${this.base}/explanations?wait=${SHORT}`, { method: "POST", headers, body: JSON.stringify(request) }).then(async (found) => (await found.json()) as State & { explanation?: Explanation });
    const path = (id: string) => `${this.base}/explanations/${encodeURIComponent(id)}`;
    try {
      let known = await unless(signal, started);
      while (known.state === "running") {
        on(known.progress ?? 0);
        known = (await (await ask(`${path(known.id)}?wait=${LONG}`, { signal })).json()) as State & { explanation?: Explanation };
      }
      if (known.state === "cancelled") throw new DOMException("The explanation was cancelled.", "AbortError");
      if (!known.explanation) throw new ServerError(known.error ?? "The explanation failed.", 422);
      return known.explanation;
    } catch (error) {
      if (signal.aborted) void started.then((known) => fetch(path(known.id), { method: "DELETE", keepalive: true })).catch(() => undefined);
      throw error;
    }
  }

  private async start(request: Request): Promise<State> {
    const headers = { "Content-Type": "application/json" };
    const answered = await ask(`${this.base}/analyses?wait=${SHORT}&first=true`, { method: "POST", headers, body: JSON.stringify(request) });
    return (await answered.json()) as State;
  }

  private path(id: string): string {
    return `${this.base}/analyses/${encodeURIComponent(id)}`;
  }
}

/** The message for an invalid target position: the server counts from 0, the page from 1. */
export const fromOne = (refusal: string): string =>
  refusal.replace(/^There is no position (\d+) in the logits: valid are 0 to (\d+)[^.]*/, (_, given: string, last: string) => `There is no token ${Number(given) + 1}: valid are 1 to ${Number(last) + 1}`);

/** The promise, rejected with an AbortError if the signal fires first. */
function unless<T>(signal: AbortSignal, promised: Promise<T>): Promise<T> {
  return new Promise((done, fail) => {
    const stop = () => fail(new DOMException("Cancelled.", "AbortError"));
    if (signal.aborted) return stop();
    signal.addEventListener("abort", stop, { once: true });
    promised.then(done, fail);
  });
}
