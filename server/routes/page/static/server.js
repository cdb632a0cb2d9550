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
    this.followed = null; // of several models, the one whose limits and work are shown
    this.timer = null;
  }

  // Whether models come and go: then what is known of them grows old.
  get hasSeveral() {
    return this.names.length > 1 || this.models.some((model) => model.state === "unloaded");
  }

  // The models' names, each once, whatever its aliases and adapters.
  get names() {
    return [...new Set(this.models.map((model) => model.root))];
  }

  // The path of a route, asked of the followed model where there are several.
  pathOf(route) {
    return this.hasSeveral && this.followed ? `${route}?model=${encodeURIComponent(this.followed)}` : route;
  }

  // Show this model's limits from now on.
  async follow(modelId) {
    if (this.followed === modelId) return;
    this.followed = modelId;
    if (this.hasSeveral && this.isReady) await this.learn();
  }

  get isReady() {
    return this.health?.status === "ready";
  }

  // Ask how the server is, and go on asking.
  async watch() {
    clearTimeout(this.timer);
    const wasReady = this.isReady;
    this.health = await askHealth();
    if (this.isReady && (!wasReady || this.activity === null || this.hasSeveral) && !this.needsKey) await this.learn();
    this.tell();
    this.timer = setTimeout(() => this.watch(), this.isReady && !this.hasSeveral ? POLL_READY_MS : POLL_WAITING_MS);
  }

  // Ask for models and limits. What needs a key says so.
  async learn() {
    try {
      const [models, activity] = await Promise.all([ask("v1/models"), ask(this.pathOf("v1/activity"))]);
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
    const limits = this.activity !== null && this.activity.model === model?.root ? this.activity.profiles : {};
    return limits[profile || this.activity?.default_profile] ?? model?.max_model_len ?? null;
  }

  // Say what a request for a model waits for; null: the model is there, or nothing is known of it.
  describeWait(modelId) {
    const model = this.models.find((one) => one.id === modelId) ?? this.models[0];
    if (!this.hasSeveral || !model || this.activity?.model !== model.root || this.activity.status === "ready") return null;
    if (this.activity.status !== "loading") return `Waiting until ${model.id} has room to be loaded`;
    return `${model.id} is ${describeHealth({ health: this.activity })}`;
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
