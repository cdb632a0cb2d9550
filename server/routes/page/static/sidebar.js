// The list of conversations: choose one, begin one, delete, export and import them.

import { ask, AskError } from "./api.js";
import { readExport, writeExport } from "./conversation.js";
import { announce, byId, el, replace, saveFile } from "./dom.js";
import { when } from "./format.js";
import { server } from "./server.js";
import { store } from "./store.js";

export class Sidebar {
  // `chat` shows conversations: open(conversation), begin(), and `conversation`, the one that is shown.
  constructor(chat) {
    this.chat = chat;
    byId("new-chat").addEventListener("click", () => {
      this.close();
      chat.begin();
    });
    byId("open-sidebar").addEventListener("click", () => this.toggle());
    byId("export-all").addEventListener("click", () => this.exportAll());
    byId("import").addEventListener("click", () => byId("import-input").click());
    byId("import-input").addEventListener("change", (event) => this.import(event.target));
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    byId("shade").addEventListener("click", () => this.close());
  }

  async show() {
    const list = byId("conversations");
    const found = await store.all();
    const items = found.map((one) => this.showOne(one));
    replace(list, items.length > 0 ? items : el("li", { class: "none" }, "Conversations stay in this browser."));
    byId("not-kept").hidden = store.isLasting;
  }

  showOne(conversation) {
    const isShown = conversation.id === this.chat.conversation.id;
    const open = () => {
      this.close();
      this.chat.open(conversation);
    };
    const name = conversation.title || "Untitled";
    return el(
      "li",
      {},
      el("button", { type: "button", class: "open", "aria-current": isShown ? "true" : null, onclick: open }, el("span", {}, name), el("small", {}, when(conversation.changed))),
      el("button", { type: "button", class: "quiet small remove", "aria-label": `Delete ${name}`, onclick: () => this.remove(conversation) }, "×"),
    );
  }

  // Delete a conversation here, and what the server keeps of it.
  async remove(conversation) {
    if (!confirm(`Delete “${conversation.title || "Untitled"}”? It cannot be brought back.`)) return;
    await this.chat.forget(conversation);
    await store.remove(conversation.id);
    await Promise.all(server.names.map((name) => this.forgetSession(conversation.id, name)));
    announce("Deleted.");
    await this.show();
  }

  async forgetSession(id, model) {
    try {
      await ask(`v1/sessions/${encodeURIComponent(id)}?model=${encodeURIComponent(model)}`, { method: "DELETE" });
    } catch (error) {
      if (!(error instanceof AskError)) throw error; // the server may keep nothing of it, or not answer
    }
  }

  async exportAll() {
    saveFile("tandem-conversations.json", writeExport(await store.all()), "application/json");
  }

  async import(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    let found;
    try {
      found = readExport(await file.text());
    } catch (error) {
      alert(`${file.name}: ${error.message}`);
      return;
    }
    for (const conversation of found) await store.save(conversation);
    announce(`${found.length} imported.`);
    await this.show();
    if (found.length > 0) this.chat.open(found[0]);
  }

  toggle() {
    const isOpen = document.body.classList.toggle("with-sidebar");
    byId("open-sidebar").setAttribute("aria-expanded", String(isOpen));
    if (isOpen) byId("new-chat").focus();
  }

  close() {
    if (!document.body.classList.contains("with-sidebar")) return;
    document.body.classList.remove("with-sidebar");
    byId("open-sidebar").setAttribute("aria-expanded", "false");
    byId("open-sidebar").focus();
  }
}
