// Groups: their lag, their members, and resetting their offsets.
import { api, h, showError } from "./frame.js";
import { count, filtered, link, path, span, table, truncated } from "./parts.js";

export function groupTable(rows, hasTopic, sort) {
  return table([
    ["Group", (row) => link(["groups", row.topic, row.group], row.group), "", (row) => row.group],
    ...(hasTopic ? [["Topic", (row) => link(["topics", row.topic], row.topic), "", (row) => row.topic]] : []),
    ["#Members", (row) => count(row.members), "wide", (row) => row.members], ["#Lag", (row) => (row.lag_records === null ? "–" : count(row.lag_records)), "", (row) => row.lag_records],
    ["#Time lag", (row) => (row.lag_seconds === null ? "–" : span(row.lag_seconds)), "", (row) => row.lag_seconds],
  ], rows, hasTopic ? "There are no groups." : "No group reads this topic.", sort);
}

export async function groups(page, [topicName, name]) {
  if (name !== undefined) return group(page, topicName, name);
  const found = await api("/groups");
  const sort = {};
  const draw = (rows) => groupTable(rows, true, sort);
  page.append(h("h1", {}, "Groups"), ...filtered(found.groups, (row) => row.group + " " + row.topic, draw), ...truncated(found));
}

async function group(page, topicName, name) {
  const at = path("topics", topicName) + path("groups", name);
  const found = await api(at);
  const to = h("input", { value: "earliest", title: "earliest, latest, an offset, or an ISO 8601 time" });
  const preview = h("div", {});
  const reset = async (dry) => {
    const result = await api(at + "/reset", { to: to.value.trim(), dry_run: dry });
    preview.replaceChildren(
      h("p", { class: "message", role: "status" }, dry ? "Preview: nothing has changed yet." : "Offsets were reset."),
      table([["#Partition", (row) => row.partition], ["#Committed", (row) => (row.committed === null ? "–" : count(row.committed))],
        ["#New offset", (row) => count(row.new)], ["#New lag", (row) => count(row.lag_records)]], result.partitions, "There are no offsets to reset."),
      dry ? h("p", {}, h("button", { class: "main", onclick: () => reset(false).catch(showError) }, "Reset offsets")) : "");
  };
  page.append(
    h("h1", {}, `${name} · ${topicName}`),
    table([
      ["#Partition", (row) => row.partition], ["#Committed", (row) => (row.committed === null ? "–" : count(row.committed))],
      ["#Next offset", (row) => count(row.next_offset)], ["#Lag", (row) => (row.records === null ? "–" : count(row.records))],
      ["#Time lag", (row) => (row.seconds === null ? "–" : span(row.seconds))],
    ], found.partitions, "This topic has no partitions."),
    h("h2", {}, "Members"),
    table([["Member", (row) => row.id], ["Protocol", (row) => row.wire], ["Partitions", (row) => row.partitions.join(", ") || "–"],
      ["#Last seen", (row) => span(row.idle_s) + " ago"]], found.members, "The group has no active members."),
    h("h2", {}, "Reset offsets"),
    h("form", { class: "tools", onsubmit: (event) => { event.preventDefault(); reset(true).catch(showError); } },
      h("label", {}, "To", to), h("button", {}, "Preview")),
    preview);
}
