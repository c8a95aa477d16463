// Queues: share groups of a topic, whose workers acknowledge records one by one.
import { api, every, h, show } from "./frame.js";
import { card, count, dangerous, filtered, form, link, path, span, table, truncated } from "./parts.js";
import { settingsPanel } from "./settings.js";

const POLL_S = 2;
const pathOf = (topic, group, ...more) => path("topics", topic, "queues", group, ...more);
const age = (row) => (row.waiting_s === null ? "–" : row.waiting ? span(row.waiting_s) : "–");
const letters = (dead) => (dead ? link(["dead", dead.topic], dead.waiting === null ? dead.topic : `${dead.topic} (${count(dead.waiting)})`) : "–");
const about = "Workers of a queue get the records of a topic one by one, and accept, reject or release each of them.";

function createForm() {
  const input = (attributes = {}) => h("input", { autocomplete: "off", size: 18, ...attributes });
  const fields = {
    topic: ["Topic", input({ required: true })], group: ["Group", input({ required: true })],
    "share.delivery.count.limit": ["Attempts", input({ placeholder: "5", size: 6 })],
    "errors.deadletterqueue.topic.name": ["Topic for dead letters", input({ placeholder: "none" })],
    "share.auto.offset.reset": ["Begins at", h("select", {}, h("option", { value: "" }, "the end of the topic"), h("option", { value: "earliest" }, "the first record"))],
  };
  return form(fields, "Create queue", async ({ topic, group, ...settings }) => {
    const given = Object.entries(settings).filter(([, value]) => value.trim()).map(([name, value]) => [name, value.trim()]);
    await api(pathOf(topic.trim(), group.trim(), "settings"), Object.fromEntries(given));
    location.hash = path("queues", topic.trim(), group.trim());
  });
}

export async function queues(page, [topic, group]) {
  if (group !== undefined) return queue(page, topic, group);
  const found = await api("/queues");
  const sort = {};
  const draw = (rows) => table([
    ["Group", (row) => link(["queues", row.topic, row.group], row.group), "", (row) => row.group],
    ["Topic", (row) => link(["topics", row.topic], row.topic), "", (row) => row.topic],
    ["#Waiting", (row) => count(row.waiting), "", (row) => row.waiting], ["#Oldest", age, "", (row) => row.waiting_s],
    ["#Held", (row) => count(row.held), "wide", (row) => row.held], ["#Delayed", (row) => count(row.delayed), "wide", (row) => row.delayed],
    ["#Workers", (row) => count(row.worker_count), "wide", (row) => row.worker_count], ["Dead letters", (row) => letters(row.dead_letters), "wide"],
  ], rows, "There are no queues.", sort);
  page.append(
    h("h1", {}, "Queues"), ...filtered(found.queues, (row) => row.group + " " + row.topic, draw), ...truncated(found),
    h("details", { class: "below" }, h("summary", {}, "Create a queue"), h("div", { class: "below" }, createForm())),
    h("p", { class: "quiet" }, about));
}

// Returns the parts of the page that change while workers work.
function state(found, before, seconds) {
  const done = (row) => row.counts.accepted + row.counts.rejected;
  const rate = before && seconds ? Math.max(done(found) - done(before), 0) / seconds : null;
  const { accepted, released, rejected, expired } = found.counts;
  const more = found.worker_count - found.workers.length;
  return [
    h("div", { class: "cards" },
      card("Waiting", count(found.waiting)), card("Oldest waiting", age(found)), card("Held by workers", count(found.held)), card("Delayed", count(found.delayed)),
      card("Finished per second", rate === null ? "–" : count(+rate.toFixed(1)))),
    h("p", { class: "quiet" }, `Since the broker was started: ${count(accepted)} accepted, ${count(released)} released, ${count(rejected)} rejected, ${count(expired)} not acknowledged in time.`),
    h("h2", {}, "Workers"),
    table([["Worker", (row) => h("span", { class: "value" }, row.worker)], ["#Holds", (row) => count(row.held)]], found.workers, "No worker holds records or sends heartbeats."),
    more > 0 ? h("p", { class: "quiet" }, `${count(more)} more workers`) : null,
    h("h2", {}, "Partitions"),
    table([
      ["#Partition", (row) => row.partition], ["#Finished below", (row) => count(row.start), "wide"], ["#Next offset", (row) => count(row.next_offset), "wide"],
      ["#Waiting", (row) => count(row.waiting)], ["#Oldest", age], ["#Held", (row) => count(row.held)], ["#Delayed", (row) => count(row.delayed)],
    ], found.partitions, "No worker has read this topic yet."),
    ...truncated(found),
  ].filter(Boolean);
}

function purge(at, found) {
  const result = h("p", { role: "status", class: "quiet result" });
  const skip = async () => {
    try {
      const { records } = await api(at + "/purge", {});
      await show();
      document.querySelector("main h1").after(h("p", { class: "message", role: "status" }, `Skipped ${count(records)} records.`));
    } catch (error) {
      result.textContent = error.message;
      result.classList.add("bad");
    }
  };
  return [
    h("h2", {}, "Purge"),
    h("p", {}, "This skips all records that wait or are delayed in this queue. They remain in the topic, and other groups still get them. Stop the workers first."),
    h("p", { class: "tools" }, dangerous("Purge", `Skip the records of ${found.group}`, skip), result),
  ];
}

async function queue(page, topic, group) {
  const at = pathOf(topic, group);
  let found = await api(at), loaded = performance.now();
  const changing = h("div", {}, state(found, null, 0)), dead = h("span", {}, letters(found.dead_letters));
  page.append(
    h("h1", {}, group, " · ", link(["topics", topic], topic)), changing,
    h("h2", {}, "Dead letters"),
    h("p", {}, found.dead_letters ? dead : "Rejected records are only counted, because the queue has no topic for dead letters."),
    ...settingsPanel(found.setting_list, found.can_alter ? at + "/settings" : null).filter(Boolean),
    ...(found.can_purge ? purge(at, found) : []));
  every(POLL_S, async () => {
    const before = found, then = loaded;
    found = await api(at);
    loaded = performance.now();
    changing.replaceChildren(...state(found, before, (loaded - then) / 1000));
    dead.replaceChildren(letters(found.dead_letters));
  });
}
