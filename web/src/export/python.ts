/** The Python that makes what is on display. */

import type { ExplanationRequest } from "../data/explanation";
import type { Request } from "../data/source";
import { EXACT } from "../state/address";
import type { View } from "../state/view";

/** A Python literal; JSON is valid Python, except for lone surrogates, which it escapes in the same way. */
const literal = (text: string): string => JSON.stringify(text).replace(/[\u007f-\uffff]/g, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);

const call = (name: string, parts: (string | false | 0 | null | undefined)[]): string => `${name}(${parts.filter(Boolean).join(", ")})`;

const HEAD = ["from normscope import Analyzer", ""];

/** `side`: the side of an encoder-decoder; null if the model has one. */
export function pythonOf(request: Partial<Request>, view: View, side: string | null): string {
  const { model = "", text = "", second, target, generate, flow, image } = request;
  const lines = [...HEAD, `lens = Analyzer.from_pretrained(${literal(model)})  # a name or the path of a folder`];
  const given = image !== null && image !== undefined ? "picture" : second ? `(${literal(text)}, ${literal(second)})` : literal(text);
  const heads = view.heads || view.head !== null;
  if (given === "picture") lines.splice(2, 0, "from PIL import Image", "");
  if (given === "picture") lines.push('picture = Image.open("picture.png")');
  lines.push(`result = ${call("lens.analyze", [given, target && `text_target=${literal(target)}`, generate && `generate=${generate}`, heads && "heads=True"])}`);
  const part = side === null ? "result" : `result.${side}`;
  if (view.against !== null) {
    lines.push(`before, after = (${part}.at(scope, layer=${view.layer}) for scope in (${literal(view.against)}, ${literal(view.scope)}))`);
    const sum = view.per === "output" ? "one.sum(-1, keepdim=True)" : "one.sum(-2, keepdim=True)";
    lines.push(`before, after = (one / ${sum} for one in (before, after))`, "change = after - before");
  } else if (view.head !== null) lines.push(`maps = ${part}.heads[${literal(view.scope)}][${part}.layers.index(${view.layer}), ${view.head}]`);
  else {
    lines.push(`maps = ${part}.at(${literal(view.scope)}, layer=${view.layer})`);
    if (view.norm !== "raw") lines.push(`shares = maps / maps.sum(${view.norm === "row" ? -1 : -2}, keepdim=True)`);
    if (view.norm !== "column") lines.push(`${part}.plot(${call("", [literal(view.scope), `layer=${view.layer}`, view.norm === "row" && "normalize=True"]).slice(1, -1)}).figure.savefig("map.pdf")`);
  }
  if (flow) {
    const wanted = flow.against ? `(${literal(flow.target)}, ${literal(flow.against)})` : literal(flow.target);
    lines.push(`flow = ${call("lens.flow", [given, `target=${wanted}`, flow.position !== null && `position=${flow.position}`, flow.method !== EXACT && `method=${literal(flow.method)}`])}`);
  }
  return `${lines.join("\n")}\n`;
}

export function explainPython({ model, text, generate, answer }: ExplanationRequest): string {
  const lines = [...HEAD, `lens = Analyzer.from_pretrained(${literal(model)})  # a name or the path of a folder`];
  lines.push(`told = ${call("lens.explain", [literal(text), generate && `generate=${generate}`, answer && `answer=${literal(answer)}`])}`);
  lines.push("print(told.by_source)", 'told.to_html("explanation.html")');
  return `${lines.join("\n")}\n`;
}
