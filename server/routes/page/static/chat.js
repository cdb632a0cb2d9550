// The chat: the conversation that is shown, its answers under way, and what one does with them.

import { Answer } from "./answer.js";
import { Composer } from "./composer.js";
import { addNode, asMarkdown, newConversation, pathTo, showBranch, writeExport } from "./conversation.js";
import { announce, byId, el, replace, saveFile } from "./dom.js";
import { count, percent, plural } from "./format.js";
import { describeFailure, MessageView } from "./messages.js";
import { server } from "./server.js";
import { store } from "./store.js";

const SAVE_MS = 1000; // while an answer comes
const LAST_KEY = "tandem.last";
const CHOICE_KEY = "tandem.choice";
const NEAR_END = 80; // pixels

export class Chat {
  constructor() {
    this.conversation = newConversation(lastChoice());
    this.answers = new Map(); // under way, by conversation
    this.views = [];
    this.onListChanged = () => {};
    this.actions = {
      edit: (node, text) => this.edit(node, text),
      again: (node) => this.again(node),
      show: (node) => this.showNode(node),
      answerCalls: (node, results) => this.answerCalls(node, results),
      contextOf: ({ model, profile }) => server.contextOf(model, profile),
      waitOf: ({ model }) => server.describeWait(model),
    };
    this.composer = new Composer((message) => this.send(message), () => this.stop());
    byId("title").addEventListener("change", () => {
      this.conversation.title = byId("title").value.trim();
      this.changed();
    });
    for (const name of ["model", "profile"]) byId(name).addEventListener("change", () => this.choose(name, byId(name).value));
    byId("export-markdown").addEventListener("click", () => this.export("md", asMarkdown(this.conversation), "text/markdown"));
    byId("export-json").addEventListener("click", () => this.export("json", writeExport([this.conversation]), "application/json"));
    document.addEventListener("keydown", (event) => event.key === "Escape" && [byId("question"), document.body].includes(event.target) && this.stop());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.closeMenu());
    document.addEventListener("click", (event) => byId("export-menu").contains(event.target) || (byId("export-menu").open = false));
    server.addEventListener("change", () => this.showServer());
    store.onOther = (id) => this.showOther(id);
  }

  get answer() {
    return this.answers.get(this.conversation.id);
  }

  closeMenu() {
    const menu = byId("export-menu");
    if (menu.contains(document.activeElement)) menu.querySelector("summary").focus();
    menu.open = false;
  }

  // Show what another tab has made of a conversation, unless it is being worked on here.
  async showOther(id) {
    this.onListChanged();
    if (id !== this.conversation.id || this.answer || document.querySelector(".edit")) return;
    const found = (await store.all()).find((one) => one.id === id);
    if (found && id === this.conversation.id && !this.answer) this.open(found, true);
  }

  // Show the conversation that was shown last, if it is still there.
  async restore() {
    const last = localStorage.getItem(LAST_KEY);
    const found = (await store.all()).find((one) => one.id === last);
    this.open(found ?? this.conversation);
  }

  begin() {
    this.open(newConversation(lastChoice()));
    byId("question").focus();
  }

  // isElsewhere: another tab may have an answer under way in it.
  open(conversation, isElsewhere = false) {
    // An answer under way writes into its own object, not into one that was read meanwhile.
    this.conversation = this.answers.get(conversation.id)?.conversation ?? conversation;
    localStorage.setItem(LAST_KEY, conversation.id);
    if (!isElsewhere) for (const node of Object.values(this.conversation.nodes)) if (node.state === "running" && this.answer?.node !== node) node.state = "stopped";
    this.show();
    this.scrollToEnd();
  }

  // End what is under way in a conversation that is deleted, and show another one.
  async forget({ id }) {
    this.answers.get(id)?.stop();
    await this.answers.get(id)?.ended;
    if (this.conversation.id === id) this.open(newConversation(lastChoice()));
  }

  async send({ text, files }) {
    if (this.answer) return false;
    addNode(this.conversation, this.conversation.leaf, { role: "user", text, files });
    this.ask();
    return true;
  }

  edit(node, text) {
    if (this.answer) return;
    addNode(this.conversation, node.parent, { role: "user", text, files: node.files });
    this.ask();
  }

  again(node) {
    if (this.answer) return;
    this.conversation.leaf = node.parent;
    this.ask();
  }

  answerCalls(node, results) {
    if (this.answer) return;
    addNode(this.conversation, node.id, { role: "tool", text: "", results });
    this.ask();
  }

  showNode(node) {
    showBranch(this.conversation, node);
    this.changed();
  }

  stop() {
    this.answer?.stop();
  }

  // Ask for an answer to what is shown.
  async ask() {
    const { conversation } = this;
    const path = pathTo(conversation);
    const node = addNode(conversation, conversation.leaf, { role: "assistant", text: "", state: "running" });
    let saved = performance.now();
    const answer = new Answer(conversation, path, node, () => {
      this.showAnswer(answer);
      if (performance.now() - saved < SAVE_MS) return;
      saved = performance.now();
      store.save(conversation);
    });
    this.answers.set(conversation.id, answer);
    conversation.changed = Date.now();
    this.show();
    this.scrollToEnd();
    announce("Waiting for an answer.");
    await this.keep(conversation);
    answer.ended = answer.run();
    const failure = await answer.ended;
    this.answers.delete(conversation.id);
    conversation.changed = Date.now();
    await this.keep(conversation);
    if (this.conversation === conversation) this.show();
    this.tellEnd(node);
    if (failure !== null) server.watch();
    if (failure?.status === 401) server.learn();
  }

  tellEnd(node) {
    const tokens = node.figures?.answer_tokens;
    if (node.state === "failed") announce(`${describeFailure(node)}: ${node.error}`);
    else announce(`${node.state === "stopped" ? "Stopped" : "The answer is complete"}${tokens ? `, ${plural(tokens, "token")}` : ""}.`);
  }

  // Show an answer's state at the next frame, once for all events until then.
  showAnswer(answer) {
    if (answer.isDrawn || this.conversation !== answer.conversation) return;
    answer.isDrawn = true;
    requestAnimationFrame(() => {
      answer.isDrawn = false;
      const view = this.views.find((one) => one.node === answer.node);
      if (!view) return;
      const isAtEnd = this.isAtEnd();
      view.update(answer);
      if (isAtEnd) this.scrollToEnd();
    });
  }

  choose(name, value) {
    this.conversation[name] = value;
    const { model, profile } = this.conversation;
    localStorage.setItem(CHOICE_KEY, JSON.stringify({ model, profile }));
    this.changed();
  }

  // Keep the conversation and show it as it is now.
  changed() {
    if (this.conversation.leaf !== null) this.keep(this.conversation);
    this.show();
  }

  async keep(conversation) {
    const isKept = await store.save(conversation);
    if (!isKept) announce("This browser has no room left: the conversation is not kept. Export it.");
    byId("no-room").hidden = isKept;
    this.onListChanged();
  }

  export(suffix, text, type) {
    const name = this.conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";
    saveFile(`${name}.${suffix}`, text, type);
    byId("export-menu").open = false;
  }

  show() {
    const path = pathTo(this.conversation);
    this.views = path.map((node) => new MessageView(this.conversation, node, this.actions));
    replace(byId("messages"), path.length > 0 ? this.views.map((view) => view.root) : this.showWelcome());
    byId("title").value = this.conversation.title;
    this.showServer();
    this.onListChanged();
  }

  showWelcome() {
    const model = this.conversation.model || server.models[0]?.id;
    return el("div", { class: "welcome" }, el("h1", {}, model ? `Ask ${model}` : "Ask the model"), el("p", {}, "Files that you drop here become part of your question. Conversations stay in this browser; nothing leaves this server."));
  }

  // Show what depends on the server: models, profiles, the context, whether one can send.
  showServer() {
    const { conversation } = this;
    const ids = server.models.map((model) => model.id);
    const labels = server.models.map(({ id, state }) => [id, server.hasSeveral ? `${id} (${state})` : id]);
    showOptions(byId("model"), labels, conversation.model || ids[0]);
    const model = server.models.find((one) => one.id === conversation.model) ?? server.models[0];
    const usual = server.activity?.default_profile;
    const profiles = (model?.attention_profiles ?? []).map((name) => [name, name]);
    showOptions(byId("profile"), [["", usual ? `default (${usual})` : "default"], ...profiles], conversation.profile);
    this.composer.update(Boolean(this.answer));
    if (this.answer) this.showAnswer(this.answer);
    this.showContext();
    if (model) server.follow(model.id);
    const title = document.querySelector(".welcome h1");
    if (title && model && !conversation.model) title.textContent = `Ask ${model.id}`;
  }

  showContext() {
    const { model, profile } = this.conversation;
    const all = server.contextOf(model, profile);
    const last = pathTo(this.conversation).findLast((node) => node.figures?.prompt_tokens !== undefined)?.figures;
    const used = last ? last.prompt_tokens + last.answer_tokens : 0;
    byId("context").hidden = all === null;
    const isKnown = last !== undefined || this.conversation.leaf === null; // of an answer that was stopped no count came
    byId("context-words").textContent = all === null ? "" : `${isKnown ? `${count(used)} of ` : ""}${count(all)} tokens of context`;
    byId("context-bar").firstElementChild.style.width = all === null ? "0" : `${Math.min(100, (100 * used) / all)}%`;
    byId("context-bar").classList.toggle("full", all !== null && used > 0.9 * all);
    byId("context").title = all === null ? "" : percent(used, all);
  }

  isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = byId("messages");
    return scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  scrollToEnd() {
    byId("messages").scrollTop = byId("messages").scrollHeight;
  }
}

function lastChoice() {
  try {
    return JSON.parse(localStorage.getItem(CHOICE_KEY)) ?? {};
  } catch {
    return {};
  }
}

// Show options; one that the server does not have (any more) stays as it is chosen, for the server to refuse.
function showOptions(select, options, chosen) {
  const known = options.some(([value]) => value === (chosen ?? "")) ? options : [...options, [chosen, chosen]];
  const wanted = JSON.stringify(known);
  if (select.dataset.shown !== wanted) {
    select.dataset.shown = wanted;
    replace(select, known.filter(([value]) => value !== undefined).map(([value, words]) => el("option", { value }, words)));
  }
  select.value = chosen ?? "";
}
