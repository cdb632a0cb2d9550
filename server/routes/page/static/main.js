// Begin: the two views, the dialogs, and the server's state in the head of the page.

import { ActivityView } from "./activity.js";
import { Chat } from "./chat.js";
import { announce, byId } from "./dom.js";
import { describeHealth, server } from "./server.js";
import { KeyDialog, SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { store } from "./store.js";

function showView(activity) {
  const isActivity = location.hash === "#activity";
  byId("chat-view").hidden = isActivity;
  byId("activity-view").hidden = !isActivity;
  for (const [id, isHere] of [["to-chat", !isActivity], ["to-activity", isActivity]]) {
    if (isHere) byId(id).setAttribute("aria-current", "page");
    else byId(id).removeAttribute("aria-current");
  }
  document.body.classList.toggle("in-activity", isActivity);
  document.title = isActivity ? "Activity – Tandem" : "Tandem";
  if (isActivity) activity.open();
  else activity.close();
}

function showState() {
  const words = describeHealth(server);
  const state = byId("server-state");
  if (state.textContent === words) return;
  state.textContent = words;
  state.className = `state ${server.needsKey ? "locked" : (server.health?.status ?? "gone")}`;
  if (server.health?.status !== "loading") announce(`The server: ${words}.`);
}

async function begin() {
  await store.open();
  const chat = new Chat();
  const sidebar = new Sidebar(chat);
  const activity = new ActivityView();
  new SettingsDialog(chat);
  new KeyDialog();
  chat.onListChanged = () => sidebar.show();
  server.addEventListener("change", showState);
  addEventListener("hashchange", () => showView(activity));
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId(location.hash === "#activity" ? "activity-view" : "question").focus();
  });
  await chat.restore();
  showView(activity);
  await server.watch();
}

begin();
