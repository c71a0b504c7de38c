/** The sentence below a view's title: what the chosen model does not make, and what that leaves out. */

import { byId } from "./dom.js";
import { missingSentence } from "./models.js";

const usual = {};

/** `lost` says for each kind of vectors what the view lacks without it. */
export function showLead(view, model, lost) {
  const lead = byId(`${view}-lead`);
  usual[view] ??= lead.textContent;
  lead.textContent = missingSentence(model, lost) || usual[view];
}
