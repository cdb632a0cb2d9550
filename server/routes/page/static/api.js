// Ask the server: JSON, and chats as streams of events. Addresses are relative, so the page works below a prefix.

const KEPT_KEY = "tandem.key";

// What the server, or the way to it, says is wrong. status 0: it could not be reached.
export class AskError extends Error {
  constructor(message, status, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let key = sessionStorage.getItem(KEPT_KEY) ?? localStorage.getItem(KEPT_KEY) ?? "";

// Use a key from now on: until this tab is closed, or in this browser until it is forgotten.
export function useKey(given, isKept) {
  key = given;
  sessionStorage.removeItem(KEPT_KEY);
  localStorage.removeItem(KEPT_KEY);
  if (given) (isKept ? localStorage : sessionStorage).setItem(KEPT_KEY, given);
}

export const hasKey = () => key !== "";

// Return the JSON, or the text, that a route answers. Raises AskError.
export async function ask(path, { method = "GET", body, signal, asText = false } = {}) {
  const answer = await send(path, method, body, signal);
  return asText ? answer.text() : answer.json();
}

// Return what /health says, whatever its status; null where nobody answers.
export async function askHealth() {
  try {
    return await (await fetch("health", { cache: "no-store" })).json();
  } catch {
    return null;
  }
}

// Yield the events of a stream, each as JSON, until `[DONE]`. Raises AskError, also for a stream that breaks off.
export async function* stream(path, body, signal) {
  const answer = await send(path, "POST", body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await readNext(reader, signal);
    if (done) throw new AskError("the connection ended before the answer did", 0, "cut_off");
    waiting += value;
    const events = waiting.split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data === "") continue; // a comment, which keeps the connection alive
      const tree = JSON.parse(data);
      if (tree.error) throw new AskError(tree.error.message, 200, tree.error.code);
      yield tree;
    }
  }
}

async function readNext(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new AskError("the connection broke before the answer ended", 0, "cut_off");
  }
}

async function send(path, method, body, signal) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new AskError("the server cannot be reached", 0, "unreachable");
  }
  if (!answer.ok) throw await readError(answer);
  return answer;
}

async function readError(answer) {
  try {
    const { error } = await answer.json();
    return new AskError(error.message, answer.status, error.code);
  } catch {
    return new AskError(`the server answered ${answer.status}`, answer.status);
  }
}
