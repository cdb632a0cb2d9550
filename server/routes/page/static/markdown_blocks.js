// Read Markdown as blocks: plain data, of which `markdown.js` makes elements.
//
// The text is a model's, so it may be anything. No pattern here goes back over a line more than once, and nesting ends
// at MOST_NESTED: what is deeper is a paragraph.

const MOST_NESTED = 8;
const MOST_COLUMNS = 64;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const FENCE = /^( *)(`{3,}|~{3,})(.*)$/;

// Return blocks: {kind, …, source}. `source` is the block's own text, by which a view knows that it has it already.
export function readBlocks(text) {
  return readLines(text.replace(/\r\n?/g, "\n").split("\n").map(expandTabs), 0);
}

function expandTabs(line) {
  return line.startsWith("\t") || /^ +\t/.test(line) ? line.replace(/^[ \t]+/, (indent) => indent.replace(/\t/g, "    ")) : line;
}

function readLines(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, end] = readBlock(lines, at, depth);
    block.source = lines.slice(at, end).join("\n");
    blocks.push(block);
    at = end;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  const fence = openingFence(line);
  if (fence) return readFence(lines, at, fence);
  const heading = readHeading(line);
  if (heading) return [heading, at + 1];
  if (isRule(line)) return [{ kind: "rule" }, at + 1];
  if (depth < MOST_NESTED && isQuote(line)) return readQuote(lines, at, depth);
  if (depth < MOST_NESTED && ITEM.test(line)) return readList(lines, at, depth);
  const table = readTable(lines, at);
  return table ?? readParagraph(lines, at, depth);
}

const isBlank = (line) => line.trim() === "";
const isQuote = (line) => line.trimStart().startsWith(">");
const indentOf = (line) => line.length - line.trimStart().length;

function isRule(line) {
  const marks = line.replace(/[ \t]/g, "");
  return marks.length >= 3 && /^(?:-+|\*+|_+)$/.test(marks);
}

function openingFence(line) {
  const found = FENCE.exec(line);
  return found && !(found[2][0] === "`" && found[3].includes("`")) ? found : null;
}

function readFence(lines, at, [, indent, marks, info]) {
  const code = [];
  let end = at + 1;
  let isClosed = false;
  while (end < lines.length && !isClosed) {
    const inner = lines[end].trim();
    isClosed = inner.length >= marks.length && inner === marks[0].repeat(inner.length);
    if (!isClosed) code.push(indentOf(lines[end]) >= indent.length ? lines[end].slice(indent.length) : lines[end].trimStart());
    end += 1;
  }
  return [{ kind: "code", language: info.trim().split(" ")[0].slice(0, 24), text: code.join("\n") }, end];
}

function readHeading(line) {
  const found = /^ {0,3}(#{1,6})(?=[ \t]|$)/.exec(line);
  if (!found) return null;
  const words = line.slice(found[0].length).trim();
  const bare = words.replace(/#+$/, "");
  return { kind: "heading", level: found[1].length, text: bare === "" || /[ \t]$/.test(bare) ? bare.trim() : words };
}

function readQuote(lines, at, depth) {
  const inner = [];
  let end = at;
  while (end < lines.length && isQuote(lines[end])) {
    inner.push(lines[end].trimStart().slice(1).replace(/^ /, ""));
    end += 1;
  }
  return [{ kind: "quote", blocks: readLines(inner, depth + 1) }, end];
}

// Read items of one kind. A line that is indented by two or more belongs to the item above it: many models indent so,
// also below `1.`, where CommonMark wants three.
function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(first[2]);
  const mark = first[2].at(-1);
  const items = [];
  let isTight = true;
  let end = at;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || found[2].at(-1) !== mark || isRule(lines[end])) break;
    const [inner, next, hasGap] = readItem(lines, end, found);
    items.push(describeItem(inner, depth));
    end = next;
    const after = skipBlank(lines, end);
    const follows = after < lines.length && ITEM.exec(lines[after])?.[2].at(-1) === mark;
    if (hasGap || (follows && after > end)) isTight = false;
    if (!follows) break;
    end = after;
  }
  return [{ kind: "list", isOrdered, isTight, start: isOrdered ? parseInt(first[2], 10) : 1, items }, end];
}

function readItem(lines, at, [, indent, marker, space]) {
  const begin = indent.length + marker.length + (space.length > 4 ? 1 : space.length || 1);
  const least = indent.length + 2;
  const inner = [lines[at].slice(begin)];
  let end = at + 1;
  let hasGap = false;
  while (end < lines.length) {
    const line = lines[end];
    if (isBlank(line)) {
      const next = skipBlank(lines, end);
      if (next >= lines.length || indentOf(lines[next]) < least) break;
      inner.push(...lines.slice(end, next).map(() => ""));
      hasGap = true;
      end = next;
    } else if (indentOf(line) >= least) {
      inner.push(line.slice(Math.min(indentOf(line), begin)));
      end += 1;
    } else if (!isBlank(lines[end - 1]) && !beginsBlock(line) && !ITEM.test(line)) {
      inner.push(line);
      end += 1;
    } else break;
  }
  return [inner, end, hasGap];
}

function describeItem(inner, depth) {
  const box = /^\[([ xX])\] /.exec(inner[0]);
  if (box) inner[0] = inner[0].slice(box[0].length);
  return { isDone: box ? box[1] !== " " : null, blocks: readLines(inner, depth + 1) };
}

function skipBlank(lines, at) {
  while (at < lines.length && isBlank(lines[at])) at += 1;
  return at;
}

function beginsBlock(line) {
  const item = ITEM.exec(line);
  const opensItem = item !== null && item[3] !== "" && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
  return openingFence(line) !== null || readHeading(line) !== null || isQuote(line) || isRule(line) || opensItem;
}

function readTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length) return null;
  const head = splitCells(lines[at]);
  const marks = splitCells(lines[at + 1]);
  if (head.length !== marks.length || head.length > MOST_COLUMNS || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  const align = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "end") : "start"));
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && !isBlank(lines[end])) {
    const cells = splitCells(lines[end]).slice(0, head.length);
    rows.push(cells);
    end += 1;
  }
  return [{ kind: "table", align, head, rows }, end];
}

function splitCells(line) {
  const cells = [""];
  const inner = line.trim().replace(/^\|/, "");
  for (let i = 0; i < inner.length; i += 1) {
    if (inner[i] === "\\" && inner[i + 1] === "|") {
      cells[cells.length - 1] += "|";
      i += 1;
    } else if (inner[i] === "|") cells.push("");
    else cells[cells.length - 1] += inner[i];
  }
  if (cells.length > 1 && cells.at(-1).trim() === "") cells.pop();
  return cells.map((cell) => cell.trim());
}

function readParagraph(lines, at, depth) {
  let end = at + 1;
  const isBegun = (line) => beginsBlock(line) && depth < MOST_NESTED;
  while (end < lines.length && !isBlank(lines[end]) && !isBegun(lines[end]) && !readTable(lines, end)) end += 1;
  return [{ kind: "paragraph", text: lines.slice(at, end).map((line) => line.trimStart()).join("\n") }, end];
}
