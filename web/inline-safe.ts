import type { Plugin } from "vite";

/** Escape everything that would end or alter an inline <script>, without changing the meaning of string literals. */
export const inlineSafe = (code: string): string =>
  code.replace(/<\/(script)/gi, "<\\/$1").replace(/<!--/g, "<\\!--").replace(/<(script)/gi, "\\x3c$1");

/** Make the built scripts safe to embed between <script> tags. */
export function inlineSafePlugin(): Plugin {
  return {
    name: "inline-safe",
    generateBundle(_options, bundle) {
      for (const file of Object.values(bundle)) if (file.type === "chunk") file.code = inlineSafe(file.code);
    },
  };
}
