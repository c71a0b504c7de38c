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
  const names = ["texts", "labels", "threshold"];
  const inputs = Object.fromEntries(names.map((name) => [name, byId(`extract-${name}`)]));
  const work = new LatestWork(byId("extract-message"), models.status);
  const bar = new TakeBar("extract", models);
  const run = () => work.run((signal) => mark(inputs, models, bar, signal));
  let asked = null;

  onPause(inputs.texts, "input", PAUSE, run);
  onPause(inputs.labels, "input", PAUSE, run);
  inputs.threshold.onchange = run;
  const show = () => {
    if (asked === models.extractorKey) return;
    if (asked === null) inputs.texts.value ||= TEXTS;
    open();
  };
  const open = () => {
    asked = models.extractorKey;
    run();
  };
  return { show, choose: show, open };
}

async function mark(inputs, models, bar, signal) {
  const all = splitTexts(inputs.texts.value);
  const texts = all.slice(0, MOST_TEXTS);
  const model = await models.extractor(signal);
  byId("extract-none").hidden = model !== null;
  byId("extract-own-labels").hidden = !model?.readsLabels;
  byId("extract-output").hidden = !texts.length || !model;
  if (!texts.length || !model) return;
  const fields = { texts: inputs.texts.value, threshold: inputs.threshold.value };
  const options = { threshold: Number(fields.threshold) };
  if (model.readsLabels) {
    fields.labels = inputs.labels.value;
    options.labels = fields.labels.split(",").map((label) => label.trim()).filter(Boolean);
  }
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
  bar.show([extractRequest(texts, model, options)], answer.data, fields);
}

/**
 * A text with its spans, whose places count code points, as elements of the labels' colours. Spans
 * of several labels may overlap: each is marked from the end of those before.
 */
function markedText(text, spans, labels) {
  const characters = Array.from(text);
  const between = (start, end) => characters.slice(start, end).join("");
  let read = 0;
  const parts = spans.flatMap(({ start, end, label, score }) => {
    const from = Math.max(read, start);
    const before = between(read, from);
    read = Math.max(read, end);
    const colour = labels.indexOf(label) % COLOURS;
    const name = element("small", ` ${label}`);
    return [before, element(`mark.label-${colour}`, { title: decimal(score) }, between(from, end), name)];
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
