/** Whether the surrounding page is dark: notebooks mark their document, otherwise the system setting counts. */

function said(): boolean | null {
  const { body } = document;
  if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false"; // JupyterLab
  if (/\bvscode-(dark|light|high-contrast)\b/.test(body.className)) return !/\bvscode-(light|high-contrast-light)\b/.test(body.className);
  if (document.documentElement.getAttribute("theme") === "dark") return true; // Colab
  return null;
}

/** Call `tell` now and on every change; returns a function that stops it. */
export function watchNight(tell: (dark: boolean) => void): () => void {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const look = () => tell(said() ?? system.matches);
  const changes = new MutationObserver(look);
  changes.observe(document.body, { attributes: true, attributeFilter: ["class", "data-jp-theme-light"] });
  system.addEventListener("change", look);
  look();
  return () => {
    changes.disconnect();
    system.removeEventListener("change", look);
  };
}
