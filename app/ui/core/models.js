/** The models that are served, and which of them the page asks: chosen where there are several. */

import { ApiError, tokenize } from "./api.js";
import { byId, element } from "./dom.js";

const NO_RERANKER = "none";
const LATE_INTERACTION = "late-interaction";
const STORED = "smart-embedder-";
const STATES = { unloaded: "not loaded", loading: "being loaded", failed: "failed" };

/**
 * A model as requests name it. `key` is empty for what answers where a request names none;
 * `tokenizer` is the model whose tokens are shown. `kinds` and `inputTypes` are null while it is
 * not known what it makes, because it is not loaded.
 */
function offer({ name, state, reason, makes }, key = name) {
  return {
    key,
    label: name,
    tokenizer: name,
    makers: [name],
    state,
    reason,
    kinds: makes?.kinds ?? null,
    inputTypes: makes?.input_types ?? null,
    maxLength: makes?.max_length ?? null,
  };
}

/** The embedding models that a request may name; the first is what answers where it names none. */
export function embeddersOf({ model, dense_embedding_model: dense, served_models: served }) {
  const embedders = served.filter((each) => each.task === "embed");
  const find = (name) => embedders.find((each) => each.name === name) ?? { name };
  const further = embedders.filter(({ name }) => name !== model && name !== dense);
  const first = dense === model ? [offer(find(model), "")] : pair(find(dense), find(model));
  return [...first, ...further.map((each) => offer(each))];
}

/** Two models side by side, one for dense vectors and one for the others; and the latter alone. */
function pair(dense, rest) {
  const [one, other] = [offer(dense), offer(rest)];
  const others = other.kinds?.filter((kind) => kind !== "dense");
  // Where it makes dense vectors alone, nobody asks for them.
  const shown = others?.length === 0 ? one : other;
  const both = {
    ...shown,
    key: "",
    label: `${one.label} + ${other.label}`,
    makers: [one.label, other.label],
    kinds: one.kinds && others ? ["dense", ...others] : null,
    inputTypes: [...new Set([...(one.inputTypes ?? []), ...(other.inputTypes ?? [])])],
  };
  return [both, other];
}

/** The rerankers; the first is what answers where a request names none. */
export function rerankersOf({ model, reranker_model: own, served_models: served }) {
  const rerankers = served.filter((each) => each.task === "rerank");
  const further = rerankers.filter(({ name }) => name !== own).map((each) => offer(each));
  if (own === NO_RERANKER) return further;
  const late = { name: `late interaction of ${model}`, state: "ready", makes: { kinds: ["scores"] } };
  const first = own === LATE_INTERACTION ? late : rerankers.find(({ name }) => name === own);
  return [offer(first ?? { name: own }, ""), ...further];
}

const OFFERS = { embedder: embeddersOf, reranker: rerankersOf };

/** Fires `choice` when another model is asked from now on. */
export class Models extends EventTarget {
  #offered = { embedder: [], reranker: [] };
  #keys = {};

  constructor(status) {
    super();
    this.status = status;
    for (const what of Object.keys(OFFERS)) {
      this.#keys[what] = sessionStorage.getItem(STORED + what) ?? "";
      byId(what).onchange = ({ target }) => this.#choose(what, target.value);
    }
    status.addEventListener("health", () => this.#refresh());
  }

  /** What the chosen embedding model is called in requests. */
  get embedderKey() {
    return this.#keys.embedder;
  }

  /** The same for the chosen reranker. */
  get rerankerKey() {
    return this.#keys.reranker;
  }

  /** The chosen embedding model, or that of a `key`, which is loaded first where it is not. */
  embedder(signal, key) {
    return this.#known("embedder", signal, key);
  }

  /** Lists the embedding models in a `select`; whether there are several. */
  listIn(select) {
    const chosen = select.selectedIndex < 0 ? this.#keys.embedder : select.value;
    fillSelect(select, this.#offered.embedder, chosen);
    return this.#offered.embedder.length > 1;
  }

  /** The chosen reranker, or null where there is none. */
  reranker(signal) {
    return this.#known("reranker", signal);
  }

  /** Chooses models by what requests call them, as far as they are served. */
  async pick(keys) {
    await this.status.known();
    for (const what of Object.keys(OFFERS)) {
      const isServed = this.#offered[what].some(({ key }) => key === keys[what]);
      if (isServed && keys[what] !== this.#keys[what]) this.#choose(what, keys[what]);
    }
  }

  async #known(what, signal, key) {
    await this.status.known();
    let chosen = this.#chosen(what, key);
    if (chosen && !chosen.kinds) {
      await tokenize(["."], chosen, { signal }); // Which loads it.
      await this.status.refresh();
      chosen = this.#chosen(what, key);
    }
    if (chosen && !chosen.kinds)
      throw new ApiError(503, "loading", `${chosen.label} is being loaded.`, 1);
    return chosen ?? null;
  }

  #chosen(what, wanted = this.#keys[what]) {
    return this.#offered[what].find(({ key }) => key === wanted);
  }

  #choose(what, key) {
    this.#keys[what] = key;
    sessionStorage.setItem(STORED + what, key);
    this.#show();
    this.dispatchEvent(new Event("choice"));
  }

  /** Offers what /health names; what was chosen may be gone after a restart. */
  #refresh() {
    for (const [what, offersOf] of Object.entries(OFFERS)) {
      this.#offered[what] = offersOf(this.status.health);
      const first = this.#offered[what][0]?.key ?? "";
      if (!this.#chosen(what) && this.#keys[what] !== first) this.#choose(what, first);
    }
    this.#show();
  }

  #show() {
    for (const what of Object.keys(OFFERS)) {
      byId(`${what}-choice`).hidden = this.#offered[what].length < 2;
      fillSelect(byId(what), this.#offered[what], this.#keys[what]);
    }
    const isHidden = Object.values(this.#offered).every((offered) => offered.length < 2);
    byId("model-bar").hidden = isHidden;
    const said = isHidden ? "" : sentenceOf(this.#chosen("embedder"));
    if (byId("model-state").textContent !== said) byId("model-state").textContent = said;
  }
}

/** Changes what has changed, so that an open list stays open. */
function fillSelect(select, offered, chosen) {
  const isSame = offered.every(({ key }, i) => select.options[i]?.value === key);
  if (!isSame || select.options.length !== offered.length)
    select.replaceChildren(...offered.map(({ key }) => element("option", { value: key })));
  offered.forEach(({ label, state }, i) => {
    const text = state in STATES ? `${label} (${STATES[state]})` : label;
    if (select.options[i].textContent !== text) select.options[i].textContent = text;
  });
  select.value = chosen;
}

function sentenceOf({ label, state, reason, kinds }) {
  if (state === "unloaded") return "It is loaded when it is first used.";
  if (state === "loading") return `${label} is being loaded.`;
  if (state === "failed") return reason ?? "";
  return kinds ? `It makes ${namesOf(kinds)} vectors.` : "";
}

const NAMES = { dense: "dense", sparse: "sparse", colbert: "ColBERT" };

/** Kinds of output in words: "dense, sparse and ColBERT". */
export function namesOf(kinds) {
  return new Intl.ListFormat("en-GB").format(kinds.map((kind) => NAMES[kind] ?? kind));
}

/**
 * The kinds of vectors that a model makes, in one sentence with the parts of a view that it lacks
 * without the others, `lost` by kind; empty where it makes all.
 */
export function missingSentence({ makers, kinds }, lost) {
  const missing = Object.keys(lost).filter((kind) => !kinds.includes(kind));
  if (!missing.length) return "";
  const list = new Intl.ListFormat("en-GB");
  const make = makers.length > 1 ? "make" : "makes";
  return (
    `${list.format(makers)} ${make} only ${namesOf(kinds)} vectors, so there ` +
    `is ${list.format(missing.map((kind) => lost[kind]))}.`
  );
}
