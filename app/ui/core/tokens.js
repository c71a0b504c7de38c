/** Aligns tokens with their text. */

/**
 * The text in consecutive pieces: `{text, tokens}`. `tokens` holds the indices, in the list of tokens
 * without special ones, of those that begin here; it is empty between tokens. Several tokens may
 * share a piece, such as bytes, or SentencePiece's mark before a word.
 */
export function piecesOf(text, tokens) {
  const points = Array.from(text); // Offsets count code points; a string counts UTF-16 units.
  const between = (from, to) => points.slice(from, to).join("");
  const pieces = [];
  let [begin, end] = [0, 0]; // Those of the last piece with tokens.
  plainTokens(tokens).forEach(({ start, stop }, place) => {
    const last = pieces.at(-1);
    if (last && (stop <= end || start <= begin)) {
      last.tokens.push(place);
      last.text += between(end, stop);
    } else {
      if (start > end) pieces.push({ text: between(end, start), tokens: [] });
      begin = Math.max(start, end);
      pieces.push({ text: between(begin, stop), tokens: [place] });
    }
    end = Math.max(end, stop);
  });
  if (end < points.length) pieces.push({ text: between(end), tokens: [] });
  return pieces;
}

const SEGMENTER = new Intl.Segmenter("en", { granularity: "word" });
const SCRIPTS = ["Han", "Hira", "Kana", "Thai", "Laoo", "Khmr", "Mymr"];
const UNSPACED = `[${SCRIPTS.map((script) => `\\p{scx=${script}}`).join("")}]`;
const ENDS_UNSPACED = new RegExp(`${UNSPACED}\\p{M}*$`, "u");
const BEGINS_UNSPACED = new RegExp(`^(?!\\p{M})${UNSPACED}`, "u");

/** As `piecesOf`, with the pieces of a word joined, except in scripts without spaces. */
export function wordsOf(text, tokens) {
  const begins = new Set(Array.from(SEGMENTER.segment(text), ({ index }) => index));
  const words = [];
  let before = { text: "", tokens: [] };
  let end = 0;
  for (const piece of piecesOf(text, tokens)) {
    const isUnspaced = ENDS_UNSPACED.test(before.text) && BEGINS_UNSPACED.test(piece.text);
    if (before.tokens.length && piece.tokens.length && !begins.has(end) && !isUnspaced) {
      words.at(-1).text += piece.text;
      words.at(-1).tokens.push(...piece.tokens);
    } else words.push({ text: piece.text, tokens: [...piece.tokens] });
    before = piece;
    end += piece.text.length;
  }
  return words;
}

export const plainTokens = (tokens) => tokens.filter((token) => !token.special);

/** The ids of a piece or a word, each once. */
export const idsOf = (plain, { tokens: places }) => [...new Set(places.map((place) => plain[place].id))];

/** A string of a vocabulary as people read it, and a text to compare with it. */
export const bare = (text) => text.replace(/^(##|[▁Ġ])/u, "").trim();
const comparable = (text) => bare(text).normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();

/** The most comparisons; in a longer text, the first string is assumed to be the first token. */
const MOST_COMPARED = 4_000_000;

/**
 * The index of the token, in the list without special ones, for each token string of the ColBERT
 * vectors; null for strings that are no part of the text, such as markers, masks and the end.
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

/** The longest common subsequence of two lists: the index in `b` of each item of `a`, or null. */
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

/** Assigns strings between two known tokens to the tokens between them if their numbers agree. */
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
