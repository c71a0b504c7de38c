/** Makes elements. Texts become text nodes, never markup. */

const SVG = "http://www.w3.org/2000/svg";

/** The element of the page with this id. */
export const byId = (id) => document.getElementById(id);

/**
 * An HTML element, such as "p" or "p.quiet". The object of attributes is optional; attributes that
 * are false, null or undefined are left out. `style` is an object of custom properties, because the
 * content security policy forbids style attributes.
 */
export const element = (tag, ...parts) =>
  fill(document.createElement(tag.split(".")[0]), tag.split(".").slice(1), parts);

/** The same for SVG. */
export const svg = (tag, ...parts) => fill(document.createElementNS(SVG, tag), [], parts);

function fill(node, classes, [first, ...others]) {
  const isAttributes = first?.constructor === Object;
  const { style = {}, ...rest } = isAttributes ? first : {};
  for (const [name, value] of Object.entries(rest)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  for (const [name, value] of Object.entries(style)) node.style.setProperty(name, value);
  node.classList.add(...classes);
  const children = isAttributes ? others : [first, ...others];
  node.append(...children.flat().filter((child) => child != null && child !== false));
  return node;
}

/** A table cell for a number. */
export const numberCell = (text) => element("td.number", text);

/** A row of a table: its heading, then its cells, which are texts or elements. */
export const row = ([head, ...cells]) =>
  element(
    "tr",
    element("th", { scope: "row" }, head),
    cells.map((cell) => (cell instanceof Node ? cell : element("td", cell))),
  );

/** A table with headings, rows of cells, and further content. */
export function table(attributes, heads, rows, ...rest) {
  const columns = heads.map((text) => element("th", { scope: "col" }, text));
  const [head, body] = [element("thead", element("tr", columns)), rows.map(row)];
  return element("table", attributes, head, element("tbody", body), ...rest);
}

/** Calls `run` once, when `event` has not happened for `milliseconds`. */
export function onPause(target, event, milliseconds, run) {
  let timer = 0;
  target.addEventListener(event, () => {
    clearTimeout(timer);
    timer = setTimeout(run, milliseconds);
  });
}

/**
 * Makes one of `items` reachable by Tab and the others by the arrow keys, Home and End.
 * `onFocus` gets the item that the pointer or the focus is on.
 */
export function roving(container, items, onFocus) {
  items.forEach((item, place) => item.setAttribute("tabindex", place ? "-1" : "0"));
  const focus = (place) => {
    const next = items[Math.max(0, Math.min(items.length - 1, place))];
    items.forEach((item) => item.setAttribute("tabindex", item === next ? "0" : "-1"));
    next?.focus();
  };
  container.addEventListener("keydown", (event) => {
    const place = items.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (place < 0) return;
    if (step) focus(place + step);
    else if (event.key === "Home") focus(0);
    else if (event.key === "End") focus(items.length - 1);
    else return;
    event.preventDefault();
  });
  const notice = (event) => {
    const item = event.target.closest("[tabindex]");
    if (items.includes(item)) onFocus(item, items.indexOf(item));
  };
  container.addEventListener("pointerover", notice);
  container.addEventListener("focusin", notice);
}
