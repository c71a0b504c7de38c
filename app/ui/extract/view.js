/** The view Extract: the spans that a model labels, marked in the texts. */

import { extract, extractRequest } from "../core/api.js";
import { byId, element, numberCell, onPause, table } from "../core/dom.js";
import { decimal, plural, shortened } from "../core/format.js";
import { TakeBar } from "../core/take.js";
import { splitTexts } from "../core/texts.js";
import { LatestWork } from "../core/work.js";
import { TEXTS } from "./samples.js";

const PAUSE = 400;
const MOST_TEXTS = 16;
const MOST_SPANS = 2000;
/** Labels have one of this many colours, in the order in which they occur. */
const COLOURS = 6;

export function createExtractView(models) {
  const [input, threshold] = [byId("extract-texts"), byId("extract-threshold")];
  const work = new LatestWork(byId("extract-message"), models.status);
  const bar = new TakeBar("extract", models);
  const run = () => work.run((signal) => mark(input.value, threshold, models, bar, signal));
  let asked = null;

  onPause(input, "input", PAUSE, run);
  threshold.onchange = run;
  const show = () => {
    if (asked === models.extractorKey) return;
    if (asked === null) input.value ||= TEXTS;
    open();
  };
  const open = () => {
    asked = models.extractorKey;
    run();
  };
  return { show, choose: show, open };
}

async function mark(value, threshold, models, bar, signal) {
  const all = splitTexts(value);
  const texts = all.slice(0, MOST_TEXTS);
  const model = await models.extractor(signal);
  byId("extract-none").hidden = model !== null;
  byId("extract-output").hidden = !texts.length || !model;
  if (!texts.length || !model) return;
  const options = { threshold: Number(threshold.value) };
  const answer = await extract(texts, model, options, { signal });
  if (signal.aborted) return;
  const found = answer.data.map(({ spans }) => spans);
  const labels = [...new Set(found.flat().map(({ label }) => label))];
  const more = all.length > MOST_TEXTS ? ` Only the first ${MOST_TEXTS} texts are read.` : "";
  const read = plural(answer.usage.total_tokens, "token");
  byId("extract-count").textContent = `${plural(found.flat().length, "span")}, ${read} read.${more}`;
  byId("extract-texts-marked").replaceChildren(
    ...texts.map((text, i) => markedText(text, found[i].slice(0, MOST_SPANS), labels)),
  );
  byId("extract-spans").replaceChildren(spanTable(found.flat().slice(0, MOST_SPANS)));
  const fields = { texts: value, threshold: threshold.value };
  bar.show([extractRequest(texts, model, options)], answer.data, fields);
}

/** A text with its spans, whose places count code points, as elements of the labels' colours. */
function markedText(text, spans, labels) {
  const characters = Array.from(text);
  const between = (start, end) => characters.slice(start, end).join("");
  let read = 0;
  const parts = spans.flatMap(({ start, end, label, score }) => {
    const before = between(read, start);
    read = end;
    const colour = labels.indexOf(label) % COLOURS;
    const name = element("small", ` ${label}`);
    return [before, element(`mark.label-${colour}`, { title: decimal(score) }, between(start, end), name)];
  });
  return element("p.marked", parts, between(read));
}

function spanTable(spans) {
  const rows = spans.map(({ text, label, score }) => [
    shortened(text),
    label,
    numberCell(decimal(score)),
  ]);
  return table({}, ["Span", "Label", "Score"], rows);
}
