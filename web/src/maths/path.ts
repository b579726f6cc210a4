/** The path of an output back through the layers, following the shares of their maps. */

/** The maps that a path follows, one for each layer. */
export interface Layers {
  maps: readonly Float32Array[];
  width: number; // number of columns
  own: Int32Array; // the column of each row's token; all other columns belong to another side
}

export interface Path {
  nodes: Float64Array[]; // layers + 1: the share of the output at each token, before each layer and after the last
  others: Float64Array[]; // layers: the share that enters at each layer from each column of the other side
}

export interface Edge {
  layer: number; // index among the layers
  from: number; // the row of the token before the layer; OTHER: all tokens of the other side
  to: number; // the row after it
  value: number; // its share of the output
}

export const OTHER = -1;

/** The steps of the edge threshold, as shares of the output. */
export const STEPS: readonly number[] = [0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5];
const LEAST = 0.005; // smallest initial threshold, however few the edges
const PER_LAYER = 14; // number of edges per layer that is still easy to read
export const MOST = 1500; // maximum number of edges drawn

export function nearestStep(least: number): number {
  return STEPS.reduce((best, step, k) => (Math.abs(Math.log(step / least)) < Math.abs(Math.log(STEPS[best] / least)) ? k : best), 0);
}

/** Every edge of a layer: flow(l + 1, i) times the share of j in i. */
function each(layers: Layers, place: number, after: Float64Array, visit: (row: number, column: number, value: number) => void, least = 0): void {
  const { maps, width } = layers;
  const map = maps[place];
  for (let i = 0; i < after.length; i++) {
    if (!(after[i] > least)) continue; // an edge cannot exceed the node it ends in
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

/** flow(l, j) = sum over i of flow(l + 1, i) times the share of j in i, starting from 1 at `row` after the last layer. */
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

/** The edges of at least `least` of the output, strongest first; all tokens of the other side are merged into one. */
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

/** The smallest step that leaves few enough edges to read. */
export function readable(layers: Layers, path: Path): number {
  const room = PER_LAYER * layers.maps.length;
  const edges = edgesOf(layers, path, LEAST);
  return STEPS.find((step) => step >= LEAST && edges.filter((edge) => edge.value >= step).length <= room) ?? STEPS[STEPS.length - 1];
}

/** The share of the whole flow through all layers that these edges carry. */
export function carried(path: Path, edges: readonly Edge[]): number {
  const all = path.nodes.slice(1).reduce((sum, nodes) => sum + total(nodes), 0);
  return all > 0 ? edges.reduce((sum, edge) => sum + edge.value, 0) / all : 0;
}

export const total = (values: ArrayLike<number>): number => {
  let sum = 0;
  for (let k = 0; k < values.length; k++) sum += values[k];
  return sum;
};
