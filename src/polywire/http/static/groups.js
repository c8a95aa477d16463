// Groups: how far they are behind, who their members are, and moving them.
import { api, h, tell } from "./frame.js";
import { count, filtered, left, link, path, span, table } from "./parts.js";

export async function groups(page, [topicName, name]) {
  if (name !== undefined) return group(page, topicName, name);
  const found = await api("/groups");
  const draw = (rows) => table([
    ["Group", (row) => link(["groups", row.topic, row.group], row.group)], ["Topic", (row) => link(["topics", row.topic], row.topic)],
    ["#Members", (row) => count(row.members), "wide"], ["#Lag", (row) => (row.lag_records === null ? "–" : count(row.lag_records))],
    ["#Behind", (row) => (row.lag_seconds === null ? "–" : span(row.lag_seconds))],
  ], rows, "There are no groups.");
  page.append(h("h1", {}, "Groups"), ...filtered(found.groups, (row) => row.group + " " + row.topic, draw), ...left(found));
}

async function group(page, topicName, name) {
  const at = path("topics", topicName) + path("groups", name);
  const found = await api(at);
  const to = h("input", { value: "earliest", title: "earliest, latest, an offset, or an ISO 8601 time" });
  const preview = h("div", {});
  const reset = async (dry) => {
    const got = await api(at + "/reset", { to: to.value.trim(), dry_run: dry });
    preview.replaceChildren(
      h("p", { class: "message", role: "status" }, dry ? "This is what would be moved." : "Moved."),
      table([["#Partition", (row) => row.partition], ["#Committed", (row) => (row.committed === null ? "–" : count(row.committed))],
        ["#New", (row) => count(row.new)], ["#Lag then", (row) => count(row.lag_records)]], got.partitions, "Nothing to move."),
      dry ? h("p", {}, h("button", { class: "main", onclick: () => reset(false).catch(tell) }, "Move the group")) : "");
  };
  page.append(
    h("h1", {}, `${name} · ${topicName}`),
    table([
      ["#Partition", (row) => row.partition], ["#Committed", (row) => (row.committed === null ? "–" : count(row.committed))],
      ["#Next offset", (row) => count(row.next_offset)], ["#Lag", (row) => (row.records === null ? "–" : count(row.records))],
      ["#Behind", (row) => (row.seconds === null ? "–" : span(row.seconds))],
    ], found.partitions, "This topic has no partitions."),
    h("h2", {}, "Members"),
    table([["Member", (row) => row.id], ["Wire", (row) => row.wire], ["Partitions", (row) => row.partitions.join(", ") || "–"],
      ["#Last seen", (row) => span(row.idle_s) + " ago"]], found.members, "The group has no members now."),
    h("h2", {}, "Move the group"),
    h("form", { class: "tools", onsubmit: (event) => { event.preventDefault(); reset(true).catch(tell); } },
      h("label", {}, "To", to), h("button", {}, "Preview")),
    preview);
}
