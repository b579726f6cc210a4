import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";
import { inlineSafePlugin } from "./inline-safe.ts";

// Two builds of one viewer: viewer.js, a classic script for `normscope serve` and the HTML file, and widget.js, a module
// for notebooks. Both include their styles.
export default defineConfig(({ mode }) => ({
  plugins: [svelte(), inlineSafePlugin()],
  publicDir: false,
  build: {
    outDir: "../src/normscope/view/static",
    emptyOutDir: false,
    target: "es2022",
    sourcemap: false,
    modulePreload: false,
    minify: "oxc",
    rolldownOptions: { output: { minify: true } },
    lib:
      mode === "widget"
        ? { entry: "src/widget.ts", formats: ["es"], fileName: () => "widget.js" }
        : { entry: "src/viewer.ts", formats: ["iife"], name: "normscope", fileName: () => "viewer.js" },
  },
}));
