/** Cuts a long text into passages of about a paragraph. */

const MOST_CHARACTERS = 700;
const FEWEST_CHARACTERS = 60;

/** The passages of a text: its paragraphs, or its lines where it has no empty ones. */
export function chunkText(text) {
  const clean = text.replaceAll("\r\n", "\n").trim();
  const paragraphs = clean.split(/\n[ \t]*\n+/);
  const parts = paragraphs.length > 1 ? joinShort(paragraphs) : clean.split("\n");
  return parts
    .map((part) => part.replace(/\s+/g, " ").trim())
    .filter(Boolean)
    .flatMap((part) => (part.length > MOST_CHARACTERS ? packSentences(part) : [part]));
}

/** Joins what is as short as a heading with the paragraph after it. */
function joinShort(paragraphs) {
  const joined = [];
  let heading = "";
  for (const paragraph of paragraphs) {
    const whole = heading ? `${heading} ${paragraph}` : paragraph;
    const isShort = whole.trim().length < FEWEST_CHARACTERS && !/[.!?。！？]\s*$/.test(whole);
    heading = isShort ? whole : "";
    if (!isShort) joined.push(whole);
  }
  return heading ? [...joined, heading] : joined;
}

/** Sentences, as many in a passage as fit. */
function packSentences(paragraph) {
  const passages = [""];
  for (const sentence of sentencesOf(paragraph)) {
    if (passages.at(-1) && passages.at(-1).length + sentence.length > MOST_CHARACTERS)
      passages.push("");
    passages[passages.length - 1] += sentence;
  }
  return passages.map((passage) => passage.trim()).filter(Boolean);
}

function sentencesOf(paragraph) {
  const segments = new Intl.Segmenter(undefined, { granularity: "sentence" }).segment(paragraph);
  return Array.from(segments, ({ segment }) => segment).flatMap(cutLong);
}

/** A sentence without an end is cut at spaces, and a word without an end anywhere. */
function cutLong(sentence) {
  if (sentence.length <= MOST_CHARACTERS) return [sentence];
  return (
    sentence.match(new RegExp(`.{1,${MOST_CHARACTERS}}(?:\\s|$)|.{${MOST_CHARACTERS}}`, "gsu")) ??
    []
  );
}
