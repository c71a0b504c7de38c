/** A small line chart of the last minutes. */

import { element, svg } from "../core/dom.js";

const WIDTH = 240;
const HEIGHT = 56;
const MOST_POINTS = 90;

export class Chart {
  #figure;
  #points = [];

  /** `figure` is one of FIGURES. */
  constructor(figure) {
    this.#figure = figure;
    this.number = element("span", { class: "figure-number" }, "…");
    this.note = element("span", { class: "figure-note" });
    this.drawing = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": figure.title,
    });
    this.node = element(
      "figure",
      { class: "chart", id: `chart-${figure.id}` },
      element(
        "figcaption",
        {},
        element("span", { class: "figure-title" }, figure.title),
        this.number,
      ),
      this.drawing,
      this.note,
    );
  }

  /** Adds a number, or null where there was nothing to measure. */
  add(value, note) {
    this.#points = [...this.#points, value].slice(-MOST_POINTS);
    this.number.textContent = this.#figure.format(value);
    this.note.textContent = note;
    this.#draw();
  }

  /** A break in the line: the server was away. */
  skip() {
    this.#points = [...this.#points, null].slice(-MOST_POINTS);
    this.#draw();
  }

  #draw() {
    const known = this.#points.filter((point) => point !== null);
    const highest = Math.max(...known, 0) || 1;
    const x = (place) => WIDTH - ((this.#points.length - 1 - place) * WIDTH) / (MOST_POINTS - 1);
    const y = (value) => HEIGHT - 2 - (value / highest) * (HEIGHT - 6);
    const runs = runsOf(this.#points).map((run) =>
      run.map(([place, value]) => `${x(place)},${y(value)}`),
    );
    const lines = runs.map((points) =>
      svg("polyline", { class: "line", points: points.join(" ") }),
    );
    const areas = runs.map((points) => {
      const [first, last] = [points[0], points.at(-1)].map((point) => point.split(",")[0]);
      return svg("polygon", {
        class: "area",
        points: `${first},${HEIGHT} ${points.join(" ")} ${last},${HEIGHT}`,
      });
    });
    this.drawing.replaceChildren(...areas, ...lines);
    const { format, title } = this.#figure;
    this.drawing.setAttribute(
      "aria-label",
      known.length
        ? `${title}: now ${format(this.#points.at(-1))}, highest ${format(Math.max(...known))}`
        : `${title}: nothing measured yet`,
    );
  }
}

/** The points that follow each other without a gap, as `[place, value]`. */
function runsOf(points) {
  const runs = [[]];
  points.forEach((value, place) => {
    if (value !== null) runs.at(-1).push([place, value]);
    else if (runs.at(-1).length) runs.push([]);
  });
  return runs.filter((run) => run.length);
}
