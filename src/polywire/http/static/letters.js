// Dead letters: records that pipelines or workers could not process, and redriving them.
import { api, h, show } from "./frame.js";
import { count, filtered, link, path, table, truncated } from "./parts.js";

const COUNTED_MAX = 50;  // topics whose waiting records are counted
const isDead = (topic) => /(^|[.\-_])dead$/.test(topic.name);
const about = "Pipelines and queues write records that cannot be processed to dead-letter topics, with headers for the reason and the original position. A redrive returns records to their original topic and tracks progress as the offset of the consumer group redrive.";

async function queue(page, name) {
  const at = path("topics", name);
  const found = await api(at + "/dead-letters");
  const result = h("p", { role: "status", class: "quiet result" });
  const send = async () => {
    try {
      const sent = await api(at + "/redrive", { topics: found.targets.map((target) => target.topic) });
      await show();
      document.querySelector("main h1").after(h("p", { class: "message", role: "status" }, `Redrove ${count(sent.letters)} records.`));
    } catch (error) {
      result.textContent = error.message;
      result.classList.add("bad");
    }
  };
  page.append(
    h("h1", {}, link(["topics", name], name), " · dead letters"),
    h("p", {}, found.waiting ? `${count(found.waiting)} records are waiting. ` : "No records are waiting. ", link(["topics", name, "records"], "Browse records")),
    table([["Original topic", (row) => link(["topics", row.topic], row.topic)], ["#Records", (row) => count(row.letters)]], found.targets, "There are no dead letters to redrive."),
    ...(found.others ? [h("p", { class: "quiet" }, `${count(found.others)} records have no dead-letter headers and will be skipped.`)] : []),
    ...(found.more ? [h("p", { class: "quiet" }, "There are more records; the next redrive includes them.")] : []),
    ...(found.letters || found.others ? [h("p", { class: "tools" }, h("button", { class: "main", onclick: send }, found.letters ? `Redrive ${count(found.letters)} records` : "Skip these records"), result)] : []),
    h("p", { class: "quiet" }, about));
}

export async function letters(page, [name]) {
  if (name !== undefined) return queue(page, name);
  const found = await api("/topics");
  const dead = found.topics.filter(isDead);
  const counted = await Promise.all(dead.slice(0, COUNTED_MAX).map((topic) => api(path("topics", topic.name) + "/dead-letters").catch(() => null)));
  const waiting = new Map(counted.filter(Boolean).map((row) => [row.topic, row.waiting]));
  const draw = (rows) => table([
    ["Topic", (row) => link(["dead", row.name], row.name)], ["#Retained", (row) => count(row.retained_records)],
    ["#Waiting", (row) => (waiting.has(row.name) ? count(waiting.get(row.name)) : "–")],
    ["", (row) => link(["topics", row.name, "records"], "records")],
  ], rows, "No topic has a name that ends in dead.");
  page.append(h("h1", {}, "Dead letters"), ...filtered(dead, (row) => row.name, draw), ...truncated(found), h("p", { class: "quiet" }, about));
}
