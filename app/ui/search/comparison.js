/** Compares, below the rankings, the same passages with a second model or number format. */

import { ApiError, embed, readAs } from "../core/api.js";
import { byId, element, numberCell, table } from "../core/dom.js";
import { bytes, count, duration, milliseconds, plural } from "../core/format.js";
import { timeForward } from "../core/timing.js";
import { LatestWork } from "../core/work.js";
import { Columns, NAMES, ROWS } from "./columns.js";
import { FORMAT, waitOf } from "./index_panel.js";
import { indexPassages } from "./indexing.js";
import { PassageIndex } from "./passage_index.js";
import { lettersOf } from "./passages.js";
import { CANDIDATES, compareRankings, merge } from "./ranking.js";

/** The size of a second index in the memory of the tab, where float16 and bits become numbers. */
const MOST_BYTES = 1e9;
const IN_TAB = { float32: 1, float16: 3, int8: 1, ubinary: 9 };
const FORWARDS = 3;
const WHOLE = "fused";
const SIDES = ["first", "second"];

export class ComparisonPanel {
  /** The index of the rankings above, and the second one. */
  #indexes = [null, null];
  #models;
  #work;
  #columns;
  #passages = [];
  /** `{model, format}` of the index above and of the second one, which is null until it is whole. */
  #sides = [null, null];
  /** The last argument of `ask`. */
  #asked = null;
  #kind = null;

  /** Calls `onChoose(chunk)` for the passage that the user chooses. */
  constructor(models, onChoose) {
    this.#models = models;
    this.#work = new LatestWork(byId("compare-message"), models.status);
    this.#columns = new Columns(byId("compare-columns"), onChoose);
    byId("compare-button").onclick = () => this.#work.run((signal) => this.#begin(signal));
    byId("compare-stop").onclick = () => this.#end();
    const list = () => {
      byId("compare-models").hidden = !models.listIn(byId("compare-model"));
    };
    models.status.addEventListener("health", list);
    list();
  }

  /** Compares with this index of passages, made by `model`, from now on. */
  search(index, passages, model) {
    this.#passages = passages;
    this.#indexes[0] = index;
    this.#sides[0] = { model, format: FORMAT };
    this.#asked = null;
    this.#end();
  }

  /**
   * Compares the rankings of a query as soon as there is a second index. `asked` has the `query`, its
   * `vectors` and what was `found` by each of them; `factsOf(chunks, signal)` gives what columns tell of
   * passages, and `onShown(rankings)` is called with what is compared, by its names.
   */
  ask(asked) {
    this.#asked = asked;
    if (this.#sides[1]) this.#work.run((signal) => this.#rank(signal));
  }

  #end() {
    this.#work.stop();
    this.#sides[1] = null;
    this.#indexes[1]?.close();
    this.#indexes[1] = null;
    byId("compare-output").hidden = true;
    this.#tell("", false);
  }

  #tell(text, isRunning) {
    byId("compare-state").textContent = text;
    byId("compare-stop").hidden = !isRunning;
  }

  /** Creates the second index. */
  async #begin(signal) {
    this.#sides[1] = null;
    this.#asked?.onShown({});
    byId("compare-output").hidden = true;
    this.#tell("", true);
    try {
      const model = await this.#models.embedder(signal, byId("compare-model").value);
      const format = byId("compare-format").value;
      refuseSame(this.#sides[0], { model, format });
      this.#indexes[1]?.close();
      const index = new PassageIndex();
      this.#indexes[1] = index;
      await indexPassages(this.#passages, index, model, format, {
        signal,
        onProgress: (progress) => this.#follow(progress, format),
        onWait: (seconds, error) => this.#tell(waitOf(seconds, error), true),
      });
      this.#sides[1] = { model, format };
    } finally {
      if (!signal.aborted) this.#tell("", false);
    }
    if (this.#asked) await this.#rank(signal);
  }

  #follow({ done, total, bytes: size }, format) {
    const expected = (size / done) * total * IN_TAB[format];
    if (expected > MOST_BYTES)
      throw new ApiError(
        413,
        "too_large",
        `In ${numbersIn(format)} these passages would take ${bytes(expected)} of this tab’s memory. ` +
          `The limit is ${bytes(MOST_BYTES)}: index fewer passages.`,
      );
    this.#tell(`${count(done)} of ${plural(total, "passage")}`, true);
  }

  async #rank(signal) {
    const asked = this.#asked;
    const [{ model: first }, { model: second }] = this.#sides;
    const isSame = first.key === second.key;
    const queryOf = async (model) =>
      (await embed([asked.query], model, readAs("query", model), { signal })).texts[0];
    const vectors = [asked.vectors, isSame ? asked.vectors : await queryOf(second)];
    const found = [asked.found, await this.#indexes[1].search(vectors[1], CANDIDATES)];
    const measured = [];
    for (const [i, index] of this.#indexes.entries())
      measured.push({
        ...(await index.measure(vectors[i])),
        forward: isSame ? null : await bestForward(asked.query, [first, second][i], signal),
      });
    signal.throwIfAborted();
    const kinds = kindsOf(found, isSame);
    if (!kinds.includes(this.#kind)) this.#kind = kinds[0];
    const show = (kind, signal) => {
      this.#kind = kind;
      showKinds(kinds, kind, (chosen) => this.#work.run((next) => show(chosen, next)));
      return this.#show(found, measured, asked, signal);
    };
    await show(this.#kind, signal);
  }

  async #show(found, measured, { factsOf, onShown }, signal) {
    const kind = this.#kind;
    const rankings = found.map((hits) => (kind === WHOLE ? merge(hits) : hits[kind]));
    const comparison = compareRankings(rankings, ROWS);
    const facts = await factsOf(Columns.shown(rankings), signal);
    signal.throwIfAborted();
    const names = this.#sides.map(nameOf);
    const columns = rankings.map((hits, i) => ({
      id: SIDES[i],
      kind,
      name: names[i],
      meaning: kind === WHOLE ? meaningOf(found[i]) : NAMES[kind].join(", "),
      hits: hits.map((hit, place) => ({ ...hit, moved: movement(comparison, hit.chunk, place + 1, i) })),
    }));
    onShown(Object.fromEntries(columns.map(({ name, hits }) => [name, hits])));
    byId("compare-output").hidden = false;
    this.#columns.show(columns, facts);
    byId("compare-summary").textContent = summaryOf(rankings, comparison);
    byId("compare-facts").replaceChildren(factsTable(names, measured, kind, this.#passages.length));
  }
}

function refuseSame(first, second) {
  const isSame = first.model.key === second.model.key;
  const words = isSame && second.model.kinds.every((kind) => kind === "sparse");
  if (words || (isSame && first.format === second.format))
    throw new ApiError(
      400,
      "same",
      words
        ? `The sparse weights of ${second.model.label} are float32 in every format. Choose another model.`
        : "This is the model and number format of the rankings above. Choose another one.",
    );
}

/** The rankings that can be compared; sparse weights do not depend on the format. */
function kindsOf([first, second], isSame) {
  const both = Object.keys(first).filter((kind) => second[kind] && !(isSame && kind === "sparse"));
  const isFused = [first, second].some((found) => Object.keys(found).length > 1);
  return isFused || !both.length ? [...both, WHOLE] : both;
}

function showKinds(kinds, chosen, choose) {
  const buttons = kinds.map((kind) => {
    const state = { type: "button", "aria-pressed": `${kind === chosen}` };
    const button = element("button", state, NAMES[kind][0]);
    button.onclick = () => choose(kind);
    return button;
  });
  byId("compare-kinds").replaceChildren(...buttons);
}

const nameOf = ({ model, format }) => `${model.label}, ${numbersIn(format)}`;
const numbersIn = (format) => (format === "ubinary" ? "bits" : format);
const meaningOf = (found) => Object.keys(found).map((kind) => NAMES[kind][0]).join(" + ");

/** Marks lost passages in the first ranking, and moved ones in the second. */
function movement({ placeIn }, chunk, place, side) {
  const other = placeIn[1 - side].get(chunk);
  const lost = placeIn[1 - side].size < CANDIDATES ? "not found" : `below ${CANDIDATES}`;
  if (side === 0) return other <= ROWS ? "" : `then ${other ?? lost}`;
  if (!other) return `new, was ${lost}`;
  if (other === place) return "same";
  return `${other > place ? "up" : "down"} ${Math.abs(other - place)}, was ${other}`;
}

function summaryOf(rankings, { placeIn: [before, after], shared, still }) {
  const shown = Math.min(ROWS, Math.max(...rankings.map((hits) => hits.length)));
  const moves = Columns.shown(rankings)
    .filter((chunk) => before.has(chunk) && after.has(chunk))
    .map((chunk) => [Math.abs(before.get(chunk) - after.get(chunk)), chunk])
    .sort(([a], [b]) => b - a);
  const [furthest, chunk] = moves[0] ?? [0];
  const told = furthest
    ? ` Passage ${lettersOf(chunk)} moves most, from place ${before.get(chunk)} to ${after.get(chunk)}.`
    : "";
  return `Of the first ${plural(shown, "passage")}, ${shared} are in both rankings, ${still} at the same place.${told}`;
}

/** The shortest of several forwards for a query, in milliseconds; null if the device is busy. */
async function bestForward(query, model, signal) {
  const times = [];
  while (times.length < FORWARDS && !times.includes(null))
    times.push(await timeForward([query], model, readAs("query", model), signal));
  return times.includes(null) ? null : Math.min(...times);
}

function factsTable(names, measured, kind, total) {
  const cells = (of) => measured.map((side) => numberCell(of(side) ?? "–"));
  const kinds = Object.keys(NAMES).filter((name) => measured.some((side) => side[name]));
  const scored = (side) => {
    const chosen = kind === WHOLE ? kinds.map((name) => side[name]).filter(Boolean) : [side[kind]];
    return milliseconds(chosen.reduce((sum, { milliseconds: time }) => sum + time, 0));
  };
  const size = (name) => (side) => side[name] && count(side[name].bytes / side[name].vectors);
  const rows = kinds.map((name) => [`${NAMES[name][0]}, bytes per vector`, ...cells(size(name))]);
  rows.push([`Time to score ${plural(total, "passage")}`, ...cells(scored)]);
  if (measured.some(({ forward }) => forward !== null))
    rows.push(["Time to embed the query", ...cells(({ forward }) => forward && milliseconds(forward))]);
  return table({ class: "compared" }, ["Measured", ...names], rows);
}
