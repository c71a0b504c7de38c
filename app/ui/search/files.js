/** Reads files and folders of the user as texts and pictures, and counts skipped files by reason. */

import { ApiError } from "../core/api.js";
import { bytes, count, plural } from "../core/format.js";

const MOST_FILES = 100_000;
const MOST_BYTES = 10_000_000;
const LONGEST_TITLE = 80;
/** Endings that browsers do not know as text; names without an ending, such as README, are read too. */
const READ = /^[^.]+$|\.(txt|md|markdown|html?|xhtml|csv|tsv|jsonl?|rst|adoc|org|tex|log)$/i;
/** The pictures that the service reads, by their types. */
const PICTURE = /^image\/(png|jpeg|webp|gif)$/;
const HTML = /\.x?html?$/i;
const BLOCKS =
  "address,article,aside,blockquote,dd,div,dl,dt,figure,footer,form,h1,h2,h3,h4,h5,h6,header,hr,li," +
  "main,nav,ol,p,pre,section,title,ul";
const NO_TEXT = "script,style,template,noscript,svg,math,iframe,object";

/** Why files are skipped, in words. */
const REASONS = {
  pdf: "PDF (convert it to text first, for example with pdftotext)",
  type: "neither text, Markdown nor HTML",
  picture: "with a picture, which the embedding model does not read",
  hidden: "hidden",
  large: `larger than ${bytes(MOST_BYTES)}`,
  encoding: "not in UTF-8",
  empty: "without text",
  lost: "not readable",
  late: "after the last passage that fits",
};

/** One sentence on how many files were skipped, and why; empty if none was. */
function sentenceOf(left, total) {
  const parts = Object.keys(REASONS).filter((reason) => left[reason]);
  const told = parts.map((reason) => `${count(left[reason])} ${REASONS[reason]}`);
  const skipped = parts.reduce((sum, reason) => sum + left[reason], 0);
  const sentence = `Skipped ${count(skipped)} of ${plural(total, "file")}: ${told.join("; ")}.`;
  return told.length ? sentence : "";
}

/**
 * The files of a drop, and of all folders in it, as `[{path, open}]`, where `open()` returns a File.
 * Must be called within the event, because browsers then forget the drop.
 */
export async function droppedFiles(items) {
  const given = [...items].filter(({ kind }) => kind === "file");
  const entries = given.map((item) => item.webkitGetAsEntry() ?? item.getAsFile());
  const files = [];
  for (const entry of entries) {
    if (entry.isDirectory && !isHidden(entry.name)) {
      try {
        // This loop also visits the content of the folder later.
        for await (const some of partsOf(entry)) entries.push(...some);
      } catch (error) {
        files.push({ path: entry.name, open: () => Promise.reject(error) });
      }
    } else if (entry instanceof File) files.push(ofFile(entry));
    else files.push({ path: entry.fullPath.slice(1), open: () => fileOf(entry) });
    if (entries.length > MOST_FILES) refuse();
  }
  return files;
}

/** The same for the files of an input. */
export function chosenFiles(list) {
  if (list.length > MOST_FILES) refuse();
  return [...list].map(ofFile);
}

const ofFile = (file) => ({ path: file.webkitRelativePath || file.name, open: () => file });
const fileOf = (entry) => new Promise((resolve, reject) => entry.file(resolve, reject));
const isHidden = (path) => /(^|\/)\./.test(path);

function refuse() {
  const most = count(MOST_FILES);
  throw new ApiError(413, "too_many", `There are more than ${most} files. Choose a smaller folder.`);
}

/** The entries of a folder, which browsers return some at a time. */
async function* partsOf(folder) {
  const reader = folder.createReader();
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return;
    yield some;
  }
}

/**
 * Reads files in the order of their paths until `take({title, text, file})` returns false or `signal`
 * is aborted; only a picture has its `file`, with the text "". Returns a sentence on the skipped files,
 * which pictures are unless `readsImages`.
 */
export async function readFiles(files, take, onProgress, signal, readsImages = false) {
  const left = {};
  const total = files.length;
  const ordered = files.toSorted((a, b) => (a.path < b.path ? -1 : 1));
  for (const [i, { path, open }] of ordered.entries()) {
    onProgress(`Reading file ${count(i + 1)} of ${count(total)}`);
    const { reason, ...content } = await contentOf(path, open, readsImages);
    if (reason) left[reason] = (left[reason] ?? 0) + 1;
    const isEnough = !reason && !take({ title: titleOf(path), ...content });
    if (isEnough || signal.aborted) {
      left.late = total - i - 1;
      break;
    }
  }
  return sentenceOf(left, total);
}

/** The path within the user's folder; of a long path, its end. */
function titleOf(path) {
  const title = path.replace(/^[^/]*\//, "");
  return title.length > LONGEST_TITLE ? `…${title.slice(-LONGEST_TITLE)}` : title;
}

/** `{text}`, `{text: "", file}` of a picture, or `{reason}`. */
async function contentOf(path, open, readsImages) {
  if (isHidden(path)) return { reason: "hidden" };
  if (/\.pdf$/i.test(path)) return { reason: "pdf" };
  const name = path.split("/").at(-1);
  try {
    const file = await open();
    const isPicture = PICTURE.test(file.type);
    if (isPicture && !readsImages) return { reason: "picture" };
    const isRead = isPicture || READ.test(name) || file.type.startsWith("text/");
    if (!isRead) return { reason: "type" };
    if (file.size > MOST_BYTES) return { reason: "large" };
    if (isPicture) return { text: "", file };
    const raw = decode(new Uint8Array(await file.arrayBuffer()));
    if (raw === null) return { reason: "encoding" };
    const text = HTML.test(name) || file.type === "text/html" ? textOfHtml(raw) : raw;
    return text.trim() ? { text } : { reason: "empty" };
  } catch {
    return { reason: "lost" };
  }
}

/** Decodes UTF-8, or UTF-16 with a byte order mark; null for any other encoding. */
function decode(content) {
  const [a, b] = content;
  const utf16 = a === 0xff && b === 0xfe ? "utf-16le" : a === 0xfe && b === 0xff && "utf-16be";
  try {
    const text = new TextDecoder(utf16 || "utf-8", { fatal: true }).decode(content);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

/** The visible text, with an empty line around each block; scripts of a parsed document never run. */
function textOfHtml(html) {
  const page = new DOMParser().parseFromString(html, "text/html");
  for (const node of page.querySelectorAll(NO_TEXT)) node.remove();
  for (const node of page.querySelectorAll("br")) node.replaceWith("\n");
  for (const node of page.querySelectorAll("pre")) node.textContent = `\`\`\`\n${node.textContent}\n\`\`\``;
  // Innermost tables first.
  for (const table of [...page.querySelectorAll("table")].reverse()) table.replaceWith(tableText(table));
  for (const block of page.querySelectorAll(BLOCKS)) {
    block.prepend("\n\n");
    block.append("\n\n");
  }
  return page.documentElement.textContent;
}

/** A table in Markdown. */
function tableText({ caption, rows }) {
  const textOf = (cell) => cell.textContent.replace(/\s+/g, " ").trim();
  const lines = Array.from(rows, ({ cells }) => `| ${Array.from(cells, textOf).join(" | ")} |`);
  if (rows[0]?.cells[0]?.tagName === "TH") lines.splice(1, 0, "|---|");
  return `\n\n${caption?.textContent ?? ""}\n\n${lines.join("\n")}\n\n`;
}
