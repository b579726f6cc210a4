/** Tokens as displayed: invisible characters are spelled out, and nothing affects the surrounding text. */

export interface Piece {
  text: string;
  kind: "plain" | "mark" | "control"; // mark: a tokeniser's marker, dimmed; control: a character spelled out
}

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/u;
const MARKS = /^(##|Ġ+|▁+|@@)/u;
const NAMES: Record<string, string> = { "\n": "\\n", "\t": "\\t", "\r": "\\r" };

/** A character spelled out: \n, \u202e. */
function spelled(char: string): string {
  const code = char.codePointAt(0) ?? 0;
  return NAMES[char] ?? `\\u${code > 0xffff ? `{${code.toString(16)}}` : code.toString(16).padStart(4, "0")}`;
}

/** A zero-width joiner between two pictographs is part of an emoji. */
const joins = (before: string | undefined, char: string, after: string | undefined): boolean =>
  char === "\u200d" && /[\p{Extended_Pictographic}\p{Emoji_Modifier}\ufe0f]$/u.test(before ?? "") && /^\p{Extended_Pictographic}/u.test(after ?? "");

/** The pieces of a token. Leading and trailing spaces are shown as ␣, an empty token as ∅. */
export function piecesOf(token: string): Piece[] {
  if (!token) return [{ text: "∅", kind: "control" }];
  const pieces: Piece[] = [];
  const push = (text: string, kind: Piece["kind"]) => {
    const last = pieces.at(-1);
    if (last && last.kind === kind) last.text += text;
    else pieces.push({ text, kind });
  };
  let rest = token;
  const mark = MARKS.exec(token);
  if (mark && mark[0].length < token.length) {
    push(mark[0], "mark");
    rest = token.slice(mark[0].length);
  }
  const chars = [...rest];
  const first = chars.findIndex((char) => char !== " ");
  const last = chars.findLastIndex((char) => char !== " ");
  chars.forEach((char, k) => {
    if (char === " " && (first < 0 || k < first || k > last)) push("␣", "mark");
    else if (HIDDEN.test(char) && !joins(chars[k - 1], char, chars[k + 1])) push(spelled(char), "control");
    else push(char, "plain");
  });
  return pieces;
}

export const plain = (token: string): string => piecesOf(token).map((piece) => piece.text).join("");

interface Segmenter {
  segment(text: string): Iterable<{ segment: string }>;
}
const intl = Intl as unknown as { Segmenter?: new (locale?: string, options?: object) => Segmenter };
const segmenter = intl.Segmenter ? new intl.Segmenter(undefined, { granularity: "grapheme" }) : null;

/** User-perceived characters (grapheme clusters). */
export const glyphs = (text: string): string[] => (segmenter ? Array.from(segmenter.segment(text), (one) => one.segment) : [...text]);

/** The pieces shortened in the middle to `width` characters. */
export function cut(pieces: readonly Piece[], width: number): Piece[] {
  const all = pieces.flatMap((piece) => glyphs(piece.text).map((text) => ({ text, kind: piece.kind })));
  if (all.length <= width) return [...pieces];
  const tail = Math.floor((width - 1) / 2);
  const head = width - 1 - tail;
  const kept: Piece[] = [];
  for (const one of [...all.slice(0, head), { text: "…", kind: "mark" as const }, ...all.slice(all.length - tail)]) {
    const last = kept.at(-1);
    if (last && last.kind === one.kind) last.text += one.text;
    else kept.push({ ...one });
  }
  return kept;
}

export const shortened = (token: string, width: number): string => cut(piecesOf(token), width).map((piece) => piece.text).join("");

/** Show every nth label, so that labels `room` pixels high fit into cells of `cell` pixels; returns n. */
export function thinned(cell: number, room: number): number {
  if (cell >= room) return 1;
  const need = room / cell;
  const nice = [2, 3, 4, 5, 8, 10, 15, 20, 25, 40, 50, 75, 100, 150, 200, 250, 500];
  return nice.find((step) => step >= need) ?? Math.ceil(need);
}
