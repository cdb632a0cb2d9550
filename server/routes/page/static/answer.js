// Ask for an answer and write it into its message as it comes, with what it took.

import { stream } from "./api.js";
import { requestOf } from "./conversation.js";

export class Answer {
  // onChange is called after each event, and once at the end.
  constructor(conversation, path, node, onChange) {
    this.conversation = conversation;
    this.path = path; // of messages, before the answer
    this.node = node;
    this.onChange = onChange;
    this.progress = null; // {processed, total} while the prompt is read
    this.abort = new AbortController();
  }

  stop() {
    this.abort.abort();
  }

  // Run to the end. What goes wrong is written into the message; an AskError is returned, too.
  async run() {
    const { node } = this;
    const began = performance.now();
    const times = { first: null, last: null };
    let usage = null;
    let failure = null;
    try {
      for await (const event of stream("v1/chat/completions", this.body(), this.abort.signal)) {
        if (event.usage) usage = event.usage;
        if (event.prompt_progress) this.progress = event.prompt_progress;
        for (const choice of event.choices) {
          if (this.take(choice.delta)) {
            times.last = performance.now();
            times.first ??= times.last;
            this.progress = null;
          }
          if (choice.finish_reason) node.finish = choice.stop_reason ?? choice.finish_reason;
        }
        this.onChange();
      }
      node.state = "done";
    } catch (error) {
      node.state = this.abort.signal.aborted ? "stopped" : "failed";
      if (node.state === "failed") {
        failure = error;
        node.error = error.message;
      }
    }
    node.figures = figuresOf(usage, began, times);
    this.progress = null;
    this.onChange();
    return failure;
  }

  body() {
    const { conversation } = this;
    const body = { ...requestOf(conversation, this.path), stream: true, stream_options: { include_usage: true }, return_progress: true, session_id: conversation.id };
    if (conversation.model) body.model = conversation.model;
    if (conversation.profile) body.attention_profile = conversation.profile;
    return body;
  }

  // Add a delta to the message. Return whether it had anything of the answer.
  take(delta) {
    const { node } = this;
    if (delta.content) node.text += delta.content;
    if (delta.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
    for (const part of delta.tool_calls ?? []) {
      node.calls ??= [];
      const call = (node.calls[part.index] ??= { id: "", name: "", arguments: "" });
      if (part.id) call.id = part.id;
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
  }
}

// Times are this browser's, in seconds; tokens are the server's count, where it came.
function figuresOf(usage, began, { first, last }) {
  const figures = { first_seconds: first === null ? null : (first - began) / 1000, seconds: (performance.now() - began) / 1000 };
  if (usage === null) return figures;
  const details = usage.prompt_tokens_details ?? {};
  figures.prompt_tokens = usage.prompt_tokens;
  figures.answer_tokens = usage.completion_tokens;
  figures.cached_tokens = details.cached_tokens ?? 0;
  figures.cached_from = details.cached_tokens_from ?? {};
  const rest = { ...details, ...usage.completion_tokens_details };
  figures.others = Object.fromEntries(Object.entries(rest).filter(([name, value]) => typeof value === "number" && name !== "cached_tokens" && value !== 0));
  if (last > first && usage.completion_tokens > 1) figures.rate = (1000 * (usage.completion_tokens - 1)) / (last - first);
  return figures;
}
