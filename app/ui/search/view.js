/** The view Search: an index in the browser's memory, and what each kind of vector finds in it. */

import { byId } from "../core/dom.js";
import { IndexPanel } from "./index_panel.js";
import { PassageIndex } from "./passage_index.js";
import { ResultPanel } from "./result_panel.js";
import { CORPUS, QUERY } from "./samples.js";

export function createSearchView(status) {
  let began = false;

  return {
    show() {
      if (began) return;
      began = true;
      const index = new PassageIndex();
      const results = new ResultPanel(index, status);
      const panel = new IndexPanel(index, status, (texts) => results.search(texts));
      byId("search-query").value ||= QUERY;
      panel.begin(CORPUS);
    },
  };
}
