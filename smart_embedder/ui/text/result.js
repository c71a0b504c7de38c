/** What the model makes of one text: its tokens, shaded by weight, beside a plain count. */

import { element, roving, row, table } from "../core/dom.js";
import { count, decimal, plural } from "../core/format.js";
import { labelTable } from "../core/labels.js";
import { bare, countTokens, piecesOf, plainTokens } from "../core/tokens.js";

const HEAVIEST = 8;
const COUNTED_MOST = 3;
const MOST_PIECES = 12_000;
const HINT = "Point at a word, or use the arrow keys, to see its numbers.";

/** The element for text number `place`; without sparse vectors no token has a weight. */
export function renderText({ text, tokens, vectors, labels, truncation }, place) {
  const { sparse, strings } = vectors;
  const terms = termsOf(tokens, sparse, strings?.sparse);
  const title = `text-result-${place}`;
  return element(
    "article",
    { class: "text-result", "aria-labelledby": title },
    element("h3", { id: title }, `Text ${place + 1}`),
    element("p", { class: "facts" }, factsOf(tokens, sparse && terms, truncation)),
    ...shadedText(text, tokens, { terms, truncation, isWeighed: sparse !== null }),
    ...(sparse ? weightTables(terms) : []),
    labels && labelTable(labels),
  );
}

/** Scrolls the tokens of a text to the place where the model stops reading, if there is one. */
export function showCut(box) {
  const mark = box.querySelector(".cut-mark");
  if (mark) box.scrollTop = mark.offsetTop - box.clientHeight / 2;
}

/**
 * Every distinct token, and what the model has added: `Map(id -> {id, text, count, weight})`.
 * `strings` are the vocabulary's for the indices of `sparse`.
 */
function termsOf(tokens, sparse, strings) {
  const counts = countTokens(tokens);
  const weights = new Map(
    Array.from(sparse?.indices ?? [], (id, i) => [id, { weight: sparse.values[i], place: i }]),
  );
  const terms = new Map();
  for (const [id, { text, count: times }] of counts)
    terms.set(id, { id, text, count: times, weight: weights.get(id)?.weight ?? 0 });
  for (const [id, { weight, place }] of weights)
    if (!counts.has(id)) terms.set(id, { id, text: bare(strings[place]), count: 0, weight });
  return terms;
}

function factsOf(tokens, terms, truncation) {
  const parts = [`${plural(tokens.length, "token")}, the special ones included`];
  if (terms) {
    const weighed = [...terms.values()].filter((term) => term.weight > 0);
    const added = weighed.filter((term) => !term.count).length;
    parts.push(
      `${plural(weighed.length, "distinct token")} with a weight` +
        (added ? `, ${count(added)} of them added by the model` : ""),
    );
  }
  if (truncation) parts.push(`${plural(truncation.truncated_tokens, "token")} cut off`);
  return parts.join(" · ");
}

function shadedText(text, tokens, { terms, truncation, isWeighed }) {
  const plain = plainTokens(tokens);
  const heaviest = Math.max(...[...terms.values()].map((term) => term.weight), 1e-9);
  // The limit counts what stands around the text, too, which is always read.
  const around = Math.max(
    tokens.length - plain.length,
    (truncation?.original_tokens ?? 0) - plain.length,
  );
  const read = truncation ? truncation.max_tokens - around : Infinity;
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
    spans.push(tokenSpan(piece.text, terms_, isWeighed ? heaviest : null, cut));
    box.append(spans.at(-1));
  }
  roving(box, spans, (span) => {
    readout.textContent = span.getAttribute("aria-label");
  });
  return [box, readout];
}

/** `heaviest` is null where tokens have no weights. */
function tokenSpan(text, terms, heaviest, cut) {
  const told = ({ weight, count: times }) =>
    `${heaviest === null ? "" : `weight ${decimal(weight)}, `}counted ${plural(times, "time")}`;
  const weight = Math.max(...terms.map((term) => term.weight));
  const numbers = cut ? "not read" : terms.map(told).join("; ");
  return element(
    "span",
    {
      class: `token${cut ? " cut" : ""}${heaviest === null ? " plain" : ""}`,
      role: "img",
      "aria-label": `${text}: ${numbers}`,
      style: { "--share": cut || heaviest === null ? 0 : weight / heaviest },
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
  const cells = (term) => [
    term.text,
    barCell("weight", term.weight / scale.weight, decimal(term.weight)),
    barCell("count", term.count / scale.count, count(term.count)),
  ];
  const section = (className, terms) =>
    element("tbody", { class: className }, ...terms.map((term) => row(cells(term))));
  const heaviest = table(
    { class: "weights" },
    ["Token", "Learned weight", "Plain count"],
    heavy.map(cells),
    counted.length > 0 && section("rest", counted),
  );
  if (!others.length) return [heaviest];
  const more = element("table", { class: "weights" }, section("more", others));
  return [
    heaviest,
    element("details", {}, element("summary", {}, `${plural(others.length, "more token")}`), more),
  ];
}

const barCell = (kind, share, text) =>
  element(
    "td",
    {},
    element("span", { class: `bar ${kind}`, style: { "--share": share } }),
    element("span", { class: "number" }, text),
  );
