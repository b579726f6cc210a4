/** The view as a URL fragment, for sharing. Layers, heads and tokens are counted from 1 there. */

import type { Aim, Request } from "../data/source";
import { nearestStep, STEPS } from "../maths/path";
import { DIAGONALS, NORMS, START, type View } from "./view";

export interface Asked {
  request: Partial<Request>;
  other: Partial<Request> | null; // for the second document
  explain?: number | null; // explain this number of generated tokens, or with 0 the given answer; null: show maps
}

export const EXACT = "exact"; // the default method

const oneOf = <T extends string>(list: readonly T[], given: string | null, otherwise: T): T => list.find((one) => one === given) ?? otherwise;

function whole(given: string | null): number | null {
  return given !== null && /^\d{1,6}$/.test(given) && Number(given) > 0 ? Number(given) - 1 : null;
}

/** The fragment, without `#`: only what differs from the defaults. */
export function toFragment(view: View, asked?: Asked): string {
  const out = new URLSearchParams();
  const { request = {}, other = null } = asked ?? {};
  if (request.model) out.set("model", request.model);
  if (request.text) out.set("text", request.text);
  if (request.second) out.set("second", request.second);
  if (request.target) out.set("target", request.target);
  if (request.generate) out.set("generate", String(request.generate));
  if (request.flow) {
    const { target, against, position, method } = request.flow;
    out.set("logit", target);
    if (against) out.set("instead", against);
    if (position !== null) out.set("at", String(position + 1));
    if (method !== EXACT) out.set("method", method);
  }
  if (asked?.explain !== undefined && asked.explain !== null) out.set("explain", String(asked.explain));
  if (view.band) out.set("side", view.band);
  out.set("layer", String(view.layer + 1));
  if (view.scope) out.set("scope", view.scope);
  if (view.against !== null) out.set("against", view.against);
  if (view.against !== null && view.per !== START.per) out.set("per", view.per);
  if (view.heads) out.set("heads", "1");
  if (view.head !== null) out.set("head", String(view.head + 1));
  if (view.norm !== START.norm) out.set("norm", view.norm);
  if (view.log) out.set("colour", "log");
  if (view.diagonal !== START.diagonal) out.set("diagonal", view.diagonal);
  if (!view.special) out.set("special", "0");
  if (view.reach !== START.reach) out.set("scale", view.reach);
  if (view.token !== null) out.set("token", view.token.replace(/\d+$/, (position) => String(Number(position) + 1)));
  if (view.cell) out.set("cell", `${view.cell[0] + 1},${view.cell[1] + 1}`);
  if (view.matrix) out.set("matrix", "1");
  if (view.path) out.set("path", "1");
  if (view.least !== null) out.set("edges", String(Number((100 * view.least).toPrecision(3))));
  if (view.beside) {
    out.set("beside", view.beside.linked ? "linked" : `${view.beside.layer + 1},${view.beside.scope}`);
    if (other?.model) out.set("model2", other.model);
    if (other?.text) out.set("text2", other.text);
    if (other?.target) out.set("target2", other.target);
  }
  return out.toString();
}

/** The view and the request of a fragment. Unknown entries are ignored. */
export function fromFragment(fragment: string): { view: View; asked: Asked } {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  const get = (name: string) => given.get(name);
  const cell = /^(\d{1,6}),(\d{1,6})$/.exec(get("cell") ?? "");
  const token = /^([\w-]{1,20}):(\d{1,6})$/.exec(get("token") ?? "");
  const view: View = {
    ...START,
    band: get("side") ?? "",
    layer: whole(get("layer")) ?? 0,
    scope: get("scope") ?? "",
    against: get("against"),
    per: oneOf(["output", "input"], get("per"), START.per),
    heads: get("heads") === "1",
    head: whole(get("head")),
    norm: oneOf(NORMS, get("norm"), START.norm),
    log: get("colour") === "log",
    diagonal: oneOf(DIAGONALS, get("diagonal"), START.diagonal),
    special: get("special") !== "0",
    reach: oneOf(["map", "layer", "all"], get("scale"), START.reach),
    token: token && Number(token[2]) > 0 ? `${token[1]}:${Number(token[2]) - 1}` : null,
    cell: cell && Number(cell[1]) > 0 && Number(cell[2]) > 0 ? [Number(cell[1]) - 1, Number(cell[2]) - 1] : null,
    matrix: get("matrix") === "1",
    path: get("path") === "1",
    least: leastOf(get("edges")),
    beside: besideOf(get("beside")),
  };
  const request: Partial<Request> = {};
  for (const name of ["model", "text", "second", "target"] as const) {
    const found = get(name);
    if (found !== null) request[name] = found;
  }
  const generate = whole(get("generate"));
  if (generate !== null) request.generate = generate + 1;
  const flow = aimOf(get);
  if (flow) request.flow = flow;
  const other: Partial<Request> = {};
  if (get("model2") !== null) other.model = get("model2") ?? "";
  if (get("text2") !== null) other.text = get("text2") ?? "";
  if (get("target2") !== null) other.target = get("target2");
  const explain = /^\d{1,3}$/.test(get("explain") ?? "") ? Number(get("explain")) : null;
  return { view, asked: { request, other: Object.keys(other).length ? other : null, explain } };
}

function aimOf(get: (name: string) => string | null): Aim | null {
  const target = get("logit");
  return target ? { target, against: get("instead") || null, position: whole(get("at")), method: get("method") || EXACT } : null;
}

/** The slider step nearest to the percentage in a fragment. */
function leastOf(given: string | null): number | null {
  const share = given !== null && /^\d{1,3}(\.\d{1,6})?$/.test(given) ? Number(given) / 100 : NaN;
  return share > 0 && share <= 1 ? STEPS[nearestStep(share)] : null;
}

function besideOf(given: string | null): View["beside"] {
  if (given === "linked") return { layer: 0, scope: "", linked: true };
  const found = /^(\d{1,6}),([\w-]+)$/.exec(given ?? "");
  return found && Number(found[1]) > 0 ? { layer: Number(found[1]) - 1, scope: found[2], linked: false } : null;
}
