import type { Plugin } from "vite";

/** Spell what would end or bend an inline <script> so that it means the same in a string and nothing to HTML. */
export const inlineSafe = (code: string): string =>
  code.replace(/<\/(script)/gi, "<\\/$1").replace(/<!--/g, "<\\!--").replace(/<(script)/gi, "\\x3c$1");

/** The built scripts can be put between <script> tags as they are. */
export function inlineSafePlugin(): Plugin {
  return {
    name: "inline-safe",
    generateBundle(_options, bundle) {
      for (const file of Object.values(bundle)) if (file.type === "chunk") file.code = inlineSafe(file.code);
    },
  };
}
