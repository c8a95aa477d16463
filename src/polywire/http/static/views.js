// The pages of the console, one function each: it fills an element with what the admin API answers.
import { api, every, h, tell } from "./console.js";

const path = (...parts) => "/" + parts.map(encodeURIComponent).join("/");
const link = (parts, text) => h("a", { href: "#" + path(...parts) }, text);
const count = (number) => number.toLocaleString("en");
const time = (us) => (us ? new Date(us / 1000).toISOString().replace("T", " ").replace("Z", "") : "–");

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return (unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)) + " " + units[unit];
}

function span(seconds) {
  if (seconds < 1) return seconds ? "< 1 s" : "0 s";
  if (seconds < 120) return Math.round(seconds) + " s";
  if (seconds < 7200) return Math.round(seconds / 60) + " min";
  return seconds < 172800 ? Math.round(seconds / 3600) + " h" : Math.round(seconds / 86400) + " d";
}

// columns: [title, cell of a row, class]; a title that begins with # is a column of numbers.
function table(columns, rows, none) {
  if (!rows.length) return h("div", { class: "table" }, h("p", { class: "empty" }, none));
  const classes = columns.map(([title, , more]) => [title.startsWith("#") ? "number" : "", more || ""].join(" ").trim() || null);
  const head = h("tr", {}, columns.map(([title], at) => h("th", { scope: "col", class: classes[at] }, title.replace("#", ""))));
  const body = rows.map((row) => h("tr", {}, columns.map(([, cell], at) => h("td", { class: classes[at] }, cell(row)))));
  return h("div", { class: "table" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

const card = (title, value, ...more) => h("div", { class: "card" }, h("span", {}, title), h("b", {}, value), ...more);

function filtered(rows, words, draw) {
  const place = h("div", {});
  const input = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter", oninput: () => {
    const wanted = input.value.toLowerCase();
    place.replaceChildren(draw(rows.filter((row) => words(row).toLowerCase().includes(wanted))));
  } });
  place.replaceChildren(draw(rows));
  return [h("form", { class: "tools", onsubmit: (event) => event.preventDefault() }, input), place];
}

const left = (found) => (found.more ? [h("p", { class: "quiet" }, "There are more than are shown.")] : []);

// Overview

const kept = [];  // what was seen, to make rates of

function rate(values) {
  const most = Math.max(...values, 1);
  const step = 200 / Math.max(values.length - 1, 1);
  const points = values.map((value, at) => `${(at * step).toFixed(1)},${(38 - (34 * value) / most).toFixed(1)}`);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "rate");
  svg.setAttribute("viewBox", "0 0 200 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", points.length > 1 ? "M" + points.join("L") : "");
  svg.append(line);
  return svg;
}

function rates(of) {
  const found = [];
  for (let at = 1; at < kept.length; at += 1) {
    const seconds = (kept[at].at_us - kept[at - 1].at_us) / 1e6;
    found.push(Math.max(0, (of(kept[at]) - of(kept[at - 1])) / seconds));
  }
  return found;
}

function drawOverview(page) {
  const now = kept[kept.length - 1];
  const moved = (name) => (seen) => Object.entries(seen.wires).reduce((sum, [wire, found]) => (wire === "http" ? sum : sum + found[name]), 0);
  const last = (values) => (values.length ? values[values.length - 1] : 0);
  const records = rates((seen) => seen.records), received = rates(moved("received_bytes")), sent = rates(moved("sent_bytes"));
  const wires = Object.entries(now.wires).map(([name, wire]) => {
    const of = (what) => last(rates((seen) => (seen.wires[name] || wire)[what]));
    return { name, ...wire, received: of("received_bytes"), sent: of("sent_bytes") };
  });
  page.replaceChildren(
    h("h1", {}, "Overview"),
    ...(now.ready ? [] : [h("p", { class: "message bad", role: "alert" }, now.readiness)]),
    h("div", { class: "cards" },
      card("Records stored per second", count(Math.round(last(records))), rate(records)),
      card("Received per second", size(last(received)), rate(received)),
      card("Sent per second", size(last(sent)), rate(sent))),
    h("div", { class: "cards" },
      card("Topics", count(now.topics)), card("Partitions", count(now.partitions)), card("Records", count(now.records)),
      card("Stored", size(now.stored_bytes)), card("Connections turned away", count(now.refused))),
    h("h2", {}, "Wires"),
    table([
      ["Wire", (wire) => wire.name], ["Listens", (wire) => now.listeners[wire.name] || "–", "wide"], ["#Connections", (wire) => count(wire.connections)],
      ["#Received/s", (wire) => size(wire.received)], ["#Sent/s", (wire) => size(wire.sent)],
      ["#Received", (wire) => size(wire.received_bytes), "wide"], ["#Sent", (wire) => size(wire.sent_bytes), "wide"],
    ], wires, "Nobody has connected yet."),
    h("p", { class: "quiet" }, `Polywire ${now.version}`));
}

async function overview(page) {
  const look = async () => {
    kept.push(await api("/overview"));
    if (kept.length > 90) kept.shift();
    drawOverview(page);
  };
  await look();
  every(2, look);
}

// Topics and records

async function topics(page, [name, what]) {
  if (name !== undefined) return what === "records" ? records(page, name) : topic(page, name);
  const found = await api("/topics");
  const draw = (rows) => table([
    ["Topic", (row) => link(["topics", row.name], row.name)], ["#Partitions", (row) => count(row.partitions)],
    ["#Records", (row) => count(row.retained_records)], ["#Stored", (row) => size(row.stored_bytes)],
    ["Last record (UTC)", (row) => time(row.last_stored_at_us), "wide"],
    ["", (row) => link(["topics", row.name, "records"], "records")],
  ], rows, "There are no topics.");
  page.append(h("h1", {}, "Topics"), ...filtered(found.topics, (row) => row.name, draw), ...left(found));
}

async function topic(page, name) {
  const found = await api(path("topics", name));
  const settings = found.settings;
  page.append(
    h("h1", {}, name),
    h("div", { class: "cards" },
      card("Records", count(found.retained_records)), card("Stored", size(found.stored_bytes)), card("Partitions", count(found.partitions)),
      card("Kept for", settings.retention_age_us ? span(settings.retention_age_us / 1e6) : settings.retention_age_us === null ? "default" : "ever"),
      card("Compaction", settings.compaction ? "by key" : "off")),
    h("p", {}, link(["topics", name, "records"], "Browse its records")),
    h("h2", {}, "Partitions"),
    table([
      ["#Partition", (row) => row.partition], ["#First offset", (row) => count(row.first_offset)], ["#Next offset", (row) => count(row.next_offset)],
      ["#Stored", (row) => size(row.stored_bytes)], ["Last record (UTC)", (row) => time(row.last_stored_at_us), "wide"],
    ], found.partition_list, "This topic has no partitions."),
    h("h2", {}, "Store a record"), produceForm(name));
}

function produceForm(name, given = {}) {
  const key = h("input", { name: "key", value: given.key || null }), value = h("textarea", { name: "value" });
  value.value = given.value || "";
  const told = h("p", { role: "status", class: "quiet" });
  return h("form", { onsubmit: async (event) => {
    event.preventDefault();
    const body = { value: value.value };
    if (key.value) body.key = key.value;
    try {
      const stored = await api(path("topics", name) + "/records", body);
      told.textContent = `stored in partition ${stored.partition} at offset ${stored.offset}`;
    } catch (error) { told.textContent = error.message; }
  } }, h("label", {}, "Key, if any", key), h("label", {}, "Value", value), h("p", {}, h("button", { class: "main" }, "Store")), told);
}

function bytesOf(data) {
  if (data.text !== undefined) return new TextEncoder().encode(data.text);
  return Uint8Array.from(atob(data.base64), (letter) => letter.charCodeAt(0));
}

function hex(bytes) {
  const lines = [];
  for (let at = 0; at < bytes.length; at += 16) {
    const part = [...bytes.slice(at, at + 16)];
    const numbers = part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(47);
    lines.push(`${at.toString(16).padStart(6, "0")}  ${numbers}  ${part.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : ".")).join("")}`);
  }
  return lines.join("\n");
}

function spelled(data, form) {
  if (data === null) return "null";
  const end = data.cut ? `\n… ${count(data.bytes)} bytes in all` : "";
  if (form === "hex" || (data.text === undefined && form !== "text")) return hex(bytesOf(data)) + end;
  const text = data.text === undefined ? new TextDecoder().decode(bytesOf(data)) : data.text;
  if (form === "text") return text + end;
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text + end; }
}

const short = (data) => (data === null ? "null" : (data.text === undefined ? `${data.bytes} bytes` : data.text).slice(0, 120));

async function records(page, name) {
  const found = await api(path("topics", name));
  const field = (label, element) => h("label", {}, label, element);
  const partition = h("select", {}, found.partition_list.map((row) => h("option", { value: row.partition }, String(row.partition))));
  const from = h("input", { value: "", placeholder: "newest", title: "An offset, an ISO 8601 time, earliest, or nothing for the newest" });
  const key = h("input", { placeholder: "any" });
  const form = h("select", {}, ["json", "text", "hex"].map((word) => h("option", {}, word)));
  const tail = h("input", { type: "checkbox" });
  const place = h("div", {}), told = h("p", { class: "quiet", role: "status" });
  let next = 0, rows = [], asked = 0;
  const base = () => path("topics", name) + "/partitions/" + partition.value + "/records?limit=50";
  const draw = () => place.replaceChildren(table([
    ["#Offset", (row) => count(row.offset)], ["Stored (UTC)", (row) => time(row.stored_at_us), "wide"], ["Key", (row) => short(row.key)],
    ["Value", (row) => h("details", { class: "value" }, h("summary", {}, short(row.value)),
      h("pre", {}, spelled(row.value, form.value)),
      row.headers.length ? h("pre", {}, row.headers.map((header) => `${short(header.key)}: ${short(header.value)}`).join("\n")) : null,
      row.value && row.value.text !== undefined && !row.value.cut
        ? h("details", {}, h("summary", {}, "Send again"), produceForm(name, { key: row.key && row.key.text, value: row.value.text })) : null)],
  ], rows, "No records here."));
  const load = async (more) => {
    const own = ++asked;
    let query = more ? "&offset=" + next : "";
    if (!more) {
      const begin = from.value.trim();
      if (begin === "") query = "&tail=50";
      else if (/^\d+$/.test(begin)) query = "&offset=" + begin;
      else if (begin !== "earliest") query = "&time=" + encodeURIComponent(begin);
    }
    if (key.value) query += "&key=" + encodeURIComponent(key.value);
    const got = await api(base() + query);
    if (own !== asked) return;
    const added = [...got.records].reverse();
    rows = (more ? [...added, ...rows] : added).slice(0, 500);
    next = got.next_offset;
    told.textContent = `offsets ${count(got.first_offset)} to ${count(got.end_offset)}, read up to ${count(next)}`;
    if (!more || added.length) draw();
  };
  const again = (event) => { event.preventDefault(); load(false).catch(tell); };
  form.addEventListener("change", draw);
  page.append(
    h("h1", {}, link(["topics", name], name), " · records"),
    h("form", { class: "tools", onsubmit: again }, field("Partition", partition), field("From", from), field("Key", key), field("Values as", form),
      h("label", { class: "check" }, tail, "live"), h("button", { class: "main" }, "Read"),
      h("button", { type: "button", onclick: () => load(true).catch(tell) }, "Further")),
    told, place);
  if (found.partition_list.length) {
    partition.addEventListener("change", again);
    await load(false);
    every(1, async () => { if (tail.checked) await load(true); });
  }
}

// Groups

async function groups(page, [topicName, name]) {
  if (name !== undefined) return group(page, topicName, name);
  const found = await api("/groups");
  const draw = (rows) => table([
    ["Group", (row) => link(["groups", row.topic, row.group], row.group)], ["Topic", (row) => link(["topics", row.topic], row.topic)],
    ["#Members", (row) => count(row.members)], ["#Lag", (row) => count(row.lag_records)], ["#Behind", (row) => span(row.lag_seconds)],
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
      ["#Next offset", (row) => count(row.next_offset)], ["#Lag", (row) => count(row.records)],
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

// Clients and users

async function clients(page) {
  const found = await api("/connections");
  const draw = (rows) => table([
    ["Wire", (row) => row.wire || "not known yet"], ["Dialect", (row) => row.dialect || "–", "wide"], ["Address", (row) => row.peer],
    ["User", (row) => row.user || "–"], ["#Received", (row) => size(row.received_bytes)], ["#Sent", (row) => size(row.sent_bytes)],
  ], rows, "Nobody is connected.");
  page.append(h("h1", {}, "Clients"), ...filtered(found.connections, (row) => [row.wire, row.dialect, row.peer, row.user].join(" "), draw), ...left(found));
}

async function users(page) {
  const found = await api("/users");
  page.append(
    h("h1", {}, "Users"),
    ...(found.open ? [h("p", { class: "message" }, "This broker has no users: whoever reaches it may do everything.")] : []),
    table([["User", (row) => row.name], ["State", (row) => (row.active ? "active" : "inactive")],
      ["Kept in", (row) => (row.configured ? "users file" : "broker")], ["Tokens", (row) => row.tokens.join(", ") || "–"]],
    found.users, "There are no users."), ...left(found));
}

export const views = { overview, topics, groups, clients, users };
