/** Exports what a view shows: its requests as code, a link that opens it again, and JSON. */

import { addressOf, hasToken } from "./api.js";
import { byId, element } from "./dom.js";
import { count } from "./format.js";

/** The longest link; some programs cut longer ones. */
const MOST_CHARACTERS = 8000;
/** The fields of each view that a link fills in, by their names in the link. */
const FIELDS = {
  text: { texts: "texts" },
  match: { query: "match-query", passages: "match-passages" },
  search: { query: "search-query", text: "corpus" },
  extract: { texts: "extract-texts", labels: "extract-labels", threshold: "extract-threshold" },
};
const MODELS = ["embedder", "reranker", "extractor"];

/** Functions that write the code, by language. */
const CODE = {
  curl: ({ requests }) => curl(requests),
  Python: ({ program }) => program(),
  JavaScript: ({ requests }) => javascript(requests),
};

/** The buttons below the content of a view. */
export class TakeBar {
  #view;
  #models;
  #shown = null;
  #told = element("p.quiet", { role: "status" });
  #text = element("textarea", { readonly: true, rows: 8, hidden: true, "aria-label": "Copied text" });

  constructor(view, models) {
    this.#view = view;
    this.#models = models;
    const buttons = [
      ...Object.keys(CODE).map((name) =>
        button(`Copy as ${name}`, () => this.#copy(CODE[name](this.#shown))),
      ),
      button("Copy a link", () => this.#copyLink()),
      button("Save as JSON", () => this.#save()),
    ];
    const bar = element("div.choices", { role: "group", "aria-label": "Copy or save" }, buttons);
    byId(`${view}-output`).append(element("h2", "Copy or save"), bar, this.#told, this.#text);
  }

  /**
   * `requests`, `[{path, body}]`, are those that made the shown `result`. `fields` are filled in
   * by a link, or a sentence on why there can be no link. `program()` is the Python code of a view
   * that does more than these requests.
   */
  show(requests, result, fields, program = () => python(requests)) {
    this.#shown = { requests, result, fields, program };
    this.#told.textContent = "";
    this.#text.hidden = true;
  }

  async #copy(text) {
    this.#text.value = text;
    this.#text.hidden = false;
    try {
      await navigator.clipboard.writeText(text);
      this.#told.textContent = "Copied.";
    } catch {
      // Browsers allow it only for pages from HTTPS or this machine.
      this.#text.select();
      this.#told.textContent = "The browser does not allow this page to copy. Copy the text below.";
    }
  }

  #copyLink() {
    const { fields } = this.#shown;
    const models = MODELS.map((what) => [what, this.#models[`${what}Key`]]).filter(([, key]) => key);
    const given = new URLSearchParams({ ...fields, ...Object.fromEntries(models) });
    const link = `${location.href.split("#")[0]}#${this.#view}?${given}`;
    const [length, most] = [link.length, MOST_CHARACTERS].map(count);
    const isLong = link.length > MOST_CHARACTERS;
    const obstacle = isLong && `The link would be ${length} characters long; the limit is ${most}.`;
    if (typeof fields === "object" && !isLong) return this.#copy(link);
    this.#text.hidden = true;
    this.#told.textContent = obstacle || fields;
  }

  #save() {
    const { requests, result } = this.#shown;
    const text = JSON.stringify({ view: this.#view, requests, result }, plain, 2);
    const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    element("a", { href: address, download: `${this.#view}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  }
}

function button(text, run) {
  const made = element("button", { type: "button" }, text);
  made.onclick = run;
  return made;
}

const plain = (_, value) => (ArrayBuffer.isView(value) ? Array.from(value) : value);

/**
 * Reads the part of an address after "#": `{view, fields, isLong}` and the models. It is not
 * trusted: `fields`, by the ids of elements, are null unless they are those of a view.
 */
export function readLink(hash) {
  const [view, query] = hash.slice(1).split(/\?(.*)/s);
  const known = Object.hasOwn(FIELDS, view) ? FIELDS[view] : {};
  if (hash.length > MOST_CHARACTERS) return { view, fields: null, isLong: true };
  const given = new URLSearchParams(query);
  const filled = Object.entries(known).filter(([name]) => given.has(name));
  const fields = filled.map(([name, id]) => [id, given.get(name)]);
  const models = Object.fromEntries(MODELS.map((what) => [what, given.get(what) ?? ""]));
  return { view, ...models, fields: fields.length ? fields : null };
}

const json = (body) => JSON.stringify(body, null, 2);

/** The shell expands nothing in the body, and no line ends it: they begin with a brace or a space. */
function curl(requests) {
  const token = hasToken() ? ` \\\n  -H "Authorization: Bearer $API_TOKEN"` : "";
  const command = ({ path, body }) =>
    `curl -sS '${addressOf(path).replaceAll("'", "%27")}'${token} \\\n` +
    `  -H 'Content-Type: application/json' --data-binary @- <<'END'\n${json(body)}\nEND\n`;
  return requests.map(command).join("\n");
}

function python(requests) {
  const asked = requests.map(
    ({ path, body }) => `print(json.dumps(ask("${path}", ${pythonLiteral(body)})))`,
  );
  return `${pythonImports()}\n\n\n${pythonAsk()}\n\n\n${asked.join("\n")}\n`;
}

/** Converts a value to a Python literal: outside strings, three words differ from JSON. */
export function pythonLiteral(value) {
  const words = { true: "True", false: "False", null: "None" };
  const line = /^(\s*"\w+": )(true|false|null)(,?)$/gm;
  return json(value).replace(line, (_, name, word, comma) => name + words[word] + comma);
}

/** The modules that `pythonAsk` needs. */
export const pythonImports = () =>
  `import json\n${hasToken() ? "import os\n" : ""}from urllib.request import Request, urlopen`;

/** A function that sends a body to a path of the service and returns the response. */
export function pythonAsk() {
  const token = hasToken() ? `, "Authorization": "Bearer " + os.environ["API_TOKEN"]` : "";
  return `def ask(path, body):
    headers = {"Content-Type": "application/json"${token}}
    request = Request(${JSON.stringify(addressOf(""))} + path, json.dumps(body).encode(), headers)
    with urlopen(request) as answer:
        return json.load(answer)`;
}

function javascript(requests) {
  const token = hasToken() ? `, Authorization: \`Bearer \${process.env.API_TOKEN}\`` : "";
  return `async function ask(path, body) {
  const headers = { "Content-Type": "application/json"${token} };
  const request = { method: "POST", headers, body: JSON.stringify(body) };
  return (await fetch(${JSON.stringify(addressOf(""))} + path, request)).json();
}

${requests.map(({ path, body }) => `console.log(JSON.stringify(await ask("${path}", ${json(body)})));`).join("\n")}
`;
}
