// The list of topics, and the page of one topic.
import { api, h } from "./frame.js";
import { card, count, filtered, link, path, size, span, table, time, truncated } from "./parts.js";
import { produceForm } from "./produce.js";
import { records } from "./records.js";
import { quoted } from "./sql.js";
import { tablePanel, tableSummary, tableWords } from "./tables.js";

export async function topics(page, [name, what], query) {
  if (name !== undefined) return what === "records" ? records(page, name, query) : topic(page, name);
  const found = await api("/topics");
  const draw = (rows) => table([
    ["Topic", (row) => link(["topics", row.name], row.name)], ["#Partitions", (row) => count(row.partitions), "wide"],
    ["#Records", (row) => count(row.retained_records)], ["#Stored", (row) => size(row.stored_bytes)],
    ["Last record (UTC)", (row) => time(row.last_stored_at_us), "wide"],
    ...(found.topics.some((row) => row.table) ? [["Table", (row) => tableSummary(row.table)]] : []),
    ["", (row) => link(["topics", row.name, "records"], "records"), "whole"],
  ], rows, "There are no topics.");
  page.append(h("h1", {}, "Topics"), ...filtered(found.topics, (row) => `${row.name} ${tableWords(row.table)}`, draw), ...truncated(found));
}

async function topic(page, name) {
  const found = await api(path("topics", name));
  const settings = found.settings;
  page.append(
    h("h1", {}, name),
    h("div", { class: "cards" },
      card("Records", count(found.retained_records)), card("Stored", size(found.stored_bytes)), card("Partitions", count(found.partitions)),
      card("Retention", settings.retention_age_us ? span(settings.retention_age_us / 1e6) : settings.retention_age_us === null ? "default" : "forever"),
      card("Compaction", settings.compaction ? "by key" : "off")),
    ...tablePanel(name, found),
    h("p", {}, link(["topics", name, "records"], "Browse records"), " · ",
      h("a", { href: "#/sql?q=" + encodeURIComponent(`select partition, "offset", timestamp, key, value\nfrom ${quoted(name)}\norder by timestamp desc\nlimit 50`) }, "Query in SQL")),
    h("h2", {}, "Partitions"),
    table([
      ["#Partition", (row) => row.partition], ["#First offset", (row) => count(row.first_offset)], ["#Next offset", (row) => count(row.next_offset)],
      ["#Stored", (row) => size(row.stored_bytes)], ["Last record (UTC)", (row) => time(row.last_stored_at_us), "wide"],
    ], found.partition_list, "This topic has no partitions."),
    h("h2", {}, "Produce a record"), produceForm(name));
}
