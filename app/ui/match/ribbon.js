/** The query above, the passage below, and a line from each query token to its best match. */

import { element, roving, svg } from "../core/dom.js";
import { decimal, shortened } from "../core/format.js";

/** The similarities of the faintest and of the strongest line. */
const FAINT = 0.15;
const STRONG = 0.9;
const HINT = "Point at a word of the query, or use the arrow keys, to see what it matches.";

/** An element that draws the comparison, and draws it again when its width changes. */
export function renderRibbon(comparison) {
  const { queryLabels, best } = comparison.tokens;
  const sharedTexts = new Set(comparison.shared?.map((term) => term.text));
  const chips = queryLabels.map((label, row) =>
    element(
      "span",
      {
        class: sharedTexts.has(label.toLowerCase()) ? "chip shared" : "chip",
        role: "img",
        "aria-label": sentenceOf(comparison.tokens, row),
        style: { "--share": shareOf(best[row].value) },
      },
      label,
    ),
  );
  const shown = chips.filter((_, row) => isWord(comparison.tokens, row));
  const words = passageWords(comparison);
  const lines = svg("svg", { class: "lines", "aria-hidden": "true" });
  const readout = element("p", { class: "readout", "aria-hidden": "true" }, HINT);
  const query = element(
    "div",
    { class: "chips", role: "group", "aria-label": "The query, word by word" },
    ...shown,
  );
  const passage = element("p", { class: "words" }, ...words.nodes);
  const box = element("div", { class: "ribbon" }, lines, query, passage);
  const figure = element("div", {}, box, readout);

  shadeBest(comparison.tokens, words.byColumn);
  roving(query, shown, (chip) => {
    const row = chips.indexOf(chip);
    readout.textContent = chip.getAttribute("aria-label");
    shadeRow(comparison.tokens, words.byColumn, row);
    for (const line of lines.children)
      line.classList.toggle("dim", Number(line.dataset.row) !== row);
  });
  const release = () => {
    readout.textContent = HINT;
    shadeBest(comparison.tokens, words.byColumn);
    for (const line of lines.children) line.classList.remove("dim");
  };
  query.addEventListener("pointerleave", release);
  query.addEventListener("focusout", release);
  new ResizeObserver(() => draw(lines, box, chips, words.byColumn, best)).observe(box);
  return figure;
}

/** Whether a row is drawn: special tokens of a query are shown only with tokens. */
const isWord = ({ isPieces, queryPlaces }, row) => isPieces || queryPlaces[row] !== null;

function sentenceOf({ queryLabels, passageLabels, best }, row) {
  const { column, value } = best[row];
  const [asked, found] = [queryLabels[row], passageLabels[column]].map(shortened);
  return `${asked} best matches ${found}, similarity ${decimal(value)}`;
}

const shareOf = (value) => Math.max(0, Math.min(1, (value - FAINT) / (STRONG - FAINT)));

/** The passage as nodes, and the node of each column of the matrix. */
function passageWords({ tokens, shared }) {
  const { pieces, places, passageLabels, isPieces, best } = tokens;
  const texts = new Set(shared?.map((term) => term.text));
  const columns = new Map(places.map((place, column) => [place, column]));
  const last = Math.max(-1, ...places.map((place) => place ?? -1));
  const isBehind = ({ tokens }) => tokens.some((place) => place > last);
  // Otherwise the rest is punctuation that the model leaves out.
  const isCut = pieces.some((piece) => isBehind(piece) && /[\p{L}\p{N}]/u.test(piece.text));
  const byColumn = [];
  const nodes = pieces.map((piece) => {
    const read = piece.tokens.filter((place) => columns.has(place));
    if (!read.length)
      return isCut && isBehind(piece) ? element("span", { class: "cut" }, piece.text) : piece.text;
    const isShared = texts.has(piece.text.trim().toLowerCase());
    const node = element("span", { class: isShared ? "word shared" : "word" }, piece.text);
    for (const place of read) byColumn[columns.get(place)] = node;
    return node;
  });
  const first = places.findIndex((place) => place !== null);
  const [before, after] = [[], []];
  places.forEach((place, column) => {
    if (byColumn[column]) return;
    byColumn[column] = element("span", { class: "word special" }, passageLabels[column]);
    const isMatched = best.some((match, row) => match.column === column && isWord(tokens, row));
    if (isPieces || isMatched) (column < first ? before : after).push(byColumn[column], " ");
  });
  return { nodes: [...before, ...nodes, " ", ...after], byColumn };
}

/** Shades the words that are the best match of a query token. */
function shadeBest({ best }, byColumn) {
  const shares = new Map();
  for (const { column, value } of best) {
    const node = byColumn[column];
    shares.set(node, Math.max(shares.get(node) ?? 0, shareOf(value)));
  }
  for (const node of byColumn) node?.style.setProperty("--share", shares.get(node) ?? 0);
}

/** Shades every word by its similarity to one query token. */
function shadeRow({ matrix, columns }, byColumn, row) {
  byColumn.forEach((node, column) => {
    node.style.setProperty("--share", shareOf(matrix[row * columns + column]));
  });
}

function draw(lines, box, chips, byColumn, best) {
  const frame = box.getBoundingClientRect();
  lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  const paths = best.map(({ column, value }, row) => {
    if (!chips[row].isConnected) return null;
    const from = chips[row].getBoundingClientRect();
    // A word may continue on the next line.
    const [to] = byColumn[column].getClientRects();
    if (!to) return null; // Not shown.
    const [x1, y1] = [from.left + from.width / 2 - frame.left, from.bottom - frame.top];
    const [x2, y2] = [to.left + to.width / 2 - frame.left, to.top - frame.top];
    const bend = (y2 - y1) / 2;
    return svg("path", {
      d: `M${x1},${y1} C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}`,
      "data-row": row,
      style: { "--share": shareOf(value) },
    });
  });
  lines.replaceChildren(...paths.filter(Boolean));
}
