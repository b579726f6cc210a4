/** Shapes in the cells of a map that are large enough: own tokens on their own scale are discs, and negative changes have
 *  a minus sign, so that neither is read from its colour alone. */

import { placeOn, type Scale } from "../maths/scale";

export const LEGIBLE = 9; // pixels of the smallest cell with shapes and gaps
const WIDEST = 0.46; // radius of the largest disc, in cells
const FAINT = 0.08; // changes below this place on the scale have no sign

/** The radius of an own token's disc, in cells: its area is the place of the value on the scale of own tokens. */
export const discRadius = (value: number, scale: Scale): number => WIDEST * Math.sqrt(Math.abs(placeOn(value, scale, true)));

/** The place of a change that has a minus sign, from 0 to 1; null if it has none. */
export function minusAt(value: number, scale: Scale): number | null {
  if (!scale.signed || !(value < 0)) return null;
  const place = -placeOn(value, scale);
  return place < FAINT ? null : place;
}

/** Whether the ends of the scale are so dark (on a light page) or light (on a dark one) that a sign needs the page's colour. */
export const isDeep = (place: number): boolean => place > 0.45;
