/** Maps as CSV, one line per cell. */

import type { Label } from "../data/header";
import type { Plane } from "../maths/plane";

export interface Sheet {
  name: string;
  layer: number;
  scope: string;
  rows: Label[];
  columns: Label[];
  plane: Plane;
}

/** A field quoted as in RFC 4180. Spreadsheets run a text that begins like a formula, so an apostrophe goes before it. */
export function field(text: string): string {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
}

const HEAD = "document,layer,scope,output_side,output_position,output_token,input_side,input_position,input_token,value";

/** Positions and layers are counted from 1, as on the page. */
export function csvOf(sheets: readonly Sheet[]): string {
  const lines = [HEAD];
  for (const sheet of sheets) {
    const start = [sheet.name, String(sheet.layer + 1), sheet.scope].map(field).join(",");
    const ends = sheet.columns.map((label) => `${field(label.side)},${label.position + 1},${field(label.token)}`);
    sheet.rows.forEach((label, i) => {
      const middle = `${start},${field(label.side)},${label.position + 1},${field(label.token)}`;
      ends.forEach((end, j) => lines.push(`${middle},${end},${Number(sheet.plane.cells[i * sheet.plane.columns + j].toPrecision(7))}`));
    });
  }
  return lines.join("\r\n") + "\r\n";
}
