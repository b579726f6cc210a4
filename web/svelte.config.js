import { vitePreprocess } from "@sveltejs/vite-plugin-svelte";

// Styles travel inside the script: one file to inline, and they follow a component into a shadow root.
export default {
  preprocess: vitePreprocess({ script: false }),
  compilerOptions: { runes: true, css: "injected" },
};
