/** The state of one viewer: documents, view, and everything derived from them. */

import { getContext, setContext } from "svelte";
import { Doc } from "../data/doc.svelte";
import type { Explanation, ExplanationRequest } from "../data/explanation";
import { headScopes, type Figure, type Side } from "../data/header";
import { sameInput, type Lab, type ModelInfo, type Request, type Source } from "../data/source";
import { PALETTES, type Theme } from "../look/colours";
import type { Ink } from "../look/paint";
import { difference } from "../maths/difference";
import { picksOf, planeOf, type Picks, type Plane } from "../maths/plane";
import { extentOf, scaleOf, type Extent } from "../maths/scale";
import { measured } from "../measure";
import { fromFragment, toFragment, type Asked } from "./address";
import { Kept } from "./kept";
import * as views from "./view";
import type { View } from "./view";

/** A map on the page: its document and its place in the document. */
export interface Place {
  doc: Doc;
  band: string;
  layer: number;
  scope: string;
  against: string | null;
  head: number | null;
}

export interface Hover {
  row: number; // in the document
  column: number;
  x: number; // on the page
  y: number;
  pane: number;
}

export interface Trouble {
  title: string;
  text: string;
  kind: "error" | "too-long";
}

/** An explanation on display: a token of the answer, or another token in its place. */
export interface Explained {
  request: ExplanationRequest;
  told: Explanation;
  row: number;
  contrast: { token: string; told: Explanation } | null;
}

export type Phase = "empty" | "loading" | "ready";
const STEP = 1100; // milliseconds per frame of the animation

/** The theme stored by the last visit. */
function remembered(): "auto" | Theme {
  try {
    const theme = localStorage.getItem("normscope-theme");
    return theme === "light" || theme === "dark" ? theme : "auto";
  } catch {
    return "auto";
  }
}

export class Store {
  view = $state.raw<View>(views.START);
  doc = $state.raw<Doc | null>(null);
  other = $state.raw<Doc | null>(null); // a second document to compare with
  hover = $state.raw<Hover | null>(null);
  pointed = $state.raw<string | null>(null); // the token under the pointer or with the focus
  phase = $state<Phase>("loading");
  trouble = $state.raw<Trouble | null>(null);
  playing = $state(false);
  theme = $state<"auto" | Theme>(remembered());
  pageDark = $state(false);
  status = $state("");
  typed = false; // the reader has begun to type
  printing = $state(false);
  begun = $state(false); // a map has been drawn
  dialog = $state<"help" | "completeness" | "share" | null>(null);

  lab = $state.raw<Lab | null>(null);
  models = $state.raw<ModelInfo[]>([]);
  explained = $state.raw<Explained | null>(null);
  asked = $state.raw<Asked>({ request: {}, other: null });
  progress = $state<number | null>(null);
  started = 0; // when the running analysis began, in milliseconds
  private running: AbortController | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private readonly extents = new Kept<Extent>(4000);
  private readonly shared = new Kept<{ loaded: number; extents: Extent[] }>(400);
  private readonly differences = new Kept<Float32Array>(16);
  private readonly picks = new Kept<Picks>(12);
  private readonly planes = new Kept<Plane>(6);

  readonly shade: Theme = $derived(this.theme === "auto" ? (this.pageDark ? "dark" : "light") : this.theme);
  readonly palette = $derived(PALETTES[this.shade]);
  readonly side: Side | null = $derived(this.doc ? views.sideOf(this.doc.header, this.view.band) : null);
  readonly scopes: string[] = $derived(this.doc ? views.scopesOf(this.doc.header, this.view.band) : []);
  readonly main: Place | null = $derived(this.doc ? this.placeOf(this.doc, this.view.layer, this.view.scope) : null);
  readonly second: Place | null = $derived(this.besidePlace());
  readonly fragment: string = $derived(toFragment(this.view, this.asked));
  readonly headed: boolean = $derived(!!this.side && this.view.against === null && headScopes(this.side).includes(this.view.scope));
  readonly chosen = $derived(this.side ? views.tokenPlaces(this.side, this.pointed ?? this.view.token) : { row: -1, column: -1 });

  private placeOf(doc: Doc, layer: number, scope: string): Place {
    return { doc, band: this.view.band, layer, scope, against: this.view.against, head: this.view.head };
  }

  private besidePlace(): Place | null {
    const { beside } = this.view;
    if (!beside || !this.doc || !this.side) return null;
    const doc = this.other ?? this.doc;
    const bands = views.bandsOf(doc.header);
    const band = bands.includes(this.view.band) ? this.view.band : doc.header.sides[0].side;
    const side = views.sideOf(doc.header, band);
    const like = (scope: string) => views.counterpart(scope, this.side!, side);
    const scope = beside.linked ? like(this.view.scope) : side.scopes.includes(beside.scope) ? beside.scope : like(this.view.scope);
    const wanted = beside.linked ? this.view.layer : beside.layer;
    const layer = side.layers.includes(wanted) ? wanted : side.layers[side.layers.length - 1];
    const against = this.view.against === null ? null : like(this.view.against);
    const head = this.view.head !== null && headScopes(side).includes(scope) && side.heads.includes(this.view.head) ? this.view.head : null;
    return { doc, band, layer, scope, against: against === scope ? null : against, head };
  }

  setTheme(theme: "auto" | Theme): void {
    this.theme = theme;
    try {
      localStorage.setItem("normscope-theme", theme);
    } catch {
      // without storage it holds for this page only
    }
  }

  /** A map has been drawn: load the other maps and show the rest of the page. */
  drew(place: Place): void {
    setTimeout(() => {
      this.begun = true;
      place.doc.release();
    });
  }

  // Maps

  sideAt = (place: Place): Side => views.sideOf(place.doc.header, place.band);

  private scopesAt = (place: Place): string[] => views.scopesOf(place.doc.header, place.band);

  picksAt = (place: Place): Picks => {
    const side = this.sideAt(place);
    const make = () => picksOf(side.rows, side.columns, this.view.special, views.columnsOf(place.doc.header, place.band));
    return this.picks.get(`${place.doc.id}|${place.band}|${this.view.special}`, make);
  };

  /** All cells of a map; in difference mode, the change in share. */
  valuesAt = (place: Place, urgent = false): Float32Array | undefined => {
    const side = this.sideAt(place);
    const { doc, layer, scope, against } = place;
    if (place.head !== null) return doc.head(side, scope, layer, side.heads.indexOf(place.head), urgent);
    const after = doc.map(side, scope, layer, urgent);
    if (against === null) return after;
    const before = doc.map(side, against, layer, urgent);
    if (!before || !after) return undefined;
    const key = `${doc.id}|${side.side}|${against}|${scope}|${layer}|${this.view.per}`;
    return this.differences.get(key, () => difference(before, after, side.columns.length, this.view.per));
  };

  /** The visible part of a map. */
  planeAt = (place: Place, urgent = false): Plane | undefined => {
    const values = this.valuesAt(place, urgent);
    if (!values) return undefined;
    const make = () => planeOf(values, this.sideAt(place).columns.length, this.picksAt(place), this.normAt(place));
    return this.planes.get(this.key(place), make);
  };

  /** The mixing ratios of a map's rows; undefined if the map has none of its own: single heads, differences, and the
   *  encoder tokens alone, which do not include the own token. */
  mixingAt = (place: Place): readonly Figure[] | undefined => {
    const apart = place.head !== null || place.against !== null || place.band === views.CROSS;
    const side = this.sideAt(place);
    return apart ? undefined : side.mixing[place.scope]?.[side.layers.indexOf(place.layer)];
  };

  normAt = (place: Place) => (place.against === null ? this.view.norm : "raw");

  /** A cache key for the visible part of a map. */
  key = (place: Place): string =>
    [place.doc.id, place.band, place.layer, place.scope, place.against ?? "", place.against === null ? this.view.norm : this.view.per, place.head ?? "", this.view.special ? 1 : 0].join("|");

  private extentAt(place: Place): Extent | undefined {
    const known = this.extents.has(this.key(place));
    if (known) return known;
    const values = this.valuesAt(place);
    if (!values) return undefined;
    return this.extents.get(this.key(place), () => extentOf(planeOf(values, this.sideAt(place).columns.length, this.picksAt(place), this.normAt(place))));
  }

  /** The maps that share a colour scale with this one: same quantity, within `view.reach`. */
  private kin(place: Place): Place[] {
    const { reach, norm } = this.view;
    const side = this.sideAt(place);
    const layers = reach === "all" ? side.layers : [place.layer];
    if (place.head !== null) {
      if (reach === "map") return [place];
      return layers.flatMap((layer) => side.heads.map((head) => ({ ...place, layer, head })));
    }
    if (reach === "map" || (place.against !== null && reach === "layer")) return [place];
    if (place.against !== null) return layers.map((layer) => ({ ...place, layer }));
    const alike = (scope: string) => norm !== "raw" || scope.endsWith("-W") === place.scope.endsWith("-W");
    return layers.flatMap((layer) => this.scopesAt(place).filter(alike).map((scope) => ({ ...place, layer, scope })));
  }

  /** The extents of the maps that share a colour scale with this one, computed once for all of them. */
  private extentsAt(place: Place): Extent[] {
    const { reach, norm, special, per } = this.view;
    const kind = place.head === null && place.against === null ? (norm === "raw" ? place.scope.slice(-2) : "") : place.scope;
    const key = [place.doc.id, place.band, reach, reach === "all" ? "" : place.layer, reach === "map" ? this.key(place) : kind, norm, special, place.against, per, place.head === null].join("|");
    const known = this.shared.has(key);
    if (known && known.loaded === place.doc.loaded) return known.extents;
    const extents = this.kin(place).map((one) => this.extentAt(one)).filter((one) => one !== undefined);
    this.shared.set(key, { loaded: place.doc.loaded, extents });
    return extents;
  }

  /** The colours of a map; the two maps of a comparison share a scale. */
  inkAt = (place: Place): Ink => {
    const both = this.main && this.second && (place === this.main || place === this.second) ? [this.main, this.second] : [place];
    const { diagonal, log } = this.view;
    const scale = scaleOf(both.flatMap((one) => this.extentsAt(one)), diagonal, log, place.against !== null);
    return { palette: this.palette, diagonal, scale };
  };

  // Steps

  change(next: Partial<View> | View): void {
    const view = { ...this.view, ...next };
    this.view = this.doc ? views.settled(view, this.doc.header) : view;
  }

  private by(step: (view: View, header: Doc["header"]) => View): void {
    if (this.doc) this.view = step(this.view, this.doc.header);
  }

  stepScope = (by: number): void => this.by((view, header) => views.stepScope(view, header, by));
  stepLayer = (by: number): void => this.by((view, header) => views.stepLayer(view, header, by));
  toScope = (scope: string): void => this.by((view, header) => views.atScope({ ...view, head: null }, header, scope));
  toggleDifference = (): void => this.by(views.toggleDifference);
  nextNorm = (): void => void (this.view = views.nextNorm(this.view));
  nextDiagonal = (): void => void (this.view = views.nextDiagonal(this.view));

  toggleHeads = (): void => {
    this.change({ heads: this.view.path || !this.view.heads, head: null, path: false });
    if (this.view.heads && this.lab && this.doc && this.side && !this.side.heads.length) void this.analyse({ ...(this.asked.request as Request), heads: true });
  };

  choose = (side: string, position: number): void => {
    const token = `${side}:${position}`;
    this.change({ token: this.view.token === token ? null : token, cell: null });
  };

  /** Highlight a cell and choose its output token. */
  pin = (row: number, column: number): void => {
    const label = this.side?.rows[row];
    if (label) this.change({ cell: [row, column], token: `${label.side}:${label.position}` });
  };

  play = (): void => {
    if (this.playing) return this.pause();
    if (!this.doc) return;
    if (!views.following(this.view, this.doc.header)) this.view = views.opened(this.view, this.doc.header);
    this.playing = true;
    this.timer = setTimeout(this.tick, STEP);
  };

  pause = (): void => {
    this.playing = false;
    clearTimeout(this.timer);
  };

  private tick = (): void => {
    const next = this.doc && views.following(this.view, this.doc.header);
    if (!next) return this.pause();
    this.view = next;
    this.timer = setTimeout(this.tick, STEP);
  };

  togglePath = (): void => this.change({ path: !this.view.path });

  toggleBeside = (): void => {
    const { layer, scope, beside } = this.view;
    this.change({ beside: beside ? null : { layer, scope, linked: this.other !== null } });
  };

  // Documents

  /** The second document of a comparison; null: the same document again. */
  compareWith(doc: Doc | null): void {
    this.other = doc;
    if (!doc) this.asked = { ...this.asked, other: null };
  }

  async show(doc: Doc): Promise<void> {
    const bands = (one: Doc) => views.bandsOf(one.header).length;
    if (this.doc && bands(this.doc) === 1 && bands(doc) > 1) this.view = { ...this.view, band: "" }; // its name was no choice
    const view = views.settled(this.view, doc.header);
    const side = views.sideOf(doc.header, view.band);
    const loaded = doc.load(side, view.scope, view.layer);
    if (this.doc) await loaded; // keep the previous map until then
    this.pause();
    this.view = views.settled(this.view, doc.header); // it may have changed in the meantime
    this.doc = doc;
    this.explained = null;
    this.phase = "ready";
    this.trouble = null;
    await loaded;
  }

  /** Run an analysis and show it; `second`: as the second document. */
  analyse = async (request: Request, second = false): Promise<void> => {
    if (!this.lab) return;
    this.running?.abort();
    const running = (this.running = new AbortController());
    this.trouble = null;
    this.progress = 0;
    this.started = performance.now();
    measured.firstMapAt = null;
    this.status = "Analysing …";
    try {
      let early: Promise<void> | undefined;
      const first = (part: Source): void => {
        if (!second) early = (early ?? Promise.resolve()).then(() => this.early(part, request, running.signal)).catch(() => undefined); // the complete document follows
      };
      const source = await this.lab.analyse(request, (progress) => (this.progress = progress), running.signal, first);
      await early;
      const grown = !second && this.doc?.growing && sameInput(request, this.asked.request) ? this.doc : null;
      const doc = await Doc.open(source, false, grown);
      if (second) {
        this.other = doc;
        this.asked = { ...this.asked, other: request };
        this.change({ beside: { layer: this.view.layer, scope: this.view.scope, linked: true } });
      } else {
        await this.show(doc);
        this.asked = { ...this.asked, request, explain: null };
      }
      this.status = "Analysis complete.";
    } catch (error) {
      if (running.signal.aborted || (error as Error).name === "AbortError") this.status = "Cancelled.";
      else this.fail(error);
    } finally {
      if (this.running === running) {
        this.running = null;
        this.progress = null;
      }
      if (this.phase === "loading") this.phase = this.doc ? "ready" : "empty";
    }
  };

  /** Explain what the model writes after a text; the maps stay behind it. */
  explain = async (request: ExplanationRequest): Promise<void> => {
    const told = await this.explaining(request);
    if (!told) return;
    this.pause();
    this.explained = { request, told, row: 0, contrast: null };
    this.asked = { request: { model: request.model, text: request.text, target: request.answer }, other: null, explain: request.generate ?? 0 };
    this.phase = "ready";
    this.status = "Explanation complete.";
  };

  /** Explain another token of the answer. */
  pickAnswer(row: number): void {
    if (this.explained) this.explained = { ...this.explained, row, contrast: null };
  }

  /** Explain the chosen token of the answer against another one. */
  contrastWith = async (token: string): Promise<void> => {
    const { explained } = this;
    if (!explained) return;
    const { position } = explained.told.rows[explained.row];
    const told = await this.explaining({ ...explained.request, contrast: { position, token } });
    if (told && this.explained?.told === explained.told) this.explained = { ...explained, contrast: { token, told } };
  };

  closeExplanation(): void {
    this.explained = null;
    this.asked = { ...this.asked, explain: null };
  }

  private async explaining(request: ExplanationRequest): Promise<Explanation | null> {
    if (!this.lab?.explain) return null;
    this.running?.abort();
    const running = (this.running = new AbortController());
    this.trouble = null;
    this.progress = 0;
    this.started = performance.now();
    try {
      return await this.lab.explain(request, (progress) => (this.progress = progress), running.signal);
    } catch (error) {
      if (running.signal.aborted || (error as Error).name === "AbortError") this.status = "Cancelled.";
      else this.fail(error);
      return null;
    } finally {
      if (this.running === running) {
        this.running = null;
        this.progress = null;
      }
      if (this.phase === "loading") this.phase = this.doc ? "ready" : "empty";
    }
  }

  /** Show the layers that are done while the others are computed, if the view is of one of them. */
  private async early(source: Source, request: Request, signal: AbortSignal): Promise<void> {
    const known = this.doc && sameInput(request, this.asked.request) ? this.doc : null;
    if (known && !known.growing) return; // all layers of this input are on display already
    const { layer, path, beside } = this.view;
    const doc = await Doc.open(source, true, known);
    if (signal.aborted || path || beside || !doc.header.sides[0].layers.includes(layer)) return;
    await this.show(doc);
    this.asked = { ...this.asked, request };
  }

  cancel = (): void => {
    this.running?.abort();
    this.running = null;
    this.progress = null;
  };

  fail(error: unknown): void {
    const text = error instanceof Error ? error.message : String(error);
    const long = (error as { status?: number }).status === 413 || /too long|too large|at most \d+ tokens|longer than|positions for \d+/i.test(text);
    this.trouble = { title: long ? "Too long" : "Something went wrong", text, kind: long ? "too-long" : "error" };
    this.status = `${this.trouble.title}: ${text}`;
  }

  /** Restore the view from a URL fragment. */
  recall(fragment: string): Asked {
    const { view, asked } = fromFragment(fragment);
    this.view = this.doc ? views.settled(view, this.doc.header) : view;
    return asked;
  }
}

const KEY = Symbol("normscope");
export const provide = (store: Store): Store => setContext(KEY, store);
export const use = (): Store => getContext<Store>(KEY);
