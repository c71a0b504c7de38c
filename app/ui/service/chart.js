/** A line chart with a time axis and a scale; the pointer or the arrow keys read its points. */

import { element, svg } from "../core/dom.js";
import { time } from "../core/format.js";
import { WINDOW } from "./history.js";

const HEIGHT = 138;
/** The space around the plot: for the scale at the left, the unit above and the times below. */
const MARGIN = { left: 50, right: 8, top: 20, bottom: 20 };
const BOTTOM = HEIGHT - MARGIN.bottom;
const ROUND = [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10];
const STEPS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, Home: -Infinity, End: Infinity };

export class Chart {
  #figure;
  #points = [];
  /** The point that the pointer or the keys have chosen. */
  #chosen = null;
  #note = "";
  #width = 0;

  /** `figure` is one of FIGURES. */
  constructor(figure) {
    this.#figure = figure;
    this.number = element("span", { class: "figure-number" }, "…");
    this.note = element("span", { class: "figure-note" });
    this.drawing = svg("svg", { role: "img", "aria-label": figure.title });
    this.node = element(
      "figure",
      { class: "chart", id: `chart-${figure.id}` },
      element("figcaption", element("span.figure-title", figure.title), this.number),
      this.drawing,
      this.note,
    );
    this.drawing.onpointerdown = this.drawing.onpointermove = (event) => this.#point(event);
    this.drawing.onpointerleave = this.drawing.onblur = () => this.#choose(null);
    this.drawing.onkeydown = (event) => this.#press(event);
    new ResizeObserver(([{ contentRect }]) => {
      this.#width = contentRect.width;
      this.#draw();
    }).observe(this.drawing);
  }

  /** Draws the points of a `History`; the number and its note describe the last point. */
  show({ points, interval }, health) {
    const { id, note } = this.#figure;
    this.#points = points;
    if (points.length) this.number.textContent = this.#format(points.at(-1)[id]);
    this.#note = interval ? note(interval, health) : "";
    if (!points.includes(this.#chosen)) this.#chosen = null;
    this.#draw();
  }

  #format(value) {
    return value === null ? "–" : this.#figure.format(value);
  }

  /** Describes a point, such as "14:02:10: 12 requests/s". */
  #describe(point) {
    const value = point[this.#figure.id];
    const unit = value === null ? "" : this.#figure.unit;
    return `${time(point.at)}: ${this.#format(value)} ${unit}`.trim();
  }

  #choose(point) {
    this.#chosen = point;
    this.#draw();
  }

  #point({ offsetX }) {
    if (this.#points.length < 2) return;
    const distance = (point) => Math.abs(this.#x(point.at) - offsetX);
    this.#choose(this.#points.reduce((a, b) => (distance(b) < distance(a) ? b : a)));
  }

  #press(event) {
    const step = STEPS[event.key];
    const last = this.#points.length - 1;
    if (!step || last < 1) return;
    event.preventDefault();
    const place = this.#chosen ? this.#points.indexOf(this.#chosen) : last + 1;
    this.#choose(this.#points[Math.max(0, Math.min(last, place + step))]);
  }

  #x(at) {
    const [first, last] = [this.#points[0].at, this.#points.at(-1).at];
    const width = this.#width - MARGIN.left - MARGIN.right;
    return MARGIN.left + (width * (at - first)) / (last - first);
  }

  #draw() {
    this.note.textContent = this.#chosen ? this.#describe(this.#chosen) : this.#note;
    if (this.#points.length < 2 || !this.#width) {
      this.drawing.replaceChildren();
      return;
    }
    const { id, title } = this.#figure;
    const last = this.#points.at(-1);
    const known = this.#points.filter((point) => point[id] !== null);
    const highest = Math.max(...known.map((point) => point[id]), 0);
    const top = 2 * this.#roundUp(highest / 2);
    const y = (value) => BOTTOM - (value / top) * (BOTTOM - MARGIN.top);
    this.drawing.replaceChildren(
      ...this.#scale(top, y),
      ...this.#times(),
      ...this.#lines(known, y),
      ...this.#mark(y),
    );
    const shown = this.#chosen ?? last;
    const attributes = {
      role: "slider",
      tabindex: 0,
      viewBox: `0 0 ${this.#width} ${HEIGHT}`,
      "aria-label": `${title}: now ${this.#format(last[id])}, highest ${this.#format(highest)}`,
      "aria-valuemin": 0,
      "aria-valuemax": this.#points.length - 1,
      "aria-valuenow": this.#points.indexOf(shown),
      "aria-valuetext": this.#describe(shown),
    };
    for (const [name, value] of Object.entries(attributes)) this.drawing.setAttribute(name, value);
  }

  /** The least round number that is not below `value`. */
  #roundUp(value) {
    if (!value) return 1;
    const power = 10 ** Math.floor(Math.log10(value));
    const round = power * ROUND.find((number) => number * power >= value);
    return this.#figure.isWhole ? Math.ceil(round) : round;
  }

  #scale(top, y) {
    const { format, unit } = this.#figure;
    const right = this.#width - MARGIN.right;
    const marks = [0, top / 2, top].flatMap((value) => [
      svg("line", { x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) }),
      svg("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, value ? format(value) : "0"),
    ]);
    return [...marks, svg("text", { x: 0, y: 10 }, unit)];
  }

  #times() {
    const [first, last] = [this.#points[0].at, this.#points.at(-1).at];
    const marks = [
      [first, "start"],
      [(first + last) / 2, "middle"],
      [last, "end"],
    ];
    return marks.map(([at, anchor]) =>
      svg("text", { x: this.#x(at), y: HEIGHT - 4, "text-anchor": anchor }, time(at)),
    );
  }

  /** A line for the points of each run; a run of one point is a dot. */
  #lines(known, y) {
    return runsOf(known).map((run) => {
      if (run.length === 1) return this.#dot(run[0], y, 2);
      const points = run.map((point) => `${this.#x(point.at)},${y(point[this.#figure.id])}`);
      return svg("polyline", { points: points.join(" ") });
    });
  }

  /** Marks the chosen point. */
  #mark(y) {
    if (!this.#chosen) return [];
    const x = this.#x(this.#chosen.at);
    const line = svg("line", { class: "mark", x1: x, x2: x, y1: MARGIN.top, y2: BOTTOM });
    return this.#chosen[this.#figure.id] === null ? [line] : [line, this.#dot(this.#chosen, y, 4)];
  }

  #dot(point, y, r) {
    return svg("circle", { cx: this.#x(point.at), cy: y(point[this.#figure.id]), r });
  }
}

/** Splits the points at pauses. */
function runsOf(points) {
  const runs = [];
  points.forEach((point, place) => {
    if (place && point.at - points[place - 1].at <= WINDOW) runs.at(-1).push(point);
    else runs.push([point]);
  });
  return runs;
}
