/** The similarity of each query token to each passage token, drawn on a canvas. */

import { element } from "../core/dom.js";
import { decimal, shortened } from "../core/format.js";

const CELL = 22;
const GAP = 2;
const LABELS = { width: 100, height: 84 };
const TURN = -Math.PI / 3.2;
const HINT = "Point at a cell, or use the arrow keys, to see its similarity.";

/** An element with the canvas; its colours follow the theme. */
export function renderHeatMap(comparison) {
  const { rows, columns } = comparison;
  const canvas = element("canvas", { "aria-hidden": "true" });
  const readout = element("p", { class: "readout", role: "status" }, HINT);
  const frame = element(
    "div",
    {
      class: "scroll heat",
      tabindex: "0",
      role: "group",
      "aria-label":
        "Heat map of query words against passage words; move with the arrow keys to read the numbers below",
    },
    canvas,
  );
  let cell = null;

  const paint = () => drawMap(canvas, comparison, cell);
  const select = (row, column) => {
    cell = { row: clamp(row, rows), column: clamp(column, columns) };
    readout.textContent = numbersOf(comparison, cell);
    paint();
  };
  canvas.onpointermove = ({ offsetX, offsetY }) => {
    const [row, column] = [
      Math.floor((offsetY - LABELS.height) / CELL),
      Math.floor((offsetX - LABELS.width) / CELL),
    ];
    if (row >= 0 && column >= 0 && row < rows && column < columns) select(row, column);
  };
  frame.onkeydown = (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[
      event.key
    ];
    if (!move) return;
    event.preventDefault();
    const { row, column } = cell ?? { row: -move[0], column: -move[1] };
    select(row + move[0], column + move[1]);
    keepInSight(frame, cell);
  };
  document.addEventListener("themechange", function repaint() {
    if (canvas.isConnected) paint();
    else document.removeEventListener("themechange", repaint);
  });
  // The colours come from the document, to which the canvas is added later.
  requestAnimationFrame(paint);
  return element("div", {}, frame, readout);
}

const clamp = (place, length) => Math.max(0, Math.min(length - 1, place));

function numbersOf({ matrix, columns, queryLabels, passageLabels, best }, { row, column }) {
  const value = decimal(matrix[row * columns + column]);
  const isBest = best[row].column === column ? ", its best match" : "";
  const [asked, found] = [queryLabels[row], passageLabels[column]].map(shortened);
  return `${asked} × ${found}: ${value}${isBest}`;
}

function keepInSight(frame, { column }) {
  const left = LABELS.width + column * CELL;
  if (left < frame.scrollLeft + LABELS.width) frame.scrollLeft = left - LABELS.width;
  if (left + CELL > frame.scrollLeft + frame.clientWidth)
    frame.scrollLeft = left + CELL - frame.clientWidth;
}

function drawMap(canvas, comparison, cell) {
  const { rows, columns } = comparison;
  const width = LABELS.width + columns * CELL + LABELS.height / 2;
  const height = LABELS.height + rows * CELL;
  const scale = devicePixelRatio;
  Object.assign(canvas, { width: width * scale, height: height * scale });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  drawCells(context, comparison, cell, coloursOf(canvas));
  drawLabels(context, comparison, cell, coloursOf(canvas));
}

function coloursOf(canvas) {
  const style = getComputedStyle(canvas);
  return {
    accent: style.accentColor,
    ink: style.color,
    quiet: style.outlineColor,
    font: style.fontFamily,
  };
}

function drawCells(context, { matrix, rows, columns, best }, cell, { accent, ink }) {
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const x = LABELS.width + column * CELL;
      const y = LABELS.height + row * CELL;
      context.globalAlpha = 0.05 + 0.95 * Math.max(0, matrix[row * columns + column]) ** 1.6;
      context.fillStyle = accent;
      context.beginPath();
      context.roundRect(x, y, CELL - GAP, CELL - GAP, 3);
      context.fill();
      context.globalAlpha = 1;
      const isCell = cell?.row === row && cell?.column === column;
      if (!isCell && best[row].column !== column) continue;
      context.strokeStyle = ink;
      context.lineWidth = isCell ? 2.5 : 1.25;
      context.stroke();
    }
  }
}

function drawLabels(context, { queryLabels, passageLabels }, cell, { ink, quiet, font }) {
  const write = (text, isChosen) => {
    context.fillStyle = isChosen ? ink : quiet;
    context.font = `${isChosen ? 600 : 400} 12px ${font}`;
    context.fillText(text.length > 14 ? `${text.slice(0, 13)}…` : text, 0, 0);
  };
  context.textBaseline = "middle";
  queryLabels.forEach((label, row) => {
    context.setTransform(
      new DOMMatrix([devicePixelRatio, 0, 0, devicePixelRatio, 0, 0]).translate(
        LABELS.width - 10,
        LABELS.height + row * CELL + CELL / 2 - 1,
      ),
    );
    context.textAlign = "right";
    write(label, cell?.row === row);
  });
  passageLabels.forEach((label, column) => {
    context.setTransform(
      new DOMMatrix([devicePixelRatio, 0, 0, devicePixelRatio, 0, 0])
        .translate(LABELS.width + column * CELL + CELL / 2, LABELS.height - 8)
        .rotate((TURN * 180) / Math.PI),
    );
    context.textAlign = "left";
    write(label, cell?.column === column);
  });
}
