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

/** The texts of the rows of a ColBERT matrix: all that was read but the first, special token. */
export function colbertTokens(tokens, rows) {
  const read = tokens.slice(1, rows);
  return [...read, tokens.at(-1)].slice(0, rows);
}
