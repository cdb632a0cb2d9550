// Keep conversations in this browser (IndexedDB). Where it keeps nothing, they last as long as the page.

const NAME = "tandem";
const STORE = "conversations";

class Store {
  constructor() {
    this.opened = null;
    this.fallback = null; // a Map, where the browser has no database for us
    this.onOther = () => {}; // is told of conversations that other tabs have changed
    this.channel = new BroadcastChannel(NAME);
    this.channel.onmessage = ({ data }) => this.onOther(data);
  }

  get isLasting() {
    return this.fallback === null;
  }

  async open() {
    try {
      this.opened = await new Promise((resolve, reject) => {
        const request = indexedDB.open(NAME, 1);
        request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
        request.onsuccess = () => resolve(request.result);
        request.onerror = () => reject(request.error);
      });
    } catch {
      this.fallback = new Map();
    }
  }

  // Return all conversations, changed last first.
  async all() {
    const found = this.fallback ? [...this.fallback.values()] : await this.run("readonly", (store) => store.getAll());
    return found.sort((one, other) => other.changed - one.changed);
  }

  // Return whether it was kept: the browser may have no room.
  async save(conversation) {
    if (this.fallback) {
      this.fallback.set(conversation.id, conversation);
      return true;
    }
    try {
      await this.run("readwrite", (store) => store.put(conversation));
      this.channel.postMessage(conversation.id);
      return true;
    } catch {
      return false;
    }
  }

  async remove(id) {
    if (this.fallback) this.fallback.delete(id);
    else await this.run("readwrite", (store) => store.delete(id));
    this.channel.postMessage(id);
  }

  run(mode, use) {
    return new Promise((resolve, reject) => {
      const transaction = this.opened.transaction(STORE, mode);
      const request = use(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error);
    });
  }
}

export const store = new Store();
