/** Shows one text: its tokens, shaded by weight, and a table that compares weights and counts. */

import { element, roving, row, table } from "../core/dom.js";
import { count, decimal, plural, shortened } from "../core/format.js";
import { bare, idsOf, piecesOf, plainTokens, wordsOf } from "../core/tokens.js";

const HEAVIEST = 8;
const COUNTED_MOST = 3;
const MOST_PIECES = 12_000;
const HINT = "Point at a word, or use the arrow keys, to see its numbers.";

/**
 * The element for text number `place`, in words or in pieces; weights need sparse vectors.
 */
export function renderText({ text, tokens, vectors, truncation }, place, isPieces) {
  const { sparse, strings } = vectors;
  const parts = (isPieces ? piecesOf : wordsOf)(text, tokens);
  const terms = termsOf(parts, plainTokens(tokens), sparse, strings?.sparse);
  const noun = isPieces ? "token" : "word";
  const title = `text-result-${place}`;
  return element(
    "article",
    { class: "text-result", "aria-labelledby": title },
    element("h3", { id: title }, `Text ${place + 1}`),
    element("p", { class: "facts" }, factsOf(tokens, sparse && terms, truncation, noun)),
    ...shadedText(parts, tokens, { terms, truncation, isWeighed: sparse !== null, noun }),
    ...(sparse ? weightTables(terms, noun) : []),
  );
}

/** Scrolls the tokens of a text to the point where it was truncated, if it was. */
export function showCut(box) {
  const mark = box.querySelector(".cut-mark");
  if (mark) box.scrollTop = mark.offsetTop - box.clientHeight / 2;
}

/**
 * Every distinct part of the text, and the terms that the model added, as a map from ids to
 * `{text, count, weight}`. A weight is the sum over the tokens. `strings` has the token strings of the
 * indices of `sparse`.
 */
function termsOf(parts, plain, sparse, strings) {
  const indices = Array.from(sparse?.indices ?? []);
  const weights = new Map(indices.map((id, i) => [id, sparse.values[i]]));
  const terms = new Map();
  for (const part of parts.filter(({ tokens }) => tokens.length)) {
    const ids = idsOf(plain, part);
    const term = terms.get(ids.join()) ?? { text: part.text.trim().toLowerCase(), count: 0 };
    term.count += 1;
    term.weight = ids.reduce((sum, id) => sum + (weights.get(id) ?? 0), 0);
    terms.set(ids.join(), term);
  }
  const own = new Set(plain.map(({ id }) => id));
  indices.forEach((id, i) => {
    if (!own.has(id))
      terms.set(String(id), { text: bare(strings[i]), count: 0, weight: weights.get(id) });
  });
  return terms;
}

function factsOf(tokens, terms, truncation, noun) {
  const plain = plainTokens(tokens).length;
  const parts = [`${plural(plain, "token")} and ${plural(tokens.length - plain, "special token")}`];
  if (terms) {
    const weighed = [...terms.values()].filter((term) => term.weight > 0);
    const added = weighed.filter((term) => !term.count).length;
    parts.push(
      `${plural(weighed.length, `distinct ${noun}`)} with a weight` +
        (added ? `, ${count(added)} of them added by the model` : ""),
    );
  }
  if (truncation) parts.push(`${plural(truncation.truncated_tokens, "token")} cut off`);
  return parts.join(" · ");
}

function shadedText(parts, tokens, { terms, truncation, isWeighed, noun }) {
  const plain = plainTokens(tokens);
  const heaviest = Math.max(...[...terms.values()].map((term) => term.weight), 1e-9);
  // The limit includes the special tokens around the text, which are always read.
  const around = Math.max(
    tokens.length - plain.length,
    (truncation?.original_tokens ?? 0) - plain.length,
  );
  const read = truncation ? truncation.max_tokens - around : Infinity;
  const readout = element("p", { class: "readout", "aria-hidden": "true" }, HINT);
  const box = element("div", {
    class: "tokens",
    role: "group",
    "aria-label": `The text, ${noun} by ${noun}`,
  });
  const spans = [];
  let cut = false;
  for (const piece of parts.slice(0, MOST_PIECES)) {
    const [first] = piece.tokens;
    if (first >= read && !cut) {
      cut = true;
      box.append(cutMark(truncation));
    }
    if (first === undefined) {
      box.append(piece.text);
      continue;
    }
    const term = terms.get(idsOf(plain, piece).join());
    const tokenTexts = piece.tokens.map((token) => plain[token].text.trim());
    spans.push(tokenSpan(piece.text, term, tokenTexts, isWeighed ? heaviest : null, cut));
    box.append(spans.at(-1));
  }
  roving(box, spans, (span) => {
    readout.textContent = span.getAttribute("aria-label");
  });
  return [box, readout];
}

/** The element of a word or piece; `heaviest` is null if tokens have no weights. */
function tokenSpan(text, { weight, count: times }, tokenTexts, heaviest, cut) {
  const isPlain = heaviest === null;
  const facts = [!isPlain && `weight ${decimal(weight)}`, `occurs ${plural(times, "time")}`];
  if (tokenTexts.length > 1) facts.push(`tokens ${shortened(tokenTexts.join(" · "))}`);
  const numbers = cut ? "not read" : facts.filter(Boolean).join(", ");
  return element(
    "span",
    {
      class: `token${cut ? " cut" : ""}${isPlain ? " plain" : ""}`,
      role: "img",
      "aria-label": `${shortened(text)}: ${numbers}`,
      style: { "--share": cut || isPlain ? 0 : weight / heaviest },
    },
    text,
  );
}

const cutMark = (truncation) =>
  element(
    "span",
    { class: "cut-mark" },
    `The model stops reading here, after ${count(truncation.max_tokens)} tokens`,
  );

/** The heaviest terms, then the most frequent of those that weigh little. */
function weightTables(terms, noun) {
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
    shortened(term.text),
    barCell("weight", term.weight / scale.weight, decimal(term.weight)),
    barCell("count", term.count / scale.count, count(term.count)),
  ];
  const section = (className, terms) =>
    element("tbody", { class: className }, ...terms.map((term) => row(cells(term))));
  const heaviest = table(
    { class: "weights" },
    [noun[0].toUpperCase() + noun.slice(1), "Learned weight", "Count"],
    heavy.map(cells),
    counted.length > 0 && section("rest", counted),
  );
  if (!others.length) return [heaviest];
  const more = element("table", { class: "weights" }, section("more", others));
  return [
    heaviest,
    element("details", {}, element("summary", {}, `${plural(others.length, `more ${noun}`)}`), more),
  ];
}

const barCell = (kind, share, text) =>
  element(
    "td",
    {},
    element("span", { class: `bar ${kind}`, style: { "--share": share } }),
    element("span", { class: "number" }, text),
  );
