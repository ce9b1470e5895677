// Nodes. Data goes into the document as text nodes and properties only: no data of a run is parsed as markup.

export const byId = (id) => document.getElementById(id);

/** An element with text or nodes as children; `attributes` may have `class`, `title`, `colspan` ... */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value) node.setAttribute(name, value);
  node.append(...children.flat().map((child) => child ?? "–"));
  return node;
}

/** Fill a table. A number is set to the right, as is its heading; a heading is text. */
export function fill(id, headings, rows) {
  const right = (cell) => (typeof cell === "number" || typeof cell?.number === "string" ? { class: "number" } : {});
  const shown = (cell) => (cell instanceof Node ? cell : String(cell?.number ?? cell ?? "–"));
  const first = rows[0] ?? [];
  byId(id).replaceChildren(
    ...(headings ? [element("tr", {}, headings.map((text, i) => element("th", { scope: "col", ...right(first[i]) }, text)))] : []),
    ...rows.map((row) => element("tr", {}, row.map((cell) => element("td", right(cell), shown(cell))))),
  );
}

/** Set a text only if it differs, so that a selection and a screen reader are left in peace. */
export function say(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

const known = new Map();

/** Whether a value differs from the one at the last call with this name. */
export function changed(name, value) {
  const text = JSON.stringify(value);
  if (known.get(name) === text) return false;
  known.set(name, text);
  return true;
}
