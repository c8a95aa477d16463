// The list of topics, and the page of one topic.
import { api, h } from "./frame.js";
import { card, count, filtered, link, path, size, span, table, time, truncated } from "./parts.js";
import { produceForm } from "./produce.js";
import { records } from "./records.js";

export async function topics(page, [name, what], query) {
  if (name !== undefined) return what === "records" ? records(page, name, query) : topic(page, name);
  const found = await api("/topics");
  const draw = (rows) => table([
    ["Topic", (row) => link(["topics", row.name], row.name)], ["#Partitions", (row) => count(row.partitions), "wide"],
    ["#Records", (row) => count(row.retained_records)], ["#Stored", (row) => size(row.stored_bytes)],
    ["Last record (UTC)", (row) => time(row.last_stored_at_us), "wide"],
    ["", (row) => link(["topics", row.name, "records"], "records"), "whole"],
  ], rows, "There are no topics.");
  page.append(h("h1", {}, "Topics"), ...filtered(found.topics, (row) => row.name, draw), ...truncated(found));
}

function tableState(found) {
  if (!found) return [];
  const isWritten = found.version >= 0;
  const state = isWritten ? `Version ${count(found.version)}, committed at ${time(found.committed_ms * 1000)} (UTC).` : "The table was not written yet.";
  return [h("h2", {}, "Table"), h("div", { class: "cards" },
    card("Format", found.formats.replace(",", ", ")), card("Rows", count(found.rows || 0)), card("Files", count(found.files || 0)),
    card("Size", size(found.size || 0)), card("Behind", isWritten ? count(found.behind) : "–"), card("Age", isWritten ? span(found.age_s) : "–")),
  h("p", { class: found.error ? "bad" : "quiet" }, found.error ? `It cannot be written: ${found.error}. ` : "", state)];
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
    ...tableState(found.table),
    h("p", {}, link(["topics", name, "records"], "Browse records")),
    h("h2", {}, "Partitions"),
    table([
      ["#Partition", (row) => row.partition], ["#First offset", (row) => count(row.first_offset)], ["#Next offset", (row) => count(row.next_offset)],
      ["#Stored", (row) => size(row.stored_bytes)], ["Last record (UTC)", (row) => time(row.last_stored_at_us), "wide"],
    ], found.partition_list, "This topic has no partitions."),
    h("h2", {}, "Produce a record"), produceForm(name));
}
