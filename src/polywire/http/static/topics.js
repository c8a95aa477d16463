// The list of topics, and the page of one topic.
import { api, h, show } from "./frame.js";
import { card, count, filtered, form, link, path, size, span, table, time, truncated } from "./parts.js";
import { groupTable } from "./groups.js";
import { produceForm } from "./produce.js";
import { records } from "./records.js";
import { createForm, settingsPanel } from "./settings.js";
import { quoted } from "./sql.js";
import { tablePanel, tableSummary, tableWords } from "./tables.js";

export async function topics(page, [name, what], query) {
  if (name !== undefined) return what === "records" ? records(page, name, query) : topic(page, name);
  const found = await api("/topics");
  const sort = {};
  const draw = (rows) => table([
    ["Topic", (row) => link(["topics", row.name], row.name), "", (row) => row.name], ["#Partitions", (row) => count(row.partitions), "wide", (row) => row.partitions],
    ["#Records", (row) => count(row.retained_records), "", (row) => row.retained_records], ["#Stored", (row) => size(row.stored_bytes), "", (row) => row.stored_bytes],
    ["Last record", (row) => time(row.last_stored_at_us), "wide", (row) => row.last_stored_at_us],
    ...(found.topics.some((row) => row.table) ? [["Table", (row) => tableSummary(row.table)]] : []),
    ["", (row) => link(["topics", row.name, "records"], "records"), "whole wide"],
  ], rows, "There are no topics.", sort);
  page.append(
    h("h1", {}, "Topics"), ...filtered(found.topics, (row) => `${row.name} ${tableWords(row.table)}`, draw), ...truncated(found),
    ...(found.can_create ? [h("details", { class: "below" }, h("summary", {}, "Create a topic"), h("div", { class: "below" }, createForm()))] : []));
}

async function topic(page, name) {
  const found = await api(path("topics", name));
  const settings = Object.fromEntries(found.setting_list.map((row) => [row.name, row.value]));
  const groups = found.can_see_groups ? await api(path("topics", name, "groups")) : null;
  page.append(...[
    h("h1", {}, name),
    found.link ? h("p", { class: "message" }, "The link ", link(["links", found.link], found.link), " writes this topic; it is read-only for clients.") : null,
    h("div", { class: "cards" },
      card("Records", count(found.retained_records)), card("Stored", size(found.stored_bytes)), card("Partitions", count(found.partitions)),
      card("Retention", retention(settings)), card("Compaction", settings.compaction ? "by key" : "off")),
    ...tablePanel(name, found),
    h("p", {}, ...(found.can_consume ? [link(["topics", name, "records"], "Browse records"), " · ",
      h("a", { href: "#/sql?q=" + encodeURIComponent(`select partition, "offset", timestamp, key, value\nfrom ${quoted(name)}\norder by timestamp desc\nlimit 50`) }, "Query in SQL")] : [])),
    ...(groups ? [h("h2", {}, "Groups"), groupTable(groups.groups, false), ...truncated(groups)] : []),
    h("h2", {}, "Partitions"),
    table([
      ["#Partition", (row) => row.partition, "", (row) => row.partition], ["#First offset", (row) => count(row.first_offset), "wide", (row) => row.first_offset],
      ["#Next offset", (row) => count(row.next_offset), "", (row) => row.next_offset], ["#Stored", (row) => size(row.stored_bytes), "", (row) => row.stored_bytes],
      ["Last record", (row) => time(row.last_stored_at_us), "", (row) => row.last_stored_at_us],
    ], found.partition_list, "This topic has no partitions."),
    found.can_alter ? h("details", { class: "below" }, h("summary", {}, "Add partitions"), h("div", { class: "below" }, growForm(found))) : null,
    ...settingsPanel(found.setting_list, found.can_alter ? path("topics", name, "settings") : null),
    ...(found.can_produce ? [h("h2", {}, "Produce a record"), produceForm(name)] : []),
    ...(found.can_delete ? [h("h2", {}, "Delete"), h("details", {}, h("summary", {}, "Delete this topic"), deleteForm(found))] : []),
  ].filter(Boolean));
}

function retention(settings) {
  const limits = [settings.retention_age_us ? span(settings.retention_age_us / 1e6) : null, settings.retention_bytes ? size(settings.retention_bytes) : null];
  return limits.filter(Boolean).join(", ") || "forever";
}

function growForm(found) {
  const field = h("input", { type: "number", required: true, min: found.partitions + 1, value: found.partitions + 1 });
  return [
    h("p", { class: "quiet" }, "Records stay in their partitions, but new records of a key may go to another partition than the old ones. Partitions cannot be removed."),
    form({ partitions: ["New number of partitions", field] }, "Add partitions", async (values) => {
      await api(path("topics", found.name, "partitions"), { partitions: Number(values.partitions) });
      setTimeout(show, 300);
      return "added";
    })];
}

function deleteForm(found) {
  const typed = h("input", { required: true, autocomplete: "off", size: 24 });
  const element = form({ name: ["Type the topic's name to confirm", typed] }, "Delete topic", async (values) => {
    if (values.name !== found.name) throw new Error("this is not the name of the topic");
    await api(path("topics", found.name), undefined, "DELETE");
    location.hash = "/topics";
  });
  element.querySelector("button").classList.add("danger");
  return h("div", { class: "below" },
    h("p", {}, `This deletes ${count(found.retained_records)} records in ${count(found.partitions)} partitions, and the offsets of all groups in this topic. It cannot be undone.`),
    element);
}
