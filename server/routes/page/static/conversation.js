// A conversation is a tree of messages: to edit one, or to ask again, adds a branch. Plain data, which is kept as it is.
//
// A message: {id, parent, role, created, text, …}. A user's has `files`; the assistant's has `reasoning`, `calls`,
// `figures`, `error`, `state` (running, done, stopped, failed); a tool's has `results`, by the ids of calls.

import { newId } from "./dom.js";

export const DEFAULTS = { system: "", temperature: null, top_p: null, max_tokens: null, reasoning_effort: "", tools: "" };
const LONGEST_TITLE = 60;

export function newConversation(choice = {}) {
  const now = Date.now();
  return { id: newId("chat"), title: "", created: now, changed: now, leaf: null, nodes: {}, model: choice.model ?? "", profile: choice.profile ?? "", settings: { ...DEFAULTS, ...choice.settings } };
}

// Add a message below `parent` (null: a first one), and make it the end of what is shown.
export function addNode(conversation, parent, fields) {
  const node = { id: newId("message"), parent, created: Date.now(), ...fields };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node);
  return node;
}

function titleOf({ text, files }) {
  const line = text.trim().split("\n")[0] || files.map((file) => file.name).join(", ");
  return line.length > LONGEST_TITLE ? `${line.slice(0, LONGEST_TITLE - 1).trimEnd()}…` : line;
}

// Return the messages from the first one to this one.
export function pathTo(conversation, id = conversation.leaf) {
  const path = [];
  for (let node = conversation.nodes[id]; node; node = conversation.nodes[node.parent]) path.push(node);
  return path.reverse();
}

// Return a message and the others in its place, in the order of their making.
export function siblingsOf(conversation, node) {
  return Object.values(conversation.nodes).filter((other) => other.parent === node.parent);
}

// Show the branch that this message is in, to its newest end.
export function showBranch(conversation, node) {
  let last = node;
  for (;;) {
    const below = Object.values(conversation.nodes).filter((other) => other.parent === last.id);
    if (below.length === 0) break;
    last = below.at(-1);
  }
  conversation.leaf = last.id;
}

// Return what the API is asked with: messages, and the ids of stored documents.
export function requestOf(conversation, path) {
  const { settings } = conversation;
  const messages = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const node of path) messages.push(...messagesOf(node));
  const ids = path.flatMap((node) => node.files ?? []).filter((file) => file.document).map((file) => file.document);
  const body = { messages };
  if (ids.length > 0) body.documents = [...new Set(ids)];
  for (const name of ["temperature", "top_p", "max_tokens"]) if (settings[name] !== null) body[name] = settings[name];
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  if (settings.tools.trim()) body.tools = JSON.parse(settings.tools);
  return body;
}

function messagesOf(node) {
  if (node.role === "user") return [{ role: "user", content: textWithFiles(node) }];
  if (node.role === "tool") return node.results.map(({ id, text }) => ({ role: "tool", tool_call_id: id, content: text }));
  const message = { role: "assistant", content: node.text };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.calls?.length) message.tool_calls = node.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text || "{}" } }));
  return [message];
}

// Return a message's words behind its files, each in a fence that nothing in the file closes.
export function textWithFiles({ text, files }) {
  const parts = (files ?? []).filter((file) => !file.document).map((file) => {
    const longest = Math.max(2, ...(file.text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${file.name}:\n${fence}\n${file.text}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

// Return what is shown of a conversation, as Markdown.
export function asMarkdown(conversation) {
  const names = { user: "You", assistant: "Answer", tool: "Results of tools" };
  const parts = pathTo(conversation).map((node) => {
    const calls = (node.calls ?? []).map((call) => `Call: \`${call.name}(${call.arguments})\``);
    const results = (node.results ?? []).map((result) => result.text);
    const words = node.role === "user" ? textWithFiles(node) : node.text;
    return [`## ${names[node.role]}`, words, ...calls, ...results].filter(Boolean).join("\n\n");
  });
  return [`# ${conversation.title || "Conversation"}`, ...parts].join("\n\n") + "\n";
}

// Return the conversations of a file that `writeExport` made: known fields of the right kinds, and nothing else. Raises an
// Error that says what is wrong.
export function readExport(text) {
  let tree;
  try {
    tree = JSON.parse(text);
  } catch {
    throw new Error("this file is not JSON");
  }
  if (tree?.kind !== "tandem-conversations" || !Array.isArray(tree.conversations)) throw new Error("this file holds no conversations of this page");
  return tree.conversations.map(cleanConversation);
}

function cleanConversation(one) {
  if (typeof one?.id !== "string" || typeof one.nodes !== "object" || one.nodes === null) throw new Error("a conversation in this file is incomplete");
  const clean = newConversation({ model: string(one.model), profile: string(one.profile) });
  for (const [name, start] of Object.entries(DEFAULTS)) {
    const given = one.settings?.[name];
    if (start === null ? typeof given === "number" : typeof given === "string") clean.settings[name] = given;
  }
  for (const node of Object.values(one.nodes)) clean.nodes[node?.id] = cleanNode(node);
  for (const node of Object.values(clean.nodes)) if (!clean.nodes[node.parent]) node.parent = null;
  const leaf = Object.hasOwn(clean.nodes, one.leaf) ? one.leaf : (Object.keys(clean.nodes).at(-1) ?? null);
  return { ...clean, id: one.id, title: string(one.title), created: number(one.created), changed: number(one.changed), leaf };
}

function cleanNode(node) {
  if (typeof node?.id !== "string" || !["user", "assistant", "tool"].includes(node.role)) throw new Error("a message in this file is incomplete");
  const strings = (tree, ...names) => Object.fromEntries(names.map((name) => [name, string(tree?.[name])]));
  const clean = { ...strings(node, "id", "parent", "role", "text", "reasoning", "error", "finish"), created: number(node.created) };
  if (node.role === "assistant") clean.state = ["stopped", "failed"].includes(node.state) ? node.state : "done";
  clean.files = array(node.files).map((file) => ({ ...strings(file, "name", "text", "document"), bytes: number(file?.bytes), tokens: number(file?.tokens) }));
  clean.calls = array(node.calls).map((call) => strings(call, "id", "name", "arguments"));
  clean.results = array(node.results).map((result) => strings(result, "id", "text"));
  return clean;
}

const string = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : 0);
const array = (value) => (Array.isArray(value) ? value : []);

export function writeExport(conversations) {
  return JSON.stringify({ kind: "tandem-conversations", version: 1, conversations }, null, 1);
}
