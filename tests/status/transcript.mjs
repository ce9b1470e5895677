// Prints the transcript of each sample on stdin as the text that a reader sees, with the marks of its nodes.
import { readFileSync } from "node:fs";

class Node {
  constructor(tag) { Object.assign(this, { tag, marks: {}, children: [], style: {} }); }
  setAttribute(name, value) { this.marks[name] = value; }
  append(...children) { this.children.push(...children); }
  lines() {
    const own = this.children.map((child) => (child instanceof Node ? child.lines() : String(child)));
    return ["li", "ol", "ul", "p", "pre"].includes(this.tag) ? `[${this.tag}${this.marks.class ? `.${this.marks.class}` : ""} ${own.join("")}]` : own.join("");
  }
}
globalThis.document = { createElement: (tag) => new Node(tag) };
const { transcript } = await import(process.argv[2]);
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map((k) => transcript(k).lines())));
