/** The sentence below a view's title: which vectors the model does not make, and what is missing. */

import { byId } from "./dom.js";
import { missingSentence } from "./models.js";

const usual = {};

/** `lost` describes for each kind of vectors what the view lacks without it. */
export function showLead(view, model, lost) {
  const lead = byId(`${view}-lead`);
  usual[view] ??= lead.textContent;
  lead.textContent = missingSentence(model, lost) || usual[view];
}
