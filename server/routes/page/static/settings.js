// The dialogs: settings of a conversation, and the server's key.

import { hasKey, useKey } from "./api.js";
import { byId } from "./dom.js";
import { server } from "./server.js";

const NUMBERS = ["temperature", "top_p", "max_tokens"];
const TEXTS = ["system", "reasoning_effort", "tools"];

export class SettingsDialog {
  // `chat.conversation` has the settings; chat.changed() keeps them.
  constructor(chat) {
    this.dialog = byId("settings");
    byId("open-settings").addEventListener("click", () => this.open(chat.conversation.settings));
    byId("settings-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const fault = toolsFault(field("tools").value);
      byId("tools-fault").textContent = fault ?? "";
      if (fault) {
        field("tools").focus();
        return;
      }
      for (const name of TEXTS) chat.conversation.settings[name] = field(name).value;
      for (const name of NUMBERS) chat.conversation.settings[name] = field(name).value === "" ? null : Number(field(name).value);
      this.dialog.close();
      chat.changed();
    });
    byId("settings-cancel").addEventListener("click", () => this.dialog.close());
  }

  open(settings) {
    for (const name of [...TEXTS, ...NUMBERS]) field(name).value = settings[name] ?? "";
    byId("tools-fault").textContent = "";
    this.dialog.showModal();
  }
}

const field = (name) => byId(`setting-${name}`);

// Return what is wrong with a text of tools, or null.
function toolsFault(text) {
  if (text.trim() === "") return null;
  try {
    return Array.isArray(JSON.parse(text)) ? null : "Wanted a list of tools: [{\"type\": \"function\", …}].";
  } catch (error) {
    return `Not JSON: ${error.message}`;
  }
}

export class KeyDialog {
  constructor() {
    this.dialog = byId("key");
    byId("open-key").addEventListener("click", () => this.open());
    byId("key-form").addEventListener("submit", async (event) => {
      event.preventDefault();
      useKey(byId("key-input").value.trim(), byId("key-kept").checked);
      await server.learn();
      if (server.needsKey) this.say("The server does not know this key.");
      else this.dialog.close();
    });
    byId("key-cancel").addEventListener("click", () => this.dialog.close());
    byId("key-forget").addEventListener("click", async () => {
      useKey("", false);
      this.dialog.close();
      await server.learn();
    });
    server.addEventListener("change", () => this.followServer());
  }

  open() {
    byId("key-input").value = "";
    byId("key-forget").hidden = !hasKey();
    this.say("");
    this.dialog.showModal();
  }

  say(words) {
    byId("key-fault").textContent = words;
  }

  // Ask for a key once when the server turns out to want one.
  followServer() {
    byId("open-key").hidden = !server.needsKey && !hasKey();
    const isNew = server.needsKey && !this.asked;
    this.asked = server.needsKey;
    if (isNew && !this.dialog.open) this.open();
  }
}
