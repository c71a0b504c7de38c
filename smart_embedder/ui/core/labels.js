/** What a classifier, where one is chosen as the reranker, says of texts or of pairs of texts. */

import { ApiError, predict } from "./api.js";
import { numberCell, table } from "./dom.js";
import { decimal } from "./format.js";

/** The labels of each input, a list of one text or two, by falling probability; null without any. */
export async function labelsOf(inputs, models, signal) {
  try {
    const model = await models.reranker(signal);
    return model?.kinds.includes("labels") ? await predict(inputs, model, { signal }) : null;
  } catch (error) {
    // The view shows its vectors all the same; Search tells why a reranker cannot be had.
    if (signal.aborted || !(error instanceof ApiError)) throw error;
    return null;
  }
}

/** The labels of one input. */
export const labelTable = (labels) =>
  table(
    { class: "labels" },
    ["Label", "Probability"],
    labels.map(({ label, score }) => [label, numberCell(decimal(score))]),
  );
