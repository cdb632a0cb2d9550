// What is known of the server: whether it serves, its models, its limits. Views subscribe to changes.

import { ask, askHealth, AskError } from "./api.js";

const POLL_READY_MS = 15_000;
const POLL_WAITING_MS = 1_500;

class Server extends EventTarget {
  constructor() {
    super();
    this.health = null; // what /health says; null: nobody answers
    this.models = [];
    this.activity = null;
    this.needsKey = false;
    this.timer = null;
  }

  get isReady() {
    return this.health?.status === "ready";
  }

  // Ask how the server is, and go on asking.
  async watch() {
    clearTimeout(this.timer);
    const wasReady = this.isReady;
    this.health = await askHealth();
    if (this.isReady && (!wasReady || this.activity === null) && !this.needsKey) await this.learn();
    this.tell();
    this.timer = setTimeout(() => this.watch(), this.isReady ? POLL_READY_MS : POLL_WAITING_MS);
  }

  // Ask for models and limits. What needs a key says so.
  async learn() {
    try {
      const [models, activity] = await Promise.all([ask("v1/models"), ask("v1/activity")]);
      this.models = models.data;
      this.activity = activity;
      this.needsKey = false;
    } catch (error) {
      if (!(error instanceof AskError)) throw error;
      this.needsKey = error.status === 401;
    }
    this.tell();
  }

  // Return the most tokens of a context in a profile; null where that is not known.
  contextOf(modelId, profile) {
    const model = this.models.find((one) => one.id === modelId) ?? this.models[0];
    const limits = this.activity?.profiles ?? {};
    return limits[profile || this.activity?.default_profile] ?? model?.max_model_len ?? null;
  }

  tell() {
    this.dispatchEvent(new Event("change"));
  }
}

export const server = new Server();

// Say how the server is, in few words.
export function describeHealth({ health, needsKey }) {
  if (health === null) return "not reachable";
  if (health.status === "loading") return `loading: ${health.stage}${health.fraction > 0 ? `, ${Math.round(100 * health.fraction)} %` : ""}`;
  if (needsKey) return "needs a key";
  return health.status === "dead" ? "the engine is down" : health.status;
}
