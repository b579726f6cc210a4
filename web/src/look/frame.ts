/** The layout of a map and its labels. */

export interface Frame {
  left: number; // room for row labels
  top: number; // room for column labels
  right: number; // room to the right of the map
  cell: number; // size of a cell when the whole map is shown
  width: number; // of the map
  height: number;
  font: number;
  slanted: boolean;
}

export const CHARACTER = 0.615; // width of a monospace character as a fraction of the font size
const LEAN = Math.sin((52 * Math.PI) / 180);

export interface Wanted {
  rows: number;
  columns: number;
  rowText: number; // characters of the longest label
  columnText: number;
  room: number; // available width
  tall: number; // maximum height of the map
  aside: number; // width reserved to the right of the map
}

export function frameOf({ rows, columns, rowText, columnText, room, tall, aside }: Wanted): Frame {
  const font = room < 480 || Math.max(rows, columns) > 40 ? 10.5 : 12;
  const letter = font * CHARACTER;
  const left = Math.round(rowText * letter + 12);
  const top = Math.round(columnText * letter * LEAN + 14);
  const overhang = Math.round(columnText * letter * 0.6); // slanted labels extend to the right
  const right = Math.max(aside, Math.min(overhang, 60)); // they may extend into the reserved width
  const fit = Math.min((room - left - right) / columns, tall / rows, 44);
  const cell = fit >= 6 ? Math.floor(fit) : Math.max(fit, 0.1);
  return { left, top, right, cell, width: cell * columns, height: cell * rows, font, slanted: cell >= 9 };
}

const LABELS = 84; // pixels for the labels above the map and the margin below
const LEAST = 12; // smallest cell, in pixels, of the map of a long sentence

/** The maximum height of a map that starts `above` pixels below the top of the page: short sentences fit the window. */
export const tallest = (window: number, above: number, rows: number): number =>
  Math.max(280, window - Math.min(Math.max(above, 300), 0.6 * window) - LABELS, Math.min(0.78 * window, 900, LEAST * rows));

/** The visible part of a map: its first row and column (possibly fractional), and the cell size. */
export interface Sight {
  x: number;
  y: number;
  cell: number;
}

/** The sight, moved so that it stays within the map. */
export function bounded(sight: Sight, frame: Frame, rows: number, columns: number): Sight {
  const cell = Math.min(Math.max(sight.cell, frame.cell), Math.max(40, frame.cell));
  const clamp = (value: number, most: number) => Math.min(Math.max(0, value), Math.max(0, most));
  return { cell, x: clamp(sight.x, columns - frame.width / cell), y: clamp(sight.y, rows - frame.height / cell) };
}

/** Zoom by a factor around a point of the map, given in pixels. */
export function zoomed(sight: Sight, factor: number, px: number, py: number, frame: Frame, rows: number, columns: number): Sight {
  const cell = Math.min(Math.max(sight.cell * factor, frame.cell), Math.max(40, frame.cell));
  const x = sight.x + px / sight.cell - px / cell;
  const y = sight.y + py / sight.cell - py / cell;
  return bounded({ x, y, cell }, frame, rows, columns);
}
