// Shows the rows on stdin in the cards of the page, without charts, and prints the values by heading.
import { readFileSync } from "node:fs";

class Node {
  constructor(tag) { Object.assign(this, { tag, children: [], style: {} }); }
  setAttribute() {}
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  get text() { return this.children.map((child) => (child instanceof Node ? child.text : String(child))).join(""); }
}
const cards = new Node("div");
globalThis.document = { createElement: (tag) => new Node(tag), getElementById: () => cards };
globalThis.ResizeObserver = class { observe() {} };
globalThis.matchMedia = () => ({ addEventListener() {} });
const { Card, Cards } = await import(process.argv[2]);
Card.prototype.build = () => {};
new Cards().add(JSON.parse(readFileSync(0, "utf8")));
console.log(JSON.stringify(Object.fromEntries(cards.children.map(({ children: [heading, value] }) => [heading.text, value.text]))));
