import { afterEach, describe, expect, it, vi } from "vitest";
import { fromOne, HttpLab, HttpSource, ServerError } from "../src/data/http";
import type { Request, Source } from "../src/data/source";
import { requestOf } from "../src/serve";
import { header, noise, side } from "./fake";

const request: Request = { model: "toy", text: "a b", second: null, target: null, generate: null, image: null, heads: false, flow: null };
const one = header(side(["a", "b"], { scopes: ["ATTN-N"], layers: [0, 1] }));
const json = (body: unknown, status = 200) => new Response(JSON.stringify(body), { status });
const values = noise(8);

/** A server that returns the given answers in turn and records the requests. */
function answering(...answers: (Response | (() => Response))[]): string[] {
  const asked: string[] = [];
  vi.stubGlobal("fetch", (path: string, options: RequestInit = {}) => {
    asked.push(`${options.method ?? "GET"} ${path}`);
    const next = answers.shift();
    return next ? Promise.resolve(typeof next === "function" ? next() : next) : Promise.reject(new TypeError("no network"));
  });
  return asked;
}
afterEach(() => vi.unstubAllGlobals());

describe("a server", () => {
  it("returns a short analysis immediately, including the header", async () => {
    const asked = answering(json({ id: "x1", state: "done", header: one }, 201), new Response(values.buffer));
    const source = await new HttpLab().analyse(request, () => undefined, new AbortController().signal);
    expect((await source.header()).model.name).toBe("toy");
    expect(await source.cells("encoder", "ATTN-N", 1)).toEqual(values.slice(4));
    expect(await source.cells("encoder", "ATTN-N", 0)).toEqual(values.slice(0, 4)); // one request for all layers
    expect(asked).toEqual(["POST api/analyses?wait=2&first=true", "GET api/analyses/x1/cells?side=encoder&scope=ATTN-N"]);
  });
  it("shows the first layer while it computes the others, and serves its maps by layer", async () => {
    const part = header(side(["a", "b"], { scopes: ["ATTN-N"], layers: [0] }));
    const asked = answering(json({ id: "x", state: "running", progress: 0.5, header: part }), () => json({ id: "x", state: "done" }), json(one));
    let early: Source | undefined;
    const whole = await new HttpLab().analyse(request, () => undefined, new AbortController().signal, (source) => (early = source));
    expect((await early!.header()).sides[0].layers).toEqual([0]);
    expect((await whole.header()).sides[0].layers).toEqual([0, 1]);
    answering(new Response(values.slice(0, 4).buffer));
    expect(await early!.cells("encoder", "ATTN-N", 0)).toEqual(values.slice(0, 4));
    expect(asked).toEqual(["POST api/analyses?wait=2&first=true", "GET api/analyses/x?wait=20", "GET api/analyses/x/header"]);
  });
  it("reports the progress of a long analysis", async () => {
    const told: number[] = [];
    const asked = answering(json({ id: "a/b", state: "running", progress: 0.1 }), json({ id: "a/b", state: "running", progress: 0.6 }), json({ id: "a/b", state: "done" }), json(one));
    const source = await new HttpLab().analyse(request, (progress) => told.push(progress), new AbortController().signal);
    await source.header();
    expect(told).toEqual([0.1, 0.6]);
    expect(asked.slice(1)).toEqual(["GET api/analyses/a%2Fb?wait=20", "GET api/analyses/a%2Fb?wait=20", "GET api/analyses/a%2Fb/header"]);
  });
  it("is told when an analysis is cancelled", async () => {
    const stop = new AbortController();
    const asked = answering(json({ id: "x", state: "running" }), () => {
      stop.abort();
      throw new DOMException("stopped", "AbortError");
    }, json({}));
    await expect(new HttpLab().analyse(request, () => undefined, stop.signal)).rejects.toThrow("stopped");
    await vi.waitFor(() => expect(asked.at(-1)).toBe("DELETE api/analyses/x"));
  });
  it("explains errors", async () => {
    const { signal } = new AbortController();
    answering(json({ error: "The input has 99 tokens." }, 422));
    await expect(new HttpLab().analyse(request, () => undefined, signal)).rejects.toThrow("The input has 99 tokens.");
    answering(json({ id: "x", state: "failed", error: "Out of memory." }));
    await expect(new HttpLab().analyse(request, () => undefined, signal)).rejects.toThrow("Out of memory.");
    answering(json({ id: "x", state: "cancelled" }));
    await expect(new HttpLab().analyse(request, () => undefined, signal)).rejects.toThrow("cancelled");
    answering(new Response("<html>", { status: 500 }));
    await expect(new HttpLab().models()).rejects.toThrow("500");
    answering();
    await expect(new HttpLab().models()).rejects.toThrow(ServerError);
  });
  it("is asked for one map at a time if maps are large", async () => {
    const big = header(side(Array.from({ length: 300 }, (_, k) => `t${k}`), { scopes: ["ATTN-N"], layers: [0, 1, 2, 3, 4, 5] }));
    const asked = answering(new Response(noise(90000).buffer));
    const cells = await new HttpSource("api/analyses/x", big).cells("encoder", "ATTN-N", 3);
    expect(cells.length).toBe(90000);
    expect(asked).toEqual(["GET api/analyses/x/cells?side=encoder&scope=ATTN-N&layer=3"]);
  });
});

describe("an invalid position", () => {
  it("is counted from 1", () => {
    expect(fromOne("There is no position 99 in the logits: valid are 0 to 5 (or -6 to -1).")).toBe("There is no token 100: valid are 1 to 6.");
    expect(fromOne("The text is empty.")).toBe("The text is empty.");
  });
});

describe("a request", () => {
  const models = [{ name: "first", family: "", kind: "encoder" as const, layers: 1, heads: 1, scopes: [], max_tokens: null, targets: "none" as const, classes: [], positions: false }];
  it("falls back to an existing model", () => {
    expect(requestOf({ model: "gone", text: "x" }, models).model).toBe("first");
    expect(requestOf({ text: "x", second: "" }, models)).toMatchObject({ second: null, target: null, heads: false });
  });
});
