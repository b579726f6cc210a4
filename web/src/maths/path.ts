/** The path of an output through the layers: which tokens it stood at before each of them, by the shares of their maps. */

/** The maps that a path goes through, one for each layer. */
export interface Layers {
  maps: readonly Float32Array[];
  width: number; // columns
  own: Int32Array; // the column of each row's token; all other columns are of another side
}

export interface Path {
  nodes: Float64Array[]; // layers + 1: the part of the output at each token, before each layer and after the last
  others: Float64Array[]; // layers: the part that each layer takes from each column of the other side
}

export interface Edge {
  layer: number; // its place among the layers
  from: number; // the row of the token before the layer; OTHER: all tokens of the other side
  to: number; // the row after it
  value: number; // its part of the output
}

export const OTHER = -1;

/** What edges can be asked to have, as parts of the output. */
export const STEPS: readonly number[] = [0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5];
const LEAST = 0.005; // what a reader begins with at least, however few the edges are
const PER_LAYER = 14; // edges between two layers that are still easy to read
export const MOST = 1500; // edges that are drawn

export function nearestStep(least: number): number {
  return STEPS.reduce((best, step, k) => (Math.abs(Math.log(step / least)) < Math.abs(Math.log(STEPS[best] / least)) ? k : best), 0);
}

/** Every part of the output that passes from a column to a row in a layer: flow(after, i) times the share of j in i. */
function each(layers: Layers, place: number, after: Float64Array, visit: (row: number, column: number, value: number) => void, least = 0): void {
  const { maps, width } = layers;
  const map = maps[place];
  for (let i = 0; i < after.length; i++) {
    if (!(after[i] > least)) continue; // an edge is no more than the node it ends in
    let sum = 0;
    for (let j = 0, k = i * width; j < width; j++, k++) sum += map[k];
    if (!(sum > 0)) continue;
    const factor = after[i] / sum;
    for (let j = 0, k = i * width; j < width; j++, k++) if (map[k] > 0) visit(i, j, map[k] * factor);
  }
}

function rowOfColumn({ own, width }: Layers): Int32Array {
  const rows = new Int32Array(width).fill(OTHER);
  own.forEach((column, row) => (rows[column] = row));
  return rows;
}

/** flow(l, j) = sum over i of flow(l + 1, i) times the share of j in i; it starts as 1 at `row` after the last layer. */
export function pathTo(layers: Layers, row: number): Path {
  const count = layers.maps.length;
  const rows = rowOfColumn(layers);
  const nodes = Array.from({ length: count + 1 }, () => new Float64Array(layers.own.length));
  const others = Array.from({ length: count }, () => new Float64Array(layers.width));
  nodes[count][row] = 1;
  for (let place = count - 1; place >= 0; place--)
    each(layers, place, nodes[place + 1], (_, j, value) => {
      if (rows[j] < 0) others[place][j] += value;
      else nodes[place][rows[j]] += value;
    });
  return { nodes, others };
}

/** The edges with at least `least` of the output, the strongest first; those of the other side count as one. */
export function edgesOf(layers: Layers, path: Path, least: number): Edge[] {
  const rows = rowOfColumn(layers);
  const found: Edge[] = [];
  for (let layer = 0; layer < layers.maps.length; layer++) {
    const foreign = new Map<number, number>();
    each(layers, layer, path.nodes[layer + 1], (to, j, value) => {
      if (rows[j] < 0) foreign.set(to, (foreign.get(to) ?? 0) + value);
      else if (value >= least) found.push({ layer, from: rows[j], to, value });
    }, least * (1 - 1e-9));
    foreign.forEach((value, to) => value >= least && found.push({ layer, from: OTHER, to, value }));
  }
  return found.sort((a, b) => b.value - a.value || a.layer - b.layer);
}

/** The step from which on the edges are few enough to be read. */
export function readable(layers: Layers, path: Path): number {
  const room = PER_LAYER * layers.maps.length;
  const edges = edgesOf(layers, path, LEAST);
  return STEPS.find((step) => step >= LEAST && edges.filter((edge) => edge.value >= step).length <= room) ?? STEPS[STEPS.length - 1];
}

/** The part of all that passes through the layers that some edges carry. */
export function carried(path: Path, edges: readonly Edge[]): number {
  const all = path.nodes.slice(1).reduce((sum, nodes) => sum + total(nodes), 0);
  return all > 0 ? edges.reduce((sum, edge) => sum + edge.value, 0) / all : 0;
}

export const total = (values: ArrayLike<number>): number => {
  let sum = 0;
  for (let k = 0; k < values.length; k++) sum += values[k];
  return sum;
};
