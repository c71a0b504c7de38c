/** The view Search: an index in the browser's memory, and the passages that each kind of vector finds in it. */

import { byId } from "../core/dom.js";
import { IndexPanel } from "./index_panel.js";
import { ResultPanel } from "./result_panel.js";
import { CORPUS, QUERY } from "./samples.js";

export function createSearchView(models) {
  let panel = null;
  let results = null;
  let asked = {};

  /** Begins with the content of the fields, which a link may have filled in. */
  const begin = () => {
    asked = { embedder: models.embedderKey, reranker: models.rerankerKey };
    if (!panel) {
      results = new ResultPanel(models);
      panel = new IndexPanel(models, (...changed) => results.search(...changed));
    }
    const corpus = byId("corpus").value || CORPUS;
    byId("search-query").value ||= QUERY;
    panel.begin(corpus, corpus !== CORPUS);
  };
  /** Shows the results for a link. */
  const open = ({ fields }) => {
    if (!panel || fields.some(([id]) => id === "corpus")) begin();
    else if (asked.embedder !== models.embedderKey) show();
    else results.again();
  };
  const show = () => {
    const before = asked;
    asked = { embedder: models.embedderKey, reranker: models.rerankerKey };
    if (!panel) begin();
    // Vectors of different models cannot be compared, so a new model needs a new index.
    else if (asked.embedder !== before.embedder) panel.again();
    else if (asked.reranker !== before.reranker) results.again();
  };
  return { show, choose: show, open };
}
