/** What the model makes of one text: its tokens, shaded by weight, beside a plain count. */

import { element, roving } from "../core/dom.js";
import { count, decimal, plural } from "../core/format.js";
import { countTokens, piecesOf, plainTokens } from "../core/tokens.js";

const HEAVIEST = 8;
const COUNTED_MOST = 3;
const MOST_PIECES = 12_000;
const HINT = "Point at a word, or use the arrow keys, to see its numbers.";

/** The element for text number `place`. */
export function renderText(place, text, tokens, vectors, report) {
  const weights = new Map(
    Array.from(vectors.sparse.indices, (id, i) => [id, vectors.sparse.values[i]]),
  );
  const terms = termsOf(tokens, weights);
  const truncation = report.warnings.find((warning) => warning.target.index === place)?.details;
  const title = `text-result-${place}`;
  return element(
    "article",
    { class: "text-result", "aria-labelledby": title },
    element("h3", { id: title }, `Text ${place + 1}`),
    element("p", { class: "facts" }, factsOf(tokens, weights, truncation)),
    ...shadedText(text, tokens, terms, truncation),
    ...weightTables(terms),
  );
}

/** Scrolls the tokens of a text to the place where the model stops reading, if there is one. */
export function showCut(box) {
  const mark = box.querySelector(".cut-mark");
  if (mark) box.scrollTop = mark.offsetTop - box.clientHeight / 2;
}

/** Every distinct token: `Map(id -> {id, text, count, weight})`. */
function termsOf(tokens, weights) {
  const terms = new Map();
  for (const [id, { text, count: times }] of countTokens(tokens)) {
    terms.set(id, { id, text, count: times, weight: weights.get(id) ?? 0 });
  }
  return terms;
}

function factsOf(tokens, weights, truncation) {
  const cut = truncation ? ` · ${plural(truncation.truncated_tokens, "token")} cut off` : "";
  return (
    `${plural(tokens.length, "token")}, the special ones included · ` +
    `${plural(weights.size, "distinct token")} with a weight${cut}`
  );
}

function shadedText(text, tokens, terms, truncation) {
  const plain = plainTokens(tokens);
  const heaviest = Math.max(...[...terms.values()].map((term) => term.weight), 1e-9);
  // The limit counts the special tokens, too, which are always read.
  const read = truncation ? truncation.max_tokens - (tokens.length - plain.length) : Infinity;
  const readout = element("p", { class: "readout", "aria-hidden": "true" }, HINT);
  const box = element("div", {
    class: "tokens",
    role: "group",
    "aria-label": "The text, token by token",
  });
  const spans = [];
  let cut = false;
  for (const piece of piecesOf(text, tokens).slice(0, MOST_PIECES)) {
    const [first] = piece.tokens;
    if (first >= read && !cut) {
      cut = true;
      box.append(cutMark(truncation));
    }
    if (first === undefined) {
      box.append(piece.text);
      continue;
    }
    const terms_ = piece.tokens.map((token) => terms.get(plain[token].id));
    spans.push(tokenSpan(piece.text, terms_, heaviest, cut));
    box.append(spans.at(-1));
  }
  roving(box, spans, (span) => {
    readout.textContent = span.getAttribute("aria-label");
  });
  return [box, readout];
}

function tokenSpan(text, terms, heaviest, cut) {
  const weight = Math.max(...terms.map((term) => term.weight));
  const numbers = cut
    ? "not read"
    : terms
        .map((term) => `weight ${decimal(term.weight)}, counted ${plural(term.count, "time")}`)
        .join("; ");
  return element(
    "span",
    {
      class: cut ? "token cut" : "token",
      role: "img",
      "aria-label": `${text}: ${numbers}`,
      style: { "--share": cut ? 0 : weight / heaviest },
    },
    text,
  );
}

const cutMark = (truncation) =>
  element(
    "span",
    { class: "cut-mark" },
    `${count(truncation.max_tokens)} tokens: the model stops reading here`,
  );

/** The heaviest terms, then those that a plain count would put first although they weigh little. */
function weightTables(terms) {
  const byWeight = [...terms.values()].sort((a, b) => b.weight - a.weight || b.count - a.count);
  const heavy = byWeight.slice(0, HEAVIEST);
  const rest = byWeight.slice(HEAVIEST);
  const counted = [...rest].sort((a, b) => b.count - a.count).slice(0, COUNTED_MOST);
  const others = rest.filter((term) => !counted.includes(term));
  const scale = {
    weight: Math.max(heavy[0]?.weight ?? 0, 1e-9),
    count: Math.max(...byWeight.map((term) => term.count), 1),
  };
  const table = element(
    "table",
    { class: "weights" },
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        ...["Token", "Learned weight", "Plain count"].map((text) =>
          element("th", { scope: "col" }, text),
        ),
      ),
    ),
    element("tbody", {}, ...heavy.map((term) => weightRow(term, scale))),
    counted.length
      ? element("tbody", { class: "rest" }, ...counted.map((term) => weightRow(term, scale)))
      : null,
  );
  if (!others.length) return [table];
  const more = element(
    "table",
    { class: "weights" },
    element("tbody", {}, ...others.map((term) => weightRow(term, scale))),
  );
  return [
    table,
    element("details", {}, element("summary", {}, `${plural(others.length, "more token")}`), more),
  ];
}

function weightRow(term, scale) {
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, term.text),
    barCell("weight", term.weight / scale.weight, decimal(term.weight)),
    barCell("count", term.count / scale.count, count(term.count)),
  );
}

const barCell = (kind, share, text) =>
  element(
    "td",
    {},
    element("span", { class: `bar ${kind}`, style: { "--share": share } }),
    element("span", { class: "number" }, text),
  );
