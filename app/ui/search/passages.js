/** Cuts texts into passages, and names them. */

const MOST_CHARACTERS = 700;
const FEWEST_CHARACTERS = 60;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
/** The line below the heads of a table in Markdown. */
const RULE = /^(?=.*-)(?=.*\|)[ \t|:-]+$/;

/** The name of passage number `place`: a letter, and the title of its document. */
export function nameOf(place, passages) {
  const { title } = passages[place];
  return title ? `${lettersOf(place)} · ${title}` : lettersOf(place);
}

/** A to Z, then AA and on. */
export const lettersOf = (place) =>
  (place < 26 ? "" : lettersOf(Math.floor(place / 26) - 1)) + String.fromCharCode(65 + (place % 26));

/** The passages of a text: its paragraphs, or its lines if none is empty; tables and code stay whole. */
export function chunkText(text) {
  const clean = text.replaceAll("\r\n", "\n").trim();
  const blocks = blocksOf(clean.split("\n"));
  const parts = /\n[ \t]*\n/.test(clean) ? joinShort(blocks) : blocks;
  return parts.flatMap(({ lines, isWhole }) => {
    if (isWhole) return packLines(lines);
    const paragraph = lines.join(" ").replace(/\s+/g, " ").trim();
    return paragraph.length > MOST_CHARACTERS ? packSentences(paragraph) : paragraph || [];
  });
}

/** Paragraphs, tables and fenced code, each with its lines; in a text without empty lines, each line. */
function blocksOf(lines) {
  const isSpaced = lines.some((line) => !line.trim());
  const blocks = [];
  let last = null;
  let fence = "";
  lines.forEach((line, i) => {
    const [, mark] = FENCE.exec(line) ?? [];
    const isRow = isTableRow(lines, i) || (last === "table" && line.includes("|"));
    const kind = fence || mark ? "code" : isRow ? "table" : line.trim() && "text";
    const goesOn = kind === last && (kind !== "text" || isSpaced) && (fence || kind !== "code");
    if (goesOn) blocks.at(-1).lines.push(line);
    else if (kind) blocks.push({ lines: [line], isWhole: kind !== "text" });
    if (!fence) fence = mark ?? "";
    else if (mark?.startsWith(fence)) fence = "";
    last = kind;
  });
  return blocks;
}

const isTableRow = (lines, i) =>
  /^\s*\|/.test(lines[i]) || (lines[i].includes("|") && RULE.test(lines[i + 1] ?? ""));

/** Joins a paragraph as short as a heading with the next one. */
function joinShort(blocks) {
  const joined = [];
  let heading = [];
  for (const { lines, isWhole } of blocks) {
    const block = { lines: [...heading, ...lines], isWhole };
    const text = block.lines.join(" ").trim();
    const isShort = !isWhole && text.length < FEWEST_CHARACTERS && !/[.!?。！？]$/.test(text);
    heading = isShort ? block.lines : [];
    if (!isShort) joined.push(block);
  }
  return heading.length ? [...joined, { lines: heading, isWhole: false }] : joined;
}

/** Sentences, as many in a passage as fit. */
const packSentences = (paragraph) => pack(sentencesOf(paragraph));

/** Lines, as many in a passage as fit; each begins with the heads of the table. */
function packLines(lines) {
  const rule = lines.findIndex((line) => RULE.test(line));
  const head = rule < 0 ? "" : `${lines.slice(0, rule + 1).join("\n")}\n`;
  const isRepeated = head.length < MOST_CHARACTERS / 2;
  const rest = isRepeated ? lines.slice(rule + 1) : lines;
  const room = MOST_CHARACTERS - (isRepeated ? head.length : 0);
  const passages = pack(rest.map((line) => `${line}\n`).flatMap(cutLong), room);
  if (!passages.length) return [head.trim()];
  return passages.map((passage) => (isRepeated ? head : "") + passage);
}

function pack(parts, most = MOST_CHARACTERS) {
  const passages = [""];
  for (const part of parts) {
    if (passages.at(-1) && passages.at(-1).length + part.length > most) passages.push("");
    passages[passages.length - 1] += part;
  }
  return passages.map((passage) => passage.trim()).filter(Boolean);
}

function sentencesOf(paragraph) {
  const segments = new Intl.Segmenter(undefined, { granularity: "sentence" }).segment(paragraph);
  return Array.from(segments, ({ segment }) => segment).flatMap(cutLong);
}

/** Cuts an overlong sentence at spaces, and an overlong word anywhere. */
function cutLong(sentence) {
  if (sentence.length <= MOST_CHARACTERS) return [sentence];
  return (
    sentence.match(new RegExp(`.{1,${MOST_CHARACTERS}}(?:\\s|$)|.{${MOST_CHARACTERS}}`, "gsu")) ??
    []
  );
}
