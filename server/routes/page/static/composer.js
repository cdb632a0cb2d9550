// Where a message is written: its words, and files that are dropped, pasted or chosen.

import { ask } from "./api.js";
import { announce, byId, el, hasKeyboard, isSendKey, replace } from "./dom.js";
import { bytes, plural } from "./format.js";
import { server } from "./server.js";

const LARGEST_FILE = 8 * 2 ** 20;
const AS_KEY = "tandem.files";

export class Composer {
  // onSend({text, files}) returns whether the message was taken; onStop stops the answer under way.
  constructor(onSend, onStop) {
    this.onSend = onSend;
    this.files = []; // {name, bytes, text} or {name, bytes, tokens, document}; `waits` while one is stored
    this.area = byId("question");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", onStop);
    this.area.addEventListener("input", () => this.fit());
    this.area.addEventListener("keydown", (event) => this.onKey(event));
    this.area.addEventListener("paste", (event) => this.take(event, event.clipboardData));
    byId("attach").addEventListener("click", () => byId("file-input").click());
    byId("file-input").addEventListener("change", (event) => {
      this.add([...event.target.files]);
      event.target.value = "";
    });
    byId("as").value = localStorage.getItem(AS_KEY) ?? "document";
    byId("as").addEventListener("change", () => localStorage.setItem(AS_KEY, byId("as").value));
    this.listenToDrops(byId("chat-view"));
    document.addEventListener("keydown", (event) => this.catchTyping(event));
  }

  // What is typed while nothing has the focus is meant for the message.
  catchTyping(event) {
    const isTyped = event.key.length === 1 && event.key !== " " && !event.ctrlKey && !event.metaKey && !event.altKey;
    if (isTyped && event.target === document.body && !byId("chat-view").hidden) this.area.focus();
  }

  listenToDrops(view) {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    view.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      view.classList.add("dropping");
    });
    for (const name of ["dragleave", "drop"]) view.addEventListener(name, () => view.classList.remove("dropping"));
    view.addEventListener("drop", (event) => this.take(event, event.dataTransfer));
  }

  take(event, transfer) {
    if (!transfer?.files.length) return;
    event.preventDefault();
    this.add([...transfer.files]);
  }

  onKey(event) {
    if (!isSendKey(event)) return;
    event.preventDefault();
    this.send();
  }

  async send() {
    const text = this.area.value.trim();
    const files = this.files.filter((file) => !file.error);
    if ((text === "" && files.length === 0) || files.some((file) => file.waits)) return;
    if (!(await this.onSend({ text, files }))) return;
    this.area.value = "";
    this.files = [];
    this.showFiles();
    this.fit();
    if (hasKeyboard()) this.area.focus();
  }

  async add(list) {
    for (const given of list) {
      const file = { name: given.name, bytes: given.size, waits: true };
      this.files.push(file);
      this.showFiles();
      try {
        await this.read(file, given);
      } catch (error) {
        file.error = error.message;
        announce(`${file.name}: ${error.message}`);
      }
      file.waits = false;
      this.showFiles();
    }
    this.area.focus();
  }

  async read(file, given) {
    if (given.size > LARGEST_FILE) throw new Error(`larger than ${bytes(LARGEST_FILE)}`);
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await given.arrayBuffer());
    } catch {
      throw new Error("not a text in UTF-8");
    }
    if (text.includes("\0")) throw new Error("not a text");
    if (text.trim() === "") throw new Error("empty");
    if (!this.storesDocuments()) {
      file.text = text;
      return;
    }
    const stored = await ask("v1/documents", { method: "POST", body: { title: given.name, text, ...(server.followed ? { model: server.followed } : {}) } });
    file.document = stored.id;
    file.tokens = stored.num_tokens;
  }

  storesDocuments() {
    return Boolean(server.activity?.has_documents) && byId("as").value === "document";
  }

  showFiles() {
    replace(byId("files"), this.files.map((file) => el("li", { class: file.error ? "file error" : "file" }, file.name, el("small", {}, ` ${describe(file)}`), this.removeButton(file))));
  }

  removeButton(file) {
    const remove = () => {
      this.files = this.files.filter((other) => other !== file);
      this.showFiles();
      this.area.focus();
    };
    return el("button", { type: "button", class: "quiet small", "aria-label": `Remove ${file.name}`, onclick: remove }, "×");
  }

  // Show whether an answer is under way here, and whether the server takes documents.
  update(isRunning) {
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    byId("as-label").hidden = !server.activity?.has_documents;
  }

  fit() {
    this.area.style.height = "auto";
    this.area.style.height = `${Math.min(this.area.scrollHeight + 2, 0.4 * innerHeight)}px`;
  }
}

function describe(file) {
  if (file.error) return file.error;
  if (file.waits) return "is being read";
  return file.document ? `document, ${plural(file.tokens, "token")}` : `${bytes(file.bytes)} as text`;
}
