import { vitePreprocess } from "@sveltejs/vite-plugin-svelte";

// Styles are part of the script: a single file to inline, and they work inside a shadow root.
export default {
  preprocess: vitePreprocess({ script: false }),
  compilerOptions: { runes: true, css: "injected" },
};
