// Show the messages of a conversation's branch, and what one can do with each.

import { siblingsOf } from "./conversation.js";
import { copyText, el, isSendKey, replace } from "./dom.js";
import { bytes, count, percent, plural, rate, seconds } from "./format.js";
import { MarkdownView } from "./markdown.js";

const ENDS = { length: "The answer reached the most tokens that it may have.", time_limit: "The answer reached its time limit." };

// A message on the page. `actions`: what the chat does for it: edit, again, show (a branch), answerCalls.
export class MessageView {
  constructor(conversation, node, actions) {
    this.conversation = conversation;
    this.node = node;
    this.actions = actions;
    this.root = el("article", { class: `message ${node.role}`, "aria-label": { user: "You", assistant: "Answer", tool: "Results of tools" }[node.role] });
    this.body = el("div", { class: "body" });
    this.foot = el("footer");
    this.root.append(this.body, this.foot);
    if (node.role === "assistant") this.prepareAnswer();
    this.update();
  }

  prepareAnswer() {
    this.reasoning = el("details", { class: "reasoning", hidden: true }, el("summary"), el("div", { class: "prose" }));
    this.reasoningView = new MarkdownView(this.reasoning.lastChild);
    this.text = el("div", { class: "prose" });
    this.textView = new MarkdownView(this.text);
    this.calls = el("div");
    this.notes = el("div");
    this.body.append(this.reasoning, this.text, this.calls, this.notes);
  }

  // Show the message as it is now. `answer`: the one under way, if there is one.
  update(answer = null) {
    const { node } = this;
    this.root.toggleAttribute("aria-busy", node.state === "running");
    if (node.role === "user") replace(this.body, showFiles(node.files), node.text && el("p", { class: "words", dir: "auto" }, node.text));
    else if (node.role === "tool") replace(this.body, node.results.map((result) => showResult(this.conversation, result)));
    else this.updateAnswer(answer);
    if (node.state !== "running") this.showFoot();
    else if (this.foot.childElementCount > 0) replace(this.foot);
  }

  updateAnswer(answer) {
    const { node } = this;
    this.reasoning.hidden = !node.reasoning;
    if (node.reasoning) {
      const words = node.reasoning.trim().split(/\s+/).length;
      const isThinking = node.state === "running" && !node.text && !node.calls?.length;
      this.reasoning.firstChild.textContent = `${isThinking ? "Thinking" : "Reasoning"}, ${plural(words, "word")}`;
      this.reasoningView.show(node.reasoning);
    }
    this.textView.show(node.text);
    const isOpen = node.state === "done" && this.conversation.leaf === node.id;
    if (!this.calls.querySelector("textarea") || !isOpen) replace(this.calls, this.showCalls(isOpen));
    replace(this.notes, this.showNotes(answer));
  }

  showNotes(answer) {
    const { node } = this;
    if (node.state === "running") {
      if (answer?.progress) return showProgress(answer.progress);
      return node.text || node.reasoning || node.calls?.length ? null : el("p", { class: "note waiting" }, this.actions.waitOf(this.conversation) ?? "Waiting for the first token");
    }
    if (node.state === "failed") return el("p", { class: "note error", role: "alert" }, el("strong", {}, `${describeFailure(node)}: `), node.error);
    if (node.state === "stopped") return el("p", { class: "note" }, "Stopped.");
    return ENDS[node.finish] ? el("p", { class: "note" }, ENDS[node.finish]) : null;
  }

  showCalls(isOpen) {
    const calls = this.node.calls ?? [];
    if (calls.length === 0) return [];
    const cards = calls.map((call) => el("details", { class: "call", open: true }, el("summary", {}, "Call of ", el("code", {}, call.name)), el("pre", { tabindex: "0" }, pretty(call.arguments))));
    if (!isOpen) return cards;
    const fields = calls.map((call) => el("label", { class: "result" }, `Result of ${call.name}`, el("textarea", { rows: 2 })));
    const send = () => this.actions.answerCalls(this.node, fields.map((field, i) => ({ id: calls[i].id, text: field.querySelector("textarea").value })));
    return [...cards, ...fields, el("button", { type: "button", onclick: send }, `Send ${calls.length === 1 ? "the result" : "results"}`)];
  }

  showFoot() {
    const { node, actions } = this;
    const button = (label, act) => el("button", { type: "button", class: "quiet small", onclick: act }, label);
    const copy = button("Copy", async () => {
      copy.textContent = (await copyText(node.text)) ? "Copied" : "Not copied";
    });
    const buttons = [this.showBranches()];
    if (node.text) buttons.push(copy);
    if (node.role === "user") buttons.push(button("Edit", () => this.edit()));
    if (node.role === "assistant") buttons.push(button(node.state === "failed" ? "Try again" : "Again", () => actions.again(node)));
    replace(this.foot, el("div", { class: "actions" }, buttons.filter(Boolean)), node.figures && showFigures(node.figures, actions.contextOf(this.conversation)));
  }

  showBranches() {
    const siblings = siblingsOf(this.conversation, this.node);
    if (siblings.length < 2) return null;
    const at = siblings.indexOf(this.node);
    const step = (by, label, sign) => el("button", { type: "button", class: "quiet small", "aria-label": label, disabled: !siblings[at + by], onclick: () => this.actions.show(siblings[at + by]) }, sign);
    return el("span", { class: "branches", role: "group", "aria-label": `Branch ${at + 1} of ${siblings.length}` }, step(-1, "Branch before", "‹"), `${at + 1} / ${siblings.length}`, step(1, "Branch after", "›"));
  }

  edit() {
    const area = el("textarea", { class: "edit", "aria-label": "Edit your message", value: this.node.text, rows: Math.min(12, this.node.text.split("\n").length + 1) });
    const send = () => area.value.trim() && this.actions.edit(this.node, area.value);
    const cancel = () => {
      this.update();
      this.foot.querySelector("button:last-of-type")?.focus();
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (!isSendKey(event) && !(event.key === "Enter" && (event.ctrlKey || event.metaKey))) return;
      event.preventDefault();
      send();
    });
    replace(this.body, showFiles(this.node.files), area);
    replace(this.foot, el("div", { class: "actions" }, el("button", { type: "button", class: "main small", onclick: send }, "Send"), el("button", { type: "button", class: "quiet small", onclick: cancel }, "Cancel")));
    area.focus();
  }
}

// Say of an answer that failed whether there is some of it.
export const describeFailure = (node) => (node.text || node.reasoning || node.calls?.length ? "The answer broke off" : "No answer");

function showFiles(files) {
  if (!files?.length) return null;
  return el("ul", { class: "files" }, files.map((file) => el("li", {}, file.document ? showStored(file) : showText(file))));
}

const showStored = (file) => el("span", { class: "file" }, file.name, el("small", {}, ` document, ${plural(file.tokens, "token")}`));

const showText = (file) => el("details", { class: "file" }, el("summary", {}, file.name, el("small", {}, ` ${bytes(file.bytes)}`)), el("pre", { tabindex: "0" }, file.text));

function showResult(conversation, result) {
  const calls = Object.values(conversation.nodes).flatMap((node) => node.calls ?? []);
  const name = calls.find((call) => call.id === result.id)?.name ?? "a tool";
  return el("details", { class: "call" }, el("summary", {}, "Result of ", el("code", {}, name)), el("pre", { tabindex: "0" }, result.text));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not whole yet
  }
}

function showProgress({ processed, total }) {
  const words = `Reading the prompt: ${count(processed)} of ${plural(total, "token")}`;
  return el("div", { class: "note" }, words, el("progress", { max: total, value: processed, "aria-label": words }));
}

// Return what an answer took. `context`: the most tokens that there are, or null.
function showFigures(figures, context) {
  const parts = [];
  if (figures.first_seconds !== null) parts.push(["first token", seconds(figures.first_seconds)]);
  if (figures.rate) parts.push(["", rate(figures.rate)]);
  if (figures.prompt_tokens !== undefined) {
    const { prompt_tokens: prompt, answer_tokens: answer, cached_tokens: cached } = figures;
    parts.push(["", plural(answer, "token")]);
    parts.push(["cached", `${count(cached)} of ${count(prompt)}${describePlaces(figures.cached_from)}`]);
    parts.push(["context", context ? `${count(prompt + answer)} of ${count(context)} (${percent(prompt + answer, context)})` : count(prompt + answer)]);
  }
  const line = parts.map(([name, value]) => el("span", {}, name && `${name} `, el("b", {}, value)));
  const others = Object.entries(figures.others ?? {});
  const more = others.length > 0 && el("details", { class: "more" }, el("summary", {}, "more"), el("dl", {}, others.flatMap(([name, value]) => [el("dt", {}, name.replaceAll("_", " ")), el("dd", {}, count(value))])));
  return el("div", { class: "figures" }, line, more);
}

function describePlaces(places) {
  const found = Object.entries(places).filter(([, tokens]) => tokens > 0 && tokens !== undefined);
  return found.length > 0 ? `, ${found.map(([place, tokens]) => `${place} ${count(tokens)}`).join(", ")}` : "";
}
