/** 16-bit logarithmic cells: code 0 is exactly 0, code q > 0 is exp(lo + (q - 1) (hi - lo) / 65534). */

export function log16Table(lo: number, hi: number): Float32Array {
  const table = new Float32Array(65536);
  const step = (hi - lo) / 65534;
  for (let q = 1; q < 65536; q++) table[q] = Math.exp(lo + (q - 1) * step);
  return table;
}

/** Decode `count` codes starting at byte `offset`. */
export function decode(bytes: Uint8Array, offset: number, count: number, table: Float32Array): Float32Array {
  const cells = new Float32Array(count);
  for (let k = 0, at = offset; k < count; k++, at += 2) cells[k] = table[bytes[at] | (bytes[at + 1] << 8)];
  return cells;
}
