/** Lays tokens over the text that they were made of. */

/**
 * The text in pieces that follow each other: `{text, tokens}`, where `tokens` holds the places, in
 * the list of tokens without special ones, of those that begin here; between tokens it is empty.
 * Several tokens may stand for one character, as with bytes.
 */
export function piecesOf(text, tokens) {
  const points = Array.from(text); // Offsets count code points; a string counts UTF-16 units.
  const pieces = [];
  let end = 0;
  plainTokens(tokens).forEach(({ start, stop }, place) => {
    if (stop <= end) {
      pieces.at(-1)?.tokens.push(place);
      return;
    }
    const begin = Math.max(start, end);
    if (begin > end) pieces.push({ text: points.slice(end, begin).join(""), tokens: [] });
    pieces.push({ text: points.slice(begin, stop).join(""), tokens: [place] });
    end = stop;
  });
  if (end < points.length) pieces.push({ text: points.slice(end).join(""), tokens: [] });
  return pieces;
}

export const plainTokens = (tokens) => tokens.filter((token) => !token.special);

/** How often each token id occurs, with its text in lower case: `Map(id -> {text, count})`. */
export function countTokens(tokens) {
  const counts = new Map();
  for (const { id, text } of plainTokens(tokens)) {
    const known = counts.get(id) ?? { text: text.trim().toLowerCase(), count: 0 };
    counts.set(id, { ...known, count: known.count + 1 });
  }
  return counts;
}

/** A string of a vocabulary as people read it, and a text to compare with it. */
export const bare = (text) => text.replace(/^(##|[▁Ġ])/u, "").trim();
const comparable = (text) => bare(text).normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();

/** The most comparisons of strings with tokens; a longer text is taken to begin with its first token. */
const MOST_COMPARED = 4_000_000;

/**
 * For each of the vocabulary's strings behind ColBERT vectors the place, in the list of tokens
 * without special ones, of its token; null for what stands for no part of the text, such as
 * markers, masks and the end.
 */
export function placesOf(strings, tokens) {
  const wanted = strings.map(comparable);
  const plain = plainTokens(tokens).map((token) => comparable(token.text));
  const begin = wanted.findIndex((text, i) => text !== plain[i]);
  const isWhole = begin < 0 || begin >= Math.min(plain.length, wanted.length - 1);
  if (isWhole || wanted.length * plain.length > MOST_COMPARED)
    return wanted.map((_, i) => (i < Math.min(plain.length, wanted.length - 1) ? i : null));
  return fillGaps(longestCommon(wanted, plain), plain.length);
}

/** The longest common subsequence of two lists: for each item of `a` its place in `b`, or null. */
function longestCommon(a, b) {
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      const next = (i + 1) * width + j;
      lengths[i * width + j] =
        a[i] === b[j] ? lengths[next + 1] + 1 : Math.max(lengths[next], lengths[i * width + j + 1]);
    }
  }
  let j = 0;
  return a.map((text, i) => {
    while (j < b.length && text !== b[j] && lengths[i * width + j + 1] > lengths[(i + 1) * width + j])
      j++;
    return j < b.length && text === b[j] ? j++ : null;
  });
}

/** Strings between two places belong to the tokens between these, where they are as many. */
function fillGaps(places, length) {
  const filled = [...places];
  let before = -1;
  places.forEach((place, i) => {
    if (place === null) return;
    const from = before < 0 ? -1 : places[before];
    if (before >= 0 && i - before === place - from)
      for (let k = 1; k < i - before; k++) filled[before + k] = from + k;
    before = i;
  });
  return filled.map((place) => (place === null || place < length ? place : null));
}
