/** Pictures among the passages: as inputs of the service, and drawn. */

import { element } from "../core/dom.js";

/** The height of a thumbnail, twice that of its place in a ranking. */
const THUMBNAIL = 116;
const thumbnails = new WeakMap();

/** A passage as requests have it: its text, or its picture as a data URL. */
export const inputOf = async ({ text, file }) => (file ? { image: await dataUrlOf(file) } : text);

const dataUrlOf = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

/** A small picture of the file. */
export function thumbnailOf(file) {
  if (!thumbnails.has(file)) thumbnails.set(file, bitmapOf(file, THUMBNAIL));
  return draw(thumbnails.get(file));
}

/** The picture, `height` pixels high. */
export const pictureOf = (file, height) => draw(bitmapOf(file, height));

const bitmapOf = (file, height) =>
  createImageBitmap(file, { resizeHeight: height, resizeQuality: "high" });

/**
 * A canvas, because the content security policy allows no image from elsewhere than the server. It is
 * drawn when the bitmap is ready, and stays empty if the browser cannot read the file.
 */
function draw(decoding) {
  const canvas = element("canvas", { "aria-hidden": "true" });
  decoding.then(
    (bitmap) => {
      Object.assign(canvas, { width: bitmap.width, height: bitmap.height });
      canvas.getContext("2d").drawImage(bitmap, 0, 0);
    },
    () => {},
  );
  return canvas;
}
