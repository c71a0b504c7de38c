/** What the server is: models, device, and the paths that were proven at its start. */

import { byId, element } from "../core/dom.js";
import { count } from "../core/format.js";

/** Shows the answer of /health. */
export function renderFacts(health) {
  const { gpu } = health;
  const lines = {
    Version: health.version,
    "Embedding model": health.model,
    "Dense vectors": health.dense_embedding_model,
    Reranker: health.reranker_model,
    Device: gpu.device_info ?? "not known yet",
    Workers: gpu.configured_devices.join(", "),
    "Out of service": gpu.failed_devices.join(", "),
    "Number format": health.dtype,
    Attention: health.attention,
    "Reads of a text": `${count(health.max_input_length)} tokens`,
    "Tokens in a forward": health.max_batch_tokens && count(health.max_batch_tokens),
  };
  byId("facts").replaceChildren(
    ...Object.entries(lines)
      .filter(([, text]) => text)
      .map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))),
  );
  byId("demo-note").textContent = health.demo ? `A demo: ${health.demo}.` : "";
  byId("models").replaceChildren(...health.models.map(modelTable));
}

function modelTable({ name, dtype, paths, refused, launch }) {
  const title = [name, dtype, launch && `launched as ${launch}`].filter(Boolean).join(" · ");
  return element(
    "table",
    {},
    element("caption", {}, title),
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        ...["Operation", "Proven path"].map((text) => element("th", { scope: "col" }, text)),
      ),
    ),
    element(
      "tbody",
      {},
      ...Object.entries(paths).map(([operation, path]) => row(operation, path)),
      ...refused.map(({ operation, path, reason }) =>
        row(operation, `${path} was refused: ${reason}`),
      ),
    ),
  );
}

const row = (operation, path) =>
  element(
    "tr",
    {},
    element("th", { scope: "row" }, operation.replaceAll("_", " ")),
    element("td", {}, path),
  );
