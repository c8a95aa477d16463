// Dead letters: what pipelines could not use, and its way back.
import { api, h, show } from "./frame.js";
import { count, filtered, left, link, path, table } from "./parts.js";

const LOOKED_AT_MAX = 50;  // topics whose letters are counted
const isDead = (topic) => /(^|[.\-_])dead$/.test(topic.name);
const about = "Pipelines put what they cannot use into topics of dead letters, with headers that say why and where it was. A redrive sends it back there; how far it came is the position of the group redrive.";

async function one(page, name) {
  const at = path("topics", name);
  const found = await api(at + "/dead-letters");
  const told = h("p", { role: "status", class: "quiet told" });
  const send = async () => {
    try {
      const sent = await api(at + "/redrive", { topics: found.targets.map((target) => target.topic) });
      await show();
      document.querySelector("main h1").after(h("p", { class: "message", role: "status" }, `${count(sent.letters)} letters were sent back.`));
    } catch (error) {
      told.textContent = error.message;
      told.classList.add("bad");
    }
  };
  page.append(
    h("h1", {}, link(["topics", name], name), " · dead letters"),
    h("p", {}, found.waiting ? `${count(found.waiting)} records wait here. ` : "Nothing waits here. ", link(["topics", name, "records"], "Look at them")),
    table([["Goes back to", (row) => link(["topics", row.topic], row.topic)], ["#Letters", (row) => count(row.letters)]], found.targets, "There are no letters to send."),
    ...(found.others ? [h("p", { class: "quiet" }, `${count(found.others)} records are no letters and are passed over.`)] : []),
    ...(found.more ? [h("p", { class: "quiet" }, "There are more; they come with the next redrive.")] : []),
    ...(found.letters || found.others ? [h("p", { class: "tools" }, h("button", { class: "main", onclick: send }, found.letters ? `Redrive ${count(found.letters)} letters` : "Pass them over"), told)] : []),
    h("p", { class: "quiet" }, about));
}

export async function letters(page, [name]) {
  if (name !== undefined) return one(page, name);
  const found = await api("/topics");
  const dead = found.topics.filter(isDead);
  const looked = await Promise.all(dead.slice(0, LOOKED_AT_MAX).map((topic) => api(path("topics", topic.name) + "/dead-letters").catch(() => null)));
  const waiting = new Map(looked.filter(Boolean).map((row) => [row.topic, row.waiting]));
  const draw = (rows) => table([
    ["Topic", (row) => link(["dead", row.name], row.name)], ["#Kept", (row) => count(row.retained_records)],
    ["#Waiting", (row) => (waiting.has(row.name) ? count(waiting.get(row.name)) : "–")],
    ["", (row) => link(["topics", row.name, "records"], "records")],
  ], rows, "No topic ends in dead.");
  page.append(h("h1", {}, "Dead letters"), ...filtered(dead, (row) => row.name, draw), ...left(found), h("p", { class: "quiet" }, about));
}
