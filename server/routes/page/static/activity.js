// What the server is doing, live: asked for every two seconds while this view is open.

import { ask, AskError } from "./api.js";
import { byId, el, replace, svg } from "./dom.js";
import { bytes, count, percent, plural, rate, seconds } from "./format.js";
import { MetricsText } from "./metrics.js";
import { describeHealth, server } from "./server.js";
import { store } from "./store.js";

const POLL_MS = 2000;
const MOST_CONVERSATIONS = 20;
const PLACES = { gpu: "Card", host: "Host memory" };

export class ActivityView {
  constructor() {
    this.timer = null;
    this.opened = new Set(); // places whose notes a person opened
    document.addEventListener("visibilitychange", () => this.isOpen && !document.hidden && this.poll());
  }

  open() {
    this.isOpen = true;
    this.poll();
  }

  close() {
    this.isOpen = false;
    clearTimeout(this.timer);
  }

  async poll() {
    clearTimeout(this.timer);
    if (!this.isOpen || document.hidden) return;
    try {
      await this.look();
    } catch (error) {
      if (!(error instanceof AskError)) throw error;
      byId("activity-fault").textContent = error.status === 401 ? "The server wants a key." : `Nothing new: ${error.message}.`;
      if (error.status === 401) server.learn();
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.poll(), POLL_MS);
  }

  async look() {
    const [activity, text, sessions] = await Promise.all([ask(server.pathOf("v1/activity")), ask("metrics", { asText: true }), this.askSessions()]);
    const titles = new Map((await store.all()).map((one) => [one.id, one.title]));
    const metrics = new MetricsText(text, activity.model);
    byId("activity-fault").textContent = "";
    this.show([
      ...(server.hasSeveral ? [section("Models", showModels(server.models, activity.model))] : []),
      section("Now", showNow(activity, metrics)),
      section("Tokens a second, the last ten minutes", showRates(activity.generated)),
      section("Where contexts are", showContexts(sessions, titles)),
      el("div", { class: "columns" },
        section("Room for contexts", showRoom(activity, metrics)),
        section("What was found and guessed", showHits(metrics)),
        section("Errors of approximate profiles", showErrors(metrics)),
        ...activity.memory.map((place) => section(`${PLACES[place.place]}, as planned`, this.showPlan(place))),
      ),
    ]);
  }

  // Show these sections; one in which somebody is with the keyboard stays as it is.
  show(sections) {
    const before = [...byId("activity-body").children];
    replace(byId("activity-body"), sections.map((made, i) => (before[i]?.contains(document.activeElement) ? before[i] : made)));
  }

  // Sessions are the engine's to tell: without one there are none.
  async askSessions() {
    try {
      return (await ask(server.pathOf("v1/sessions"))).data;
    } catch (error) {
      if (error instanceof AskError && error.status === 503) return [];
      throw error;
    }
  }

  showPlan({ place, limit_bytes: limit, items }) {
    const used = items.reduce((sum, item) => sum + item.bytes, 0);
    const shown = [...items].sort((one, other) => other.bytes - one.bytes);
    const rows = shown.map((item) => el("tr", {}, el("th", { scope: "row" }, item.name.replaceAll("_", " ")), el("td", {}, bytes(item.bytes)), el("td", { class: "thin" }, bar([[item.bytes, "a"]], limit))));
    const notes = el("details", { open: this.opened.has(place), ontoggle: (event) => this.opened[event.target.open ? "add" : "delete"](place) }, el("summary", {}, "What they are"), el("dl", { class: "notes" }, shown.filter((item) => item.note).flatMap((item) => [el("dt", {}, item.name.replaceAll("_", " ")), el("dd", {}, item.note)])));
    return [el("p", {}, `${bytes(used)} of ${bytes(limit)}`), bar([[used, "a"]], limit), el("table", { class: "plan" }, el("tbody", {}, rows)), notes];
  }
}

function section(title, content) {
  const id = `section-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return el("section", { "aria-labelledby": id }, el("h2", { id }, title), content);
}

// Return a bar of [number, colour] parts. What it says stands in words beside it.
function bar(parts, all) {
  const made = parts.map(([number, colour]) => {
    const part = el("span", { class: `part ${colour}` });
    part.style.width = `${all > 0 ? Math.min(100, (100 * number) / all) : 0}%`;
    return part;
  });
  return el("div", { class: "bar", "aria-hidden": "true" }, made);
}

function tile(value, words) {
  return el("div", { class: "tile" }, el("b", {}, value), el("span", {}, words));
}

function showNow(activity, metrics) {
  const { tokens, step_seconds: step } = activity.generated;
  const lately = (tokens.at(-2) + tokens.at(-1)) / (2 * step);
  const facts = [activity.model, activity.device, `up ${seconds(Math.max(1, Math.round(activity.uptime_seconds)))}`, `version ${activity.version}`];
  return [
    el("p", { class: "facts" }, el("span", { class: `state ${activity.status}` }, describeHealth({ health: activity })), facts.filter(Boolean).join(" · ")),
    el(
      "div",
      { class: "tiles" },
      tile(count(metrics.get("requests_running")), `streams, of at most ${count(activity.max_running)}`),
      tile(count(metrics.get("requests_prefilling")), "prompts being read"),
      tile(count(metrics.get("requests_waiting")), `waiting, of at most ${count(activity.max_queue)}`),
      tile(lately.toFixed(lately >= 100 ? 0 : 1), `tokens/s, the last ${2 * step} s`),
    ),
  ];
}

// Which models are loaded; what is below is of the one that the chat asks.
function showModels(models, shown) {
  const rows = [...new Map(models.map((model) => [model.root, model])).values()].map((model) => [
    model.root,
    model.load_error ? `${model.state}: ${model.load_error}` : model.state,
  ]);
  return [facts(rows), el("p", { class: "none" }, `What follows is of ${shown}.`)];
}

function showRates({ tokens, step_seconds: step }) {
  const [width, height] = [600, 120];
  const rates = tokens.map((number) => number / step);
  const most = Math.max(...rates);
  const scale = most > 0 ? most : 1;
  const each = width / rates.length;
  const bars = rates.map((one, i) => {
    const size = (height * one) / scale;
    return svg("rect", { x: i * each + 0.75, y: height - size, width: each - 1.5, height: size });
  });
  const words = `At most ${rate(most)}, ${plural(tokens.reduce((sum, one) => sum + one, 0), "token")} in all`;
  return [
    svg("svg", { class: "rates", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": words }, bars),
    el("p", { class: "axis" }, el("span", {}, "10 min ago"), el("span", {}, words), el("span", {}, "now")),
  ];
}

function showContexts(sessions, titles) {
  const all = sessions.flatMap((session) => session.conversations.map((one) => ({ id: session.id, ...one })));
  const resting = sessions.filter((session) => session.conversations.length === 0 && session.disk_bytes > 0);
  const onDisk = resting.length > 0 && el("p", { class: "none" }, `On disk alone: ${plural(resting.length, "conversation")}, ${bytes(resting.reduce((sum, session) => sum + session.disk_bytes, 0))}.`);
  if (all.length === 0) return onDisk || el("p", { class: "none" }, "No conversation is kept.");
  const longest = Math.max(...all.map((one) => one.tokens));
  const rows = all.slice(0, MOST_CONVERSATIONS).map((one) => {
    const places = [["card", one.device_tokens, "a"], ["host", one.host_tokens, "b"], ["disk", one.disk_tokens, "c"]];
    const state = one.running > 0 ? "running" : one.is_awaited ? "awaits a tool" : `idle for ${seconds(Math.max(1, Math.round(one.idle_seconds)))}`;
    return el(
      "tr",
      {},
      el("th", { scope: "row", title: one.id }, titles.get(one.id) || shorten(one.id), el("small", {}, `${plural(one.turns, "turn")}, ${state}`)),
      el("td", { class: "number" }, count(one.tokens)),
      places.map(([place, tokens, colour]) => el("td", { class: "place", "data-place": place }, bar([[tokens, colour]], longest), el("small", {}, count(tokens)))),
    );
  });
  const head = el("tr", {}, ["Conversation", "tokens", "card", "host", "disk"].map((words) => el("th", { scope: "col" }, words)));
  const more = all.length - MOST_CONVERSATIONS;
  return [
    el("div", { class: "table" }, el("table", { class: "contexts" }, el("thead", {}, head), el("tbody", {}, rows))),
    more > 0 && el("p", { class: "none" }, `and ${count(more)} more`),
    onDisk,
    el("p", { class: "none" }, "A token may be in several places at once."),
  ];
}

const shorten = (id) => (id.length > 20 ? `${id.slice(0, 18)}…` : id);

function showRoom(activity, metrics) {
  const pages = [metrics.get("pages_used"), metrics.get("pages_cached"), metrics.get("pages_capacity")];
  const tokens = pages.map((number) => count(number * activity.page_tokens));
  const rows = [["Pages on the card", [[pages[0], "a"], [pages[1], "b"]], pages[2], `${tokens[0]} tokens in use, ${tokens[1]} kept, of ${tokens[2]}`]];
  const host = metrics.get("host_bytes_capacity");
  if (host > 0) rows.push(["Host memory", [[metrics.get("host_bytes_used"), "b"]], host, `${bytes(metrics.get("host_bytes_used"))} used, ${bytes(metrics.get("host_bytes_promised"))} promised, of ${bytes(host)}; ${plural(metrics.get("host_tokens"), "token")}`]);
  if (activity.disk_limit_bytes) rows.push(["Disk", [[metrics.get("disk_bytes_held"), "c"]], activity.disk_limit_bytes, `${bytes(metrics.get("disk_bytes_held"))} of ${bytes(activity.disk_limit_bytes)}`]);
  return rows.map(([name, parts, all, words]) => el("div", { class: "room" }, el("h3", {}, name), bar(parts, all), el("p", {}, words)));
}

function showHits(metrics) {
  const places = ["card", "host", "disk"].map((place) => [place, metrics.get(`cached_tokens_from_${place}`)]).filter(([, tokens]) => tokens > 0);
  const rows = [
    ["Prompt tokens found in a cache", share(metrics, "prefix_cache_hit_tokens", "prefix_cache_query_tokens")],
    ...places.map(([place, tokens]) => [`of these, on the ${place}`, count(tokens)]),
    ["Drafted tokens that were right", share(metrics, "draft_accepted", "draft_proposed")],
    ["Documents' tokens reused", count(metrics.get("document_reused_tokens"))],
    ["Preempted", plural(metrics.get("preemptions"), "time")],
    ["Engine restarts", count(metrics.get("engine_restarts"))],
  ];
  return facts(rows);
}

function share(metrics, part, all) {
  const whole = metrics.get(all);
  return whole > 0 ? `${percent(metrics.get(part), whole)} of ${count(whole)}` : "–";
}

// What sampled and indexed reading estimate of their own errors. Their numbers are sums; here are means and shares.
function showErrors(metrics) {
  const rows = [];
  const sampled = metrics.get("host_answers_estimated");
  if (sampled > 0) {
    rows.push(["Sampled: answers whose error was estimated", count(sampled)]);
    const beyond = metrics.get("host_answers_beyond_bound") + metrics.get("host_answers_heavy_beyond_bound");
    rows.push(["of these, beyond the bound", percent(beyond, sampled)]);
    rows.push(["read in full instead", count(metrics.get("host_answers_in_full"))]);
  }
  const heads = metrics.get("index_heads");
  if (heads > 0) {
    rows.push(["Indexed: weight that was estimated, on average", percent(metrics.get("index_estimated_mass") / 1e6, heads)]);
    rows.push(["bound of the relative error, on average", percent(metrics.get("index_bound") / 1e6, heads)]);
    rows.push(["heads with a bound above epsilon", percent(metrics.get("index_heads_over"), heads)]);
    const audited = metrics.get("index_audited_heads");
    rows.push(["true error where it was looked up, on average", audited > 0 ? percent(metrics.get("index_audit_error") / 1e6, audited) : "–"]);
    rows.push(["of these, above their bound", audited > 0 ? percent(metrics.get("index_audit_beyond"), audited) : "–"]);
  }
  if (rows.length === 0) return el("p", { class: "none" }, "No profile that reads less than everything has run, or it estimates no errors.");
  return facts(rows);
}

function facts(rows) {
  return el("dl", { class: "pairs" }, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}
