/** The view Text: how the model reads texts, and what it makes of them. */

import { embed, tokenize } from "../core/api.js";
import { byId, onPause } from "../core/dom.js";
import { plural } from "../core/format.js";
import { splitTexts } from "../core/texts.js";
import { LatestWork } from "../core/work.js";
import { renderKinds, renderTimings } from "./kinds.js";
import { renderText, showCut } from "./result.js";
import { SAMPLES, longText } from "./samples.js";

const PAUSE = 400;
const MOST_TEXTS = 16;
const KINDS = ["dense", "sparse", "colbert"];

export function createTextView(status) {
  const input = byId("texts");
  const work = new LatestWork(byId("text-message"), status);
  const run = () => work.run((signal) => analyse(input.value, status, signal));
  let began = false;

  onPause(input, "input", PAUSE, run);
  for (const button of byId("text-samples").querySelectorAll("button")) {
    button.onclick = async () => {
      const { max_input_length: length } = await status.known();
      input.value = button.value === "long" ? longText(length) : SAMPLES[button.value];
      run();
    };
  }
  return {
    show() {
      if (began) return;
      began = true;
      input.value ||= SAMPLES.manual;
      run();
    },
  };
}

async function analyse(value, status, signal) {
  const all = splitTexts(value);
  const texts = all.slice(0, MOST_TEXTS);
  byId("text-output").hidden = !texts.length;
  if (!texts.length) return;
  const [embeddings, tokens] = await Promise.all([
    embed(texts, {}, { signal }),
    status.known().then((health) => tokenize(texts, health, { signal })),
  ]);
  byId("text-count").textContent = describe(all, embeddings.report);
  byId("text-results").replaceChildren(
    ...texts.map((text, i) =>
      renderText(i, text, tokens[i], embeddings.texts[i], embeddings.report),
    ),
  );
  byId("text-results").querySelectorAll(".tokens").forEach(showCut);
  renderTimings(byId("text-timings"), embeddings.report.timings_ms);
  renderKinds(byId("text-kinds"), embeddings.texts, {});
  renderKinds(byId("text-kinds"), embeddings.texts, await timeKinds(texts, signal));
}

function describe(all, report) {
  const read = plural(report.usage.total_tokens, "token");
  const more = all.length > MOST_TEXTS ? ` Only the first ${MOST_TEXTS} are shown.` : "";
  return `${plural(all.length, "text")}, ${read} read.${more}`;
}

/** The milliseconds of a forward for all kinds together and for each by itself, one after another. */
async function timeKinds(texts, signal) {
  const times = {};
  for (const name of ["all", ...KINDS]) {
    const wanted = KINDS.map((kind) => [`return_${kind}`, name === "all" || kind === name]);
    const { report } = await embed(texts, Object.fromEntries(wanted), { signal });
    times[name] = report.timings_ms.inference;
  }
  return times;
}
