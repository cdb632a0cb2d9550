// Make elements of the Markdown inside a paragraph. Markup in it is text, pictures are named and not loaded, and links
// lead to http, https and mailto alone.

import { el } from "./dom.js";

const MOST_NESTED = 10;
const MOST_LABEL = 1000; // characters
const MOST_ADDRESS = 2000;
const STARTS = /[\\`*_~[!<h\n]/g;
const ESCAPED = /[!-/:-@[-`{-~]/;
const BARE = /https?:\/\/[^\s<>"'`]+/y;
const MAIL_OR_WEB = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const BREAK = /<br ?\/?>/iy;
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

// Return an address that a link may have, or null. Relative ones would lead into this server.
export function safeAddress(text) {
  if (/[\u0000-\u0020\u007f]/.test(text)) return null;
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  const isKnown = url.protocol === "http:" || url.protocol === "https:" || url.protocol === "mailto:";
  return isKnown && url.username === "" && url.password === "" ? url.href : null;
}

// Append what the text stands for. In a link's label there are no links.
export function appendInline(parent, text, depth = 0, isLabel = false) {
  new InlineReader(text, depth, isLabel).appendTo(parent);
}

class InlineReader {
  constructor(text, depth, isLabel) {
    this.text = text;
    this.depth = depth;
    this.isLabel = isLabel;
    this.missing = new Set(); // what was looked for to the end and not found: nobody looks for it again
  }

  appendTo(parent) {
    const { text } = this;
    let plain = 0;
    let at = 0;
    while (at < text.length) {
      STARTS.lastIndex = at;
      const found = STARTS.exec(text);
      if (!found) break;
      at = found.index;
      const made = this.readAt(at, parent);
      if (made === null) {
        at += text[at] === "`" || text[at] === "*" || text[at] === "_" || text[at] === "~" ? runLength(text, at) : 1;
        continue;
      }
      const [nodes, end] = made;
      if (plain < at) parent.append(text.slice(plain, at));
      parent.append(...nodes);
      plain = at = end;
    }
    if (plain < text.length) parent.append(text.slice(plain));
  }

  // Return what stands here as nodes, and its end; null if it is plain text.
  readAt(at) {
    switch (this.text[at]) {
      case "\\": return this.readEscape(at);
      case "`": return this.readCode(at);
      case "<": return this.readBreak(at) ?? (this.isLabel ? null : this.readAngle(at));
      case "h": return this.isLabel ? null : this.readBare(at);
      case "\n": return [[el("br")], at + 1];
      case "!": return this.isLabel || this.text[at + 1] !== "[" ? null : this.readPicture(at);
      case "[": return this.isLabel ? null : this.readLink(at);
      default: return this.readEmphasis(at);
    }
  }

  readEscape(at) {
    const next = this.text[at + 1] ?? "";
    if (next === "(" || next === "[") {
      const close = next === "(" ? "\\)" : "\\]";
      const end = this.find(close, at + 2);
      if (end >= 0) return [[el("code", { class: "math" }, this.text.slice(at, end + 2))], end + 2];
    }
    return ESCAPED.test(next) ? [[next], at + 2] : null;
  }

  readCode(at) {
    const marks = this.text.slice(at, at + runLength(this.text, at));
    let end = at + marks.length;
    while (!this.missing.has(marks)) {
      end = this.text.indexOf(marks, end);
      if (end < 0) this.missing.add(marks);
      else if (runLength(this.text, end) === marks.length) {
        const inner = this.text.slice(at + marks.length, end).replace(/\n/g, " ");
        const isPadded = inner.length > 2 && inner.startsWith(" ") && inner.endsWith(" ");
        return [[el("code", {}, isPadded ? inner.slice(1, -1) : inner)], end + marks.length];
      } else end += runLength(this.text, end);
    }
    return null;
  }

  readAngle(at) {
    MAIL_OR_WEB.lastIndex = at;
    const found = MAIL_OR_WEB.exec(this.text);
    const address = found && safeAddress(found[1]);
    return address ? [[link(address, found[1])], at + found[0].length] : null;
  }

  readBare(at) {
    BARE.lastIndex = at;
    const found = /\w/.test(this.text[at - 1] ?? " ") ? null : BARE.exec(this.text);
    if (!found) return null;
    const words = trimAddress(found[0].slice(0, MOST_ADDRESS));
    const address = safeAddress(words);
    return address ? [[link(address, words)], at + words.length] : null;
  }

  readBreak(at) {
    BREAK.lastIndex = at;
    const found = BREAK.exec(this.text);
    return found ? [[el("br")], at + found[0].length] : null;
  }

  readPicture(at) {
    const target = this.readTarget(at + 1);
    if (!target) return null;
    const name = `[picture: ${target.label || target.address}]`;
    const address = safeAddress(target.address);
    return [[address ? link(address, name) : name], target.end];
  }

  readLink(at) {
    const target = this.readTarget(at);
    const address = target && safeAddress(target.address);
    if (!address) return null;
    const made = link(address, "");
    appendInline(made, target.label, this.depth + 1, true);
    return [[made], target.end];
  }

  // Read `[label](address "title")` at a bracket.
  readTarget(at) {
    const close = this.closingBracket(at);
    if (close < 0 || this.text[close + 1] !== "(") return null;
    const inside = /^ ?(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:\s+(?:"[^"\n]*"|'[^'\n]*'))?\s*\)/.exec(
      this.text.slice(close + 2, close + 2 + MOST_ADDRESS),
    );
    if (!inside) return null;
    const label = this.text.slice(at + 1, close);
    return { label, address: inside[1] ?? inside[2], end: close + 2 + inside[0].length };
  }

  closingBracket(at) {
    if (this.missing.has("]")) return -1;
    let open = 0;
    const last = Math.min(this.text.length, at + MOST_LABEL);
    for (let i = at; i < last; i += 1) {
      const char = this.text[i];
      if (char === "\\") i += 1;
      else if (char === "[") open += 1;
      else if (char === "]") {
        open -= 1;
        if (open === 0) return i;
      }
    }
    if (this.text.indexOf("]", at) < 0) this.missing.add("]");
    return -1;
  }

  readEmphasis(at) {
    const run = runLength(this.text, at);
    const char = this.text[at];
    if (run > 3 || this.depth >= MOST_NESTED || (char === "~" && run !== 2)) return null;
    const [before, after] = [this.text[at - 1] ?? " ", this.text[at + run] ?? " "];
    if (/\s/.test(after) || (char === "_" && /[\p{L}\p{N}]/u.test(before))) return null;
    const end = this.closingRun(char, run, at + run);
    if (end < 0) return null;
    const inner = this.text.slice(at + run, end);
    const made = el(run === 3 ? "strong" : TAGS[char.repeat(run)]);
    const inside = run === 3 ? made.appendChild(el("em")) : made;
    appendInline(inside, inner, this.depth + 1, this.isLabel);
    return [[made], end + run];
  }

  // Return where a run that closes this one begins, behind what code and escapes hide; -1: there is none.
  closingRun(char, run, begin) {
    const mark = char.repeat(run);
    if (this.missing.has(mark)) return -1;
    let at = begin;
    while (at < this.text.length) {
      const here = this.text[at];
      if (here === "\\") at += 2;
      else if (here === "`") at = this.readCode(at)?.[1] ?? at + runLength(this.text, at);
      else if (here === char) {
        const length = runLength(this.text, at);
        const closes = !/\s/.test(this.text[at - 1]) && !(char === "_" && /[\p{L}\p{N}]/u.test(this.text[at + length] ?? " "));
        if (closes && at > begin && (length === run || (length === 3 && run < 3))) return at + length - run;
        at += length;
      } else at += 1;
    }
    this.missing.add(mark);
    return -1;
  }

  find(words, from) {
    if (this.missing.has(words)) return -1;
    const at = this.text.indexOf(words, from);
    if (at < 0) this.missing.add(words);
    return at;
  }
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

// Leave out a sentence's own marks behind an address, and a bracket that was opened before it.
function trimAddress(words) {
  let end = words.length;
  let open = 0;
  for (const char of words) open += char === "(" ? 1 : char === ")" ? -1 : 0;
  while (end > 0 && (/[.,;:!?*_~\]]/.test(words[end - 1]) || (words[end - 1] === ")" && open < 0))) {
    if (words[end - 1] === ")") open += 1;
    end -= 1;
  }
  return words.slice(0, end);
}

function link(address, words) {
  return el("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer nofollow" }, words);
}
