/** The facts about the server: models, device, and the implementations that passed their check. */

import { byId, element, table } from "../core/dom.js";
import { count } from "../core/format.js";
import { namesOf } from "../core/models.js";

/** Shows the response of /health. */
export function renderFacts(health) {
  const { gpu } = health;
  const lines = {
    Version: health.version,
    "Embedding model": health.model,
    "Dense vectors": health.dense_embedding_model,
    Reranker: health.reranker_model,
    Hardware: gpu.device_info ?? "not known yet",
    Devices: gpu.configured_devices.join(", "),
    "Failed devices": gpu.failed_devices.join(", "),
    "Number format": health.dtype,
    "Attention kernel": health.attention,
    "Longest text": `${count(health.max_input_length)} tokens`,
    "Tokens per batch": health.max_batch_tokens && count(health.max_batch_tokens),
  };
  byId("facts").replaceChildren(
    ...Object.entries(lines)
      .filter(([, text]) => text)
      .map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))),
  );
  byId("demo-note").textContent = health.demo ? `A demo: ${health.demo}.` : "";
  byId("served").replaceChildren(servedTable(health.served_models));
  const further = health.served_models.filter(
    ({ name, info }) => info && !health.models.some((model) => model.name === name),
  );
  byId("models").replaceChildren(
    ...[...health.models, ...further.map(({ info }) => info)].map(modelTable),
  );
}

/** Each model with its state and, while it is loaded, its outputs. */
function servedTable(served) {
  return table(
    {},
    ["Model", "Task", "State", "Output", "Requests"],
    served.map(({ name, task, state, reason, makes, requests }) => [
      name,
      task,
      reason ? `${state}: ${reason}` : state,
      makes ? namesOf(makes.kinds) : "–",
      requests === null ? "–" : count(requests),
    ]),
  );
}

function modelTable({ name, dtype, paths, refused, launch }) {
  const title = [name, dtype, launch && `launched as ${launch}`].filter(Boolean).join(" · ");
  const lost = refused.map(({ operation, path, reason }) => [
    operation,
    `${path} was refused: ${reason}`,
  ]);
  const rows = [...Object.entries(paths), ...lost].map(([operation, path]) => [
    operation.replaceAll("_", " "),
    path,
  ]);
  const made = table({}, ["Operation", "Implementation"], rows);
  made.prepend(element("caption", {}, title));
  return made;
}
