// Ollama's own JavaScript client: chats with a tool, streamed and not, texts, a form, vectors, the model, refusals.
// Takes the two servers' addresses; asks the scripted one for what `ollama_js.py` has put in its script.
import assert from "node:assert";
import { createRequire } from "node:module";

const { Ollama } = createRequire(`${process.env.AGENTS}/`)("ollama");
const [scripted, reference] = process.argv.slice(2).map((host) => new Ollama({ host }));
const messages = [{ role: "user", content: "2 + 3?" }];
const numbers = { a: { type: "integer" }, b: { type: "integer" } };
const tools = [{ type: "function", function: { name: "add", parameters: { type: "object", properties: numbers } } }];

const asked = { model: "scripted", messages, tools };
const given = await scripted.chat(asked);
assert.deepEqual(given.message.tool_calls[0].function.arguments, { a: 2, b: 3 });
const result = { role: "tool", content: "5", tool_name: "add" };
const answer = await scripted.chat({ ...asked, messages: [...messages, given.message, result] });
assert.equal(answer.message.content, "It is 5.");
const calls = [];
for await (const part of await scripted.chat({ ...asked, stream: true })) {
  calls.push(...(part.message.tool_calls ?? []));
}
assert.deepEqual(calls.map((call) => call.function.arguments), [{ a: 2, b: 3 }]);

const plain = { model: "reference:latest", options: { temperature: 0, num_predict: 32 } };
const whole = await reference.chat({ ...plain, messages });
let streamed = "";
for await (const part of await reference.chat({ ...plain, messages, stream: true })) {
  streamed += part.message.content;
}
assert.equal(streamed, whole.message.content);
assert.ok(whole.total_duration > 0 && whole.eval_count <= 32);
assert.equal((await reference.generate({ ...plain, prompt: "Once", raw: true })).done, true);
const form = { type: "object", properties: { value: { type: "integer", maximum: 99 } }, required: ["value"] };
form.additionalProperties = false;
const held = await reference.generate({ model: "reference", prompt: "A number?", format: form, options: plain.options });
assert.ok(JSON.parse(held.response).value <= 99);
assert.equal((await reference.embed({ model: "reference", input: ["a", "b"] })).embeddings.length, 2);

assert.equal((await reference.list()).models[0].model, "reference:latest");
assert.ok((await reference.show({ model: "reference" })).capabilities.includes("tools"));
assert.equal((await reference.ps()).models.length, 1);
assert.ok((await reference.version()).version);
await assert.rejects(reference.pull({ model: "llama3.2" }), /tandem serve hf:/);
