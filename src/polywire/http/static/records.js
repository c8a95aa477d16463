// The records of a topic: browse, decode, follow and send again.
import { api, every, h, showError } from "./frame.js";
import { decoded, isFile } from "./avro.js";
import { bytesOf, hex, partOf, short, startQuery, textOf } from "./bytes.js";
import { count, link, path, size, table, time } from "./parts.js";
import { produceForm } from "./produce.js";

const PAGE = 50;
const SHOWN_MAX = 500;
const TOGETHER_MAX = 16;  // partitions that are read at once

function json(data) {
  const text = textOf(data);
  if (text === null) return null;
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return null; }
}

// A value as text in the chosen format.
async function formatted(data, form, schema) {
  if (data === null) return "null";
  const end = data.cut ? `\n… ${count(data.bytes)} bytes in total` : "";
  if (form === "avro" || (form === "best" && isFile(bytesOf(data)))) {
    if (data.cut) return "Only the beginning was read: load the whole record first.";
    try { return JSON.stringify(await decoded(bytesOf(data), schema), null, 2); } catch (error) { return `not Avro: ${error.message}`; }
  }
  if (form === "hex") return hex(bytesOf(data)) + end;
  if (form === "text") return new TextDecoder().decode(bytesOf(data)) + end;
  return (form === "json" || form === "best" ? json(data) : null) ?? (textOf(data) === null ? hex(bytesOf(data)) : textOf(data)) + end;
}

const deadHeader = (row, name) => {
  const found = row.headers.filter((header) => textOf(header.key) === "dead." + name && header.value);
  return found.length ? partOf(found[found.length - 1].value) : null;
};

function position(topic, partition, offset) {
  return h("a", { href: `#${path("topics", topic, "records")}?partition=${encodeURIComponent(partition)}&from=${encodeURIComponent(offset)}` }, `${topic} / ${partition} @ ${offset}`);
}

// The reason and original position of a dead letter, and a button to redrive it.
function letter(topic, row) {
  const target = deadHeader(row, "topic");
  if (target === null) return null;
  const result = h("span", { role: "status", class: "quiet" });
  const send = async () => {
    try {
      await api(path("topics", topic) + "/redrive", { topics: [target], partition: row.partition, offset: row.offset });
      result.textContent = `sent to ${target}`;
    } catch (error) { result.textContent = error.message; }
  };
  return h("div", { class: "letter" },
    h("p", {}, h("b", {}, "Dead letter: "), deadHeader(row, "reason") || "no reason recorded"),
    h("p", { class: "quiet" }, "from ", position(target, deadHeader(row, "partition") || 0, deadHeader(row, "offset") || 0)),
    h("p", { class: "tools" }, h("button", { type: "button", onclick: send }, "Redrive this record"), result));
}

// Buttons to send a record again, unchanged or edited.
function actions(topic, row) {
  const result = h("span", { role: "status", class: "quiet" });
  const send = async () => {
    try {
      const stored = await api(path("topics", topic) + "/resend", { partition: row.partition, offset: row.offset });
      result.textContent = `stored in partition ${stored.partition} at offset ${count(stored.offset)}`;
    } catch (error) { result.textContent = error.message; }
  };
  const edited = row.value && row.value.text !== undefined && !row.value.cut
    ? h("details", {}, h("summary", {}, "Edit and send"), produceForm(topic, { key: row.key && row.key.text, value: row.value.text })) : null;
  return [h("p", { class: "tools" }, h("button", { type: "button", onclick: send }, "Send again"), result), edited];
}

function headers(row) {
  if (!row.headers.length) return null;
  const more = row.header_count - row.headers.length;
  return [
    h("dl", { class: "headers" }, row.headers.flatMap((header) => [h("dt", {}, partOf(header.key)), h("dd", {}, partOf(header.value))])),
    more ? h("p", { class: "quiet" }, `${count(more)} of ${count(row.header_count)} headers are not shown.`) : null,
  ];
}

function recordDetails(topic, row, form, schema) {
  const value = h("pre", {}, "…");
  const draw = async () => { value.textContent = await formatted(row.value, form, schema); };
  const isCut = [row.key, row.value].some((data) => data && data.cut) || row.header_count > row.headers.length;
  const details = h("div", {}, letter(topic, row), headers(row));
  const whole = h("button", { type: "button", onclick: async () => {
    try {
      const found = await api(`${path("topics", topic, "partitions", row.partition, "records")}?offset=${row.offset}&limit=1&whole=1`);
      Object.assign(row, found.records[0]);
      details.replaceChildren(...[letter(topic, row), headers(row)].flat().filter(Boolean));
      whole.remove();
      await draw();
    } catch (error) { showError(error); }
  } }, "Load the whole record");
  draw();
  return h("div", { class: "opened" },
    details,
    h("p", { class: "quiet" }, `partition ${row.partition}, offset ${count(row.offset)}, stored ${time(row.stored_at_us)}`,
      row.created_at_us === null ? null : `, created ${time(row.created_at_us)}`, row.value ? `, ${size(row.value.bytes)}` : null),
    row.key ? h("p", {}, "Key ", h("code", {}, textOf(row.key) ?? short(row.key))) : null,
    value, isCut ? whole : null, ...actions(topic, row));
}

// Keeps the schema of a topic for as long as the browser window is open.
function rememberSchema(topic, field) {
  const name = "schema of " + topic;
  try { field.value = sessionStorage.getItem(name) || ""; } catch { /* without storage the user types it again */ }
  field.addEventListener("change", () => { try { sessionStorage.setItem(name, field.value); } catch { /* as above */ } });
}

export async function records(page, name, query) {
  const found = await api(path("topics", name));
  const numbers = found.partition_list.map((row) => row.partition);
  const field = (label, element) => h("label", {}, label, element);
  const together = numbers.length > 1 && numbers.length <= TOGETHER_MAX ? [h("option", { value: "" }, "all")] : [];
  const partition = h("select", {}, together, numbers.map((number) => h("option", { value: number }, String(number))));
  const from = h("input", { placeholder: "newest", title: "An offset, an ISO 8601 time, or earliest; empty for the newest records" });
  const key = h("input", { placeholder: "any" });
  const form = h("select", {}, [["best", "auto"], ["json", "JSON"], ["avro", "Avro"], ["text", "text"], ["hex", "hex"]].map(([value, word]) => h("option", { value }, word)));
  const schema = h("textarea", { placeholder: '{"type": "record", …}', spellcheck: "false" });
  const schemaField = h("label", { class: "schema", hidden: true }, "Schema of the values (not needed for Avro files, which contain it)", schema);
  const tail = h("input", { type: "checkbox" });
  const list = h("div", {}), summary = h("p", { class: "quiet", role: "status" });
  if (query.has("partition")) partition.value = query.get("partition");
  from.value = query.get("from") || "";
  rememberSchema(name, schema);
  let next = new Map(), rows = [], round = 0;

  const draw = () => list.replaceChildren(table([
    ["#Offset", (row) => (numbers.length > 1 ? `${row.partition} · ${count(row.offset)}` : count(row.offset))],
    ["Stored (UTC)", (row) => time(row.stored_at_us), "wide"], ["Key", (row) => h("span", { class: "value" }, short(row.key)), "key"],
    ["Value", (row) => {
      const details = h("details", { class: "value", ontoggle: () => {
        if (details.open && details.children.length === 1) details.append(recordDetails(name, row, form.value, schema.value));
      } }, h("summary", {}, short(row.value), deadHeader(row, "topic") === null ? null : h("span", { class: "tag" }, "dead letter")));
      return details;
    }],
  ], rows, "There are no records."));

  const load = async (more) => {
    const started = ++round;
    const chosen = partition.value === "" ? numbers : [Number(partition.value)];
    const start = startQuery(from.value.trim(), Math.max(1, Math.floor(PAGE / chosen.length)));
    const filter = `limit=${PAGE}` + (key.value ? "&key=" + encodeURIComponent(key.value) : "");
    const pages = await Promise.all(chosen.map((number) => api(
      `${path("topics", name, "partitions", number, "records")}?${filter}&${more && next.has(number) ? "offset=" + next.get(number) : start}`)));
    if (started !== round) return;  // a later request has replaced this one
    next = new Map(pages.map((found) => [found.partition, found.next_offset]));
    const added = pages.flatMap((found) => found.records).sort((a, b) => b.stored_at_us - a.stored_at_us || b.offset - a.offset);
    rows = (more ? [...added, ...rows] : added).slice(0, SHOWN_MAX);
    const [only] = pages;
    summary.textContent = pages.length === 1 ? `offsets ${count(only.first_offset)} to ${count(only.end_offset)}, read up to ${count(only.next_offset)}`
      : `${count(rows.length)} records of ${pages.length} partitions, newest first`;
    if (!more || added.length) draw();
  };
  const read = (event) => { event.preventDefault(); load(false).catch(showError); };
  form.addEventListener("change", () => { schemaField.hidden = form.value !== "avro"; draw(); });
  schema.addEventListener("change", draw);
  page.append(
    h("h1", {}, link(["topics", name], name), " · records"),
    h("form", { class: "tools", onsubmit: read }, field("Partition", partition), field("From", from), field("Key", key), field("Values as", form),
      h("label", { class: "check" }, tail, "live"), h("button", { class: "main" }, "Read"),
      h("button", { type: "button", onclick: () => load(true).catch(showError) }, "Load more"), schemaField),
    summary, list);
  if (numbers.length) {
    partition.addEventListener("change", read);
    await load(false);
    every(1, async () => { if (tail.checked) await load(true); });
  }
}
