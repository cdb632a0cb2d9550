// Show Markdown as elements. The text comes from a model and is not trusted: it becomes text nodes and elements of a few
// kinds, never markup.

import { copyText, el } from "./dom.js";
import { readBlocks } from "./markdown_blocks.js";
import { appendInline } from "./markdown_inline.js";

// A part of the page that shows a text which grows. Blocks that stay as they were keep their elements.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.shown = []; // {source, node} of each block
  }

  show(text) {
    const blocks = readBlocks(text);
    let same = 0;
    while (same < this.shown.length && same < blocks.length && this.shown[same].source === blocks[same].source) same += 1;
    for (const { node } of this.shown.splice(same)) node.remove();
    for (const block of blocks.slice(same)) {
      const node = makeBlock(block);
      this.root.append(node);
      this.shown.push({ source: block.source, node });
    }
  }
}

function makeBlock(block) {
  switch (block.kind) {
    case "heading": return inline(`h${Math.min(block.level + 2, 6)}`, block.text);
    case "code": return makeCode(block);
    case "rule": return el("hr");
    case "quote": return el("blockquote", {}, block.blocks.map(makeBlock));
    case "list": return makeList(block);
    case "table": return makeTable(block);
    default: return inline("p", block.text);
  }
}

function inline(tag, text, properties = {}) {
  const node = el(tag, properties);
  appendInline(node, text);
  node.dir = "auto"; // last: the browser looks through all of it at each change
  return node;
}

function makeCode({ language, text }) {
  const copy = el("button", { type: "button", class: "quiet small", onclick: () => copyCode(copy, text) }, "Copy");
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copy);
  return el("figure", { class: "code" }, head, el("pre", { tabindex: "0", "aria-label": `Code, ${language || "text"}` }, el("code", {}, text)));
}

async function copyCode(button, text) {
  button.textContent = (await copyText(text)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function makeList({ isOrdered, isTight, start, items }) {
  const made = items.map(({ isDone, blocks }) => {
    const box = isDone === null ? null : el("input", { type: "checkbox", checked: isDone, disabled: true, "aria-label": isDone ? "done" : "open" });
    return el("li", { class: box ? "task" : null }, box, blocks.map(makeBlock));
  });
  return el(isOrdered ? "ol" : "ul", { class: isTight ? "tight" : null, start: start !== 1 ? start : null }, made);
}

function makeTable({ align, head, rows }) {
  const cell = (tag, text, column) => inline(tag, text, { class: `to-${align[column]}`, scope: tag === "th" ? "col" : null });
  const body = rows.map((cells) => el("tr", {}, cells.map((text, column) => cell("td", text, column))));
  const top = el("tr", {}, head.map((text, column) => cell("th", text, column)));
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", {}, el("thead", {}, top), el("tbody", {}, body)));
}
