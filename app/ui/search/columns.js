/** The rankings side by side, with a line that follows each passage from column to column. */

import { element, svg } from "../core/dom.js";
import { decimal } from "../core/format.js";
import { piecesOf, plainTokens } from "../core/tokens.js";
import { nameOf } from "./passages.js";
import { thumbnailOf } from "./pictures.js";

export const NAMES = {
  dense: ["Dense", "by meaning"],
  sparse: ["Sparse", "by words"],
  colbert: ["ColBERT", "by words in context"],
  fused: ["Fused", "rankings combined"],
  reranked: ["Reranked", "by the reranker"],
};
export const ROWS = 10;
/** Characters of a snippet, and the pieces of text that it shows before the first mark. */
const SNIPPET = 110;
const BEFORE_MARK = 6;
/** Words of less than this share of the heaviest weight are not marked. */
const FAINT = 0.12;
const DIGITS = { fused: 4 };

export class Columns {
  #onChoose;
  #chosen = null;

  /** Calls `onChoose(chunk)` for the passage that the user chooses in `box`. */
  constructor(box, onChoose) {
    this.#onChoose = onChoose;
    this.box = box;
    this.lines = svg("svg", { class: "lines", "aria-hidden": "true" });
    new ResizeObserver(() => this.#drawLines()).observe(this.box);
    this.box.onpointerover = (event) => this.#follow(chunkAt(event.target));
    this.box.onpointerleave = () => this.#follow(null);
    this.box.addEventListener("focusin", (event) => this.#follow(chunkAt(event.target)));
    this.box.onkeydown = (event) => this.#move(event);
  }

  /** The shown passages, without duplicates. */
  static shown(rankings) {
    return [
      ...new Set(
        Object.values(rankings).flatMap((hits) =>
          (hits ?? []).slice(0, ROWS).map((hit) => hit.chunk),
        ),
      ),
    ];
  }

  /**
   * Each column has an `id` and the `hits` of a `kind`. They are null while they are pending, or if
   * there are none for a `reason`. `name` and `meaning` replace those of the kind, and a hit may have
   * `moved`. `facts` has all `passages`, the `tokens` of the shown ones, and the weights of the query's
   * `terms` by token id.
   */
  show(columns, facts) {
    this.box.replaceChildren(this.lines, ...columns.map((column) => this.#column(column, facts)));
    this.#mark();
    this.#drawLines();
  }

  choose(chunk) {
    this.#chosen = chunk;
    this.#mark();
    this.#onChoose(chunk);
  }

  #column({ id, kind, hits, reason, name = NAMES[kind][0], meaning = NAMES[kind][1] }, facts) {
    const title = `column-${id}`;
    const empty = hits === null ? reason || "…" : "No passage shares a word with the query.";
    return element(
      "section",
      { class: `column ${id}`, "aria-labelledby": title },
      element("h3", { id: title }, name, element("small", meaning)),
      hits?.length
        ? element(
            "ol",
            hits.slice(0, ROWS).map((hit, i) => element("li", this.#hit(kind, hit, i + 1, facts))),
          )
        : element("p.quiet", empty),
    );
  }

  #hit(kind, { chunk, score, moved }, rank, { passages, tokens, terms }) {
    const { text, file } = passages[chunk];
    const button = element(
      "button",
      { type: "button", class: "hit", "data-chunk": chunk },
      element(
        "span.hit-head",
        element("span.rank", rank),
        element("span.name", nameOf(chunk, passages)),
        moved && element("span.moved", moved),
        element("span.number", decimal(score, DIGITS[kind] ?? 3)),
      ),
      file ? thumbnailOf(file) : element("span.snippet", snippet(text, tokens.get(chunk), terms)),
    );
    button.onclick = () => this.choose(chunk);
    return button;
  }

  /** The arrow keys move in and between the columns. */
  #move(event) {
    const step = { ArrowDown: [0, 1], ArrowUp: [0, -1], ArrowRight: [1, 0], ArrowLeft: [-1, 0] }[
      event.key
    ];
    const column = event.target.closest(".column");
    if (!step || !column) return;
    const columns = [...this.box.querySelectorAll(".column")];
    const place = [...column.querySelectorAll(".hit")].indexOf(event.target);
    const hits = columns[columns.indexOf(column) + step[0]]?.querySelectorAll(".hit") ?? [];
    const next = hits[Math.min(hits.length - 1, place + step[1])];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  #mark() {
    for (const hit of this.box.querySelectorAll(".hit")) {
      hit.setAttribute("aria-pressed", Number(hit.dataset.chunk) === this.#chosen);
    }
    this.#follow(null);
  }

  /** Emphasizes a passage in all columns; by default the chosen one. */
  #follow(chunk) {
    const followed = chunk ?? this.#chosen;
    for (const hit of this.box.querySelectorAll("[data-chunk]")) {
      hit.classList.toggle("followed", Number(hit.dataset.chunk) === followed);
    }
  }

  #drawLines() {
    const frame = this.box.getBoundingClientRect();
    this.lines.setAttribute("viewBox", `0 0 ${this.box.scrollWidth} ${frame.height}`);
    const columns = [...this.box.querySelectorAll(".column")].map(
      (column) =>
        new Map([...column.querySelectorAll(".hit")].map((hit) => [hit.dataset.chunk, hit])),
    );
    const paths = columns
      .slice(1)
      .flatMap((right, place) => linesBetween(columns[place], right, frame));
    this.lines.replaceChildren(...paths);
    this.#follow(null);
  }
}

const chunkAt = (target) => {
  const hit = target.closest(".hit");
  return hit && Number(hit.dataset.chunk);
};

function linesBetween(left, right, frame) {
  return [...left]
    .filter(([chunk]) => right.has(chunk))
    .map(([chunk, hit]) => {
      const [from, to] = [hit.getBoundingClientRect(), right.get(chunk).getBoundingClientRect()];
      const [x1, y1] = [from.right - frame.left, from.top + from.height / 2 - frame.top];
      const [x2, y2] = [to.left - frame.left, to.top + to.height / 2 - frame.top];
      const bend = (x2 - x1) / 2;
      return svg("path", {
        d: `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`,
        "data-chunk": chunk,
      });
    });
}

/** The part of a passage around the first word of the query; words are marked by their weight. */
function snippet(text, tokens, terms) {
  const plain = plainTokens(tokens);
  const heaviest = Math.max(...terms.values(), 1e-9);
  const pieces = piecesOf(text, tokens).map((piece) => ({
    text: piece.text,
    share: Math.max(
      0,
      ...piece.tokens.map((place) => (terms.get(plain[place].id) ?? 0) / heaviest),
    ),
  }));
  const { begin, end } = windowOf(pieces);
  const nodes = pieces
    .slice(begin, end)
    .map((piece) =>
      piece.share > FAINT
        ? element("mark", { style: { "--share": piece.share } }, piece.text)
        : piece.text,
    );
  return [begin ? "… " : "", ...nodes, end < pieces.length ? "…" : ""];
}

/** The limits of a snippet: from a little before the first marked piece, without a short rest. */
function windowOf(pieces) {
  const first = pieces.findIndex((piece) => piece.share > FAINT);
  let begin = first > BEFORE_MARK * 2 ? first - BEFORE_MARK : 0;
  const length = (from, to) =>
    pieces.slice(from, to).reduce((sum, piece) => sum + piece.text.length, 0);
  while (begin && length(begin) < SNIPPET) begin--;
  let end = begin + 1;
  while (end < pieces.length && length(begin, end) < SNIPPET) end++;
  return { begin, end };
}
