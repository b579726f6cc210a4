/** A layer as a line of components, with the residual connections that bypass them. */

import type { Component } from "../data/header";

export interface Stop {
  component: Component;
  column: number;
  lane: number; // 0: on the line; 1 and above: parallel branches above it
}

export interface Bypass {
  from: number; // the column before which it leaves the line
  to: number; // the column of the sum
  lanes: number; // number of branches it bypasses
}

export interface Line {
  stops: Stop[];
  columns: { scopes: string[] }[]; // the maps under each column
  bypasses: Bypass[];
  lanes: number; // maximum number of parallel branches above the line
}

/** The scopes measured after a component that the document has, weights first. */
const scopesAfter = (component: Component, present: readonly string[]): string[] =>
  [component.weights, component.norms].filter((scope): scope is string => scope !== null && present.includes(scope));

/** Lay out a layer. Parallel branches share a column if the upper component has no map. */
export function lineOf(components: readonly Component[], present: readonly string[]): Line {
  const line: Line = { stops: [], columns: [], bypasses: [], lanes: 0 };
  const blocks = [...new Set(components.map((one) => one.block))];
  const put = (component: Component, column: number, lane: number) => {
    while (line.columns.length <= column) line.columns.push({ scopes: [] });
    line.columns[column].scopes.push(...scopesAfter(component, present));
    line.stops.push({ component, column, lane });
  };
  for (const block of blocks) {
    const mine = components.filter((one) => one.block === block);
    const sum = mine.findIndex((one) => one.kind === "residual");
    const inside = sum < 0 ? mine : mine.slice(0, sum);
    const start = line.columns.length;
    const branches = [...new Set(inside.map((one) => one.branch))];
    let end = start;
    branches.forEach((branch, lane) => {
      const members = inside.filter((one) => one.branch === branch);
      const mapped = members.some((one) => scopesAfter(one, present).length);
      let column = lane > 0 && mapped ? end : start;
      for (const member of members) put(member, column++, lane);
      end = Math.max(end, column);
    });
    line.lanes = Math.max(line.lanes, branches.length - 1);
    if (sum < 0) continue;
    put(mine[sum], end, 0);
    line.bypasses.push({ from: start, to: end, lanes: branches.length - 1 });
    mine.slice(sum + 1).forEach((member, k) => put(member, end + 1 + k, 0));
  }
  return line;
}

const WORDS: [RegExp, string][] = [
  [/^XATTN/, "cross-attention"],
  [/^ATTN/, "attention"],
  [/^RES/, "residual"],
  [/^LN/, "norm"],
  [/^FF/, "feed-forward"],
];

const OPERATORS: Record<string, string> = { ATTN: "attention", XATTN: "cross-attention", FF: "feed-forward" };

/** A scope in plain words: the component that it follows. The papers' name stands beside it. */
export function plainScope(scope: string, side: { aliases: Record<string, string> }): string {
  if (scope === side.aliases.layer) return "whole layer";
  const parts = scope.replace(/-[WN]$/, "").match(/XATTN|ATTN|RES|LN|FF/g) ?? [];
  const weights = scope.endsWith("-W");
  const operators = parts.filter((part) => part in OPERATORS);
  const operator = operators[operators.length - 1];
  const last = parts[parts.length - 1];
  if (!operator) return scope;
  if (last === operator) return last === "FF" ? "after the feed-forward" : `${OPERATORS[last]}${weights ? " weights" : ""}`;
  const whose = operator === "ATTN" ? "" : `, ${OPERATORS[operator]}`;
  return `${weights ? "weights " : ""}+ ${last === "RES" ? "residual" : "norm"}${whose}`;
}

/** A scope in words: its components. */
export function described(scope: string): string {
  const words: string[] = [];
  let rest = scope.replace(/-[WN]$/, "");
  while (rest) {
    const found = WORDS.find(([pattern]) => pattern.test(rest));
    if (!found) return scope;
    words.push(found[1]);
    rest = rest.replace(found[0], "");
  }
  return words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}` : words[0];
}

/** The quantity measured by a scope. */
export const quantity = (scope: string): string => (scope.endsWith("-W") ? "attention weight" : "norm of the contribution");
