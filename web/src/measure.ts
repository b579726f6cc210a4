/** Timings for benchmarks and tests: `window.__normscope`. */

export const measured: { firstMapAt: number | null; lastDrawMs: number } = { firstMapAt: null, lastDrawMs: 0 };

export function drawn(start: number): void {
  const now = performance.now();
  measured.lastDrawMs = now - start;
  measured.firstMapAt ??= now;
}

export function expose(state: () => object): void {
  const shown = {
    state,
    get firstMapAt() {
      return measured.firstMapAt;
    },
    get lastDrawMs() {
      return measured.lastDrawMs;
    },
  };
  Object.assign(window, { __normscope: shown });
}
