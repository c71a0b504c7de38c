/** The view Text: the tokens of texts, and their vectors. */

import { embed, embedRequest, tokenize, withTokens } from "../core/api.js";
import { byId, onPause } from "../core/dom.js";
import { plural } from "../core/format.js";
import { showLead } from "../core/lead.js";
import { TakeBar } from "../core/take.js";
import { splitTexts } from "../core/texts.js";
import { isFree, timeForward } from "../core/timing.js";
import { LatestWork } from "../core/work.js";
import { renderKinds, renderTimings } from "./kinds.js";
import { renderText, showCut } from "./result.js";
import { SAMPLES, longText } from "./samples.js";

const PAUSE = 400;
const MOST_TEXTS = 16;
/** Forwards that take longer, in milliseconds, are not timed again; and how often others are. */
const LONGEST_FORWARD = 500;
const [LEAST_ROUNDS, MOST_ROUNDS] = [2, 4];
const LOST = {
  dense: "no vector for the whole text",
  sparse: "no weight for each word",
  colbert: "no vector for each token",
};

export function createTextView(models) {
  const input = byId("texts");
  const work = new LatestWork(byId("text-message"), models.status);
  const bar = new TakeBar("text", models);
  const run = () => work.run((signal) => analyse(input.value, models, bar, signal));
  let asked = null;

  onPause(input, "input", PAUSE, run);
  for (const button of byId("text-samples").querySelectorAll("button")) {
    button.onclick = () =>
      work.run(async (signal) => {
        const isLong = button.value === "long";
        const length = isLong ? (await models.embedder(signal)).maxLength : 0;
        if (signal.aborted) return;
        input.value = isLong ? longText(length) : SAMPLES[button.value];
        await analyse(input.value, models, bar, signal);
      });
  }
  const show = () => {
    if (asked === models.embedderKey) return;
    if (asked === null) input.value ||= SAMPLES.manual;
    asked = models.embedderKey;
    run();
  };
  const open = () => {
    asked = models.embedderKey;
    run();
  };
  return { show, choose: show, open };
}

async function analyse(value, models, bar, signal) {
  const all = splitTexts(value);
  const texts = all.slice(0, MOST_TEXTS);
  byId("text-output").hidden = !texts.length;
  if (!texts.length) return;
  const model = await models.embedder(signal);
  const [embeddings, tokens] = await Promise.all([
    embed(texts, model, withTokens(model), { signal }),
    tokenize(texts, model, { signal }),
  ]);
  if (signal.aborted) return;
  showLead("text", model, LOST);
  byId("text-count").textContent = describe(all, embeddings.report);
  byId("text-legend").hidden = !model.kinds.includes("sparse");
  const results = texts.map((text, i) => ({
    text,
    tokens: tokens[i],
    vectors: embeddings.texts[i],
    truncation: truncationOf(embeddings.report, i, model),
  }));
  bar.show([embedRequest(texts, model, withTokens(model))], results, { texts: value });
  const pieces = byId("text-pieces");
  pieces.onchange = () => {
    const shown = results.map((result, i) => renderText(result, i, pieces.checked));
    byId("text-results").replaceChildren(...shown);
    byId("text-results").querySelectorAll(".tokens").forEach(showCut);
  };
  pieces.onchange();
  renderTimings(byId("text-timings"), embeddings.report.timings_ms);
  renderKinds(byId("text-kinds"), model, embeddings.texts, {});
  const times = await timeKinds(texts, model, embeddings.report, signal);
  renderKinds(byId("text-kinds"), model, embeddings.texts, times);
}

/** The truncation of a text by the model whose tokens are shown. */
function truncationOf(report, place, { tokenizer }) {
  const cut = ({ target, details }) => target.index === place && details?.model === tokenizer;
  return report.warnings.find(cut)?.details;
}

function describe(all, report) {
  const read = plural(report.usage.total_tokens, "token");
  const more = all.length > MOST_TEXTS ? ` Only the first ${MOST_TEXTS} are shown.` : "";
  return `${plural(all.length, "text")}, ${read} read.${more}`;
}

/**
 * The milliseconds of a forward for all kinds together and for each kind, each the best of two to
 * four. All are null if the device is busy, if a forward is long, or if one kind seems to take longer
 * than all of them.
 */
async function timeKinds(texts, model, { timings_ms: first }, signal) {
  const names = model.kinds.length > 1 ? ["all", ...model.kinds] : model.kinds;
  const best = Object.fromEntries(names.map((name) => [name, Infinity]));
  const isSettled = () => names.every((name) => best[name] <= (best.all ?? Infinity));
  const none = Object.fromEntries(names.map((name) => [name, null]));
  if (!isFree(first) || first.inference > LONGEST_FORWARD) return none;
  for (let round = 1; round <= MOST_ROUNDS && !(round > LEAST_ROUNDS && isSettled()); round++) {
    for (const name of names) {
      const wanted = model.kinds.map((kind) => [`return_${kind}`, name === "all" || kind === name]);
      const time = await timeForward(texts, model, Object.fromEntries(wanted), signal);
      if (time === null) return none;
      best[name] = Math.min(best[name], time);
    }
  }
  return isSettled() ? best : none;
}
