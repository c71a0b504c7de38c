/** A small line chart of the last fifteen minutes. */

import { element, svg } from "../core/dom.js";

const WIDTH = 240;
const HEIGHT = 56;
const SECONDS = 900;
/** Between two figures, above which the line is broken: there was no server. */
const GAP = 15;

export class Chart {
  #figure;

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

  /** Draws all `recent` figures, the oldest first; the number and its note are the last one's. */
  show(recent, present, health) {
    const { id, title, format, note } = this.#figure;
    const last = recent.at(-1);
    const known = recent.filter((figures) => figures[id] !== null);
    const highest = Math.max(...known.map((figures) => figures[id]), 0);
    const x = ({ age }) => WIDTH * (1 - age / SECONDS);
    const y = (figures) => HEIGHT - 2 - (figures[id] / (highest || 1)) * (HEIGHT - 6);
    const runs = runsOf(known);
    const points = (run) => run.map((figures) => `${x(figures)},${y(figures)}`).join(" ");
    const lines = runs.map((run) => svg("polyline", { class: "line", points: points(run) }));
    const areas = runs.map((run) =>
      svg("polygon", {
        class: "area",
        points: `${x(run[0])},${HEIGHT} ${points(run)} ${x(run.at(-1))},${HEIGHT}`,
      }),
    );
    this.number.textContent = format(last[id]);
    this.note.textContent = note(last, present, health);
    this.drawing.replaceChildren(...areas, ...lines);
    this.drawing.setAttribute(
      "aria-label",
      known.length
        ? `${title}: now ${format(last[id])}, highest ${format(highest)}`
        : `${title}: nothing measured yet`,
    );
  }
}

/** The figures that follow each other without a gap. */
function runsOf(known) {
  const runs = [];
  known.forEach((figures, place) => {
    if (place && known[place - 1].age - figures.age < GAP) runs.at(-1).push(figures);
    else runs.push([figures]);
  });
  return runs;
}
