// The records of a topic: found, spelled, followed, and sent again.
import { api, every, h, tell } from "./frame.js";
import { decoded, isFile } from "./avro.js";
import { askedFor, bytesOf, hex, partOf, short, textOf } from "./bytes.js";
import { count, link, path, size, table, time } from "./parts.js";
import { produceForm } from "./produce.js";

const PAGE = 50;
const SHOWN_MAX = 500;
const TOGETHER_MAX = 16;  // partitions that are read together

function json(data) {
  const text = textOf(data);
  if (text === null) return null;
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return null; }
}

// A value in one form; null where it cannot be shown in it.
async function spelled(data, form, schema) {
  if (data === null) return "null";
  const end = data.cut ? `\n… ${count(data.bytes)} bytes in all` : "";
  if (form === "avro" || (form === "best" && isFile(bytesOf(data)))) {
    if (data.cut) return "Only its beginning was read: ask for the whole record.";
    try { return JSON.stringify(await decoded(bytesOf(data), schema), null, 2); } catch (error) { return `no Avro: ${error.message}`; }
  }
  if (form === "hex") return hex(bytesOf(data)) + end;
  if (form === "text") return new TextDecoder().decode(bytesOf(data)) + end;
  return (form === "json" || form === "best" ? json(data) : null) ?? (textOf(data) === null ? hex(bytesOf(data)) : textOf(data)) + end;
}

const said = (row, name) => {
  const found = row.headers.filter((header) => textOf(header.key) === "dead." + name && header.value);
  return found.length ? partOf(found[found.length - 1].value) : null;
};

function place(topic, partition, offset) {
  return h("a", { href: `#${path("topics", topic, "records")}?partition=${encodeURIComponent(partition)}&from=${encodeURIComponent(offset)}` }, `${topic} / ${partition} @ ${offset}`);
}

// Where a dead letter was, why it is here, and the way back.
function letter(topic, row) {
  const target = said(row, "topic");
  if (target === null) return null;
  const told = h("span", { role: "status", class: "quiet" });
  const send = async () => {
    try {
      await api(path("topics", topic) + "/redrive", { topics: [target], partition: row.partition, offset: row.offset });
      told.textContent = `sent to ${target}`;
    } catch (error) { told.textContent = error.message; }
  };
  return h("div", { class: "letter" },
    h("p", {}, h("b", {}, "Dead letter: "), said(row, "reason") || "no reason given"),
    h("p", { class: "quiet" }, "was ", place(target, said(row, "partition") || 0, said(row, "offset") || 0)),
    h("p", { class: "tools" }, h("button", { type: "button", onclick: send }, "Redrive this one"), told));
}

// What can be done with a record.
function again(topic, row) {
  const told = h("span", { role: "status", class: "quiet" });
  const send = async () => {
    try {
      const stored = await api(path("topics", topic) + "/resend", { partition: row.partition, offset: row.offset });
      told.textContent = `stored in partition ${stored.partition} at offset ${count(stored.offset)}`;
    } catch (error) { told.textContent = error.message; }
  };
  const edited = row.value && row.value.text !== undefined && !row.value.cut
    ? h("details", {}, h("summary", {}, "Edit and send"), produceForm(topic, { key: row.key && row.key.text, value: row.value.text })) : null;
  return [h("p", { class: "tools" }, h("button", { type: "button", onclick: send }, "Send again"), told), edited];
}

function headers(row) {
  if (!row.headers.length) return null;
  const more = row.header_count - row.headers.length;
  return [
    h("dl", { class: "headers" }, row.headers.flatMap((header) => [h("dt", {}, partOf(header.key)), h("dd", {}, partOf(header.value))])),
    more ? h("p", { class: "quiet" }, `${count(more)} of ${count(row.header_count)} headers are not shown.`) : null,
  ];
}

function opened(topic, row, form, schema) {
  const value = h("pre", {}, "…");
  const draw = async () => { value.textContent = await spelled(row.value, form, schema); };
  const isCut = [row.key, row.value].some((data) => data && data.cut) || row.header_count > row.headers.length;
  const details = h("div", {}, letter(topic, row), headers(row));
  const whole = h("button", { type: "button", onclick: async () => {
    try {
      const found = await api(`${path("topics", topic, "partitions", row.partition, "records")}?offset=${row.offset}&limit=1&whole=1`);
      Object.assign(row, found.records[0]);
      details.replaceChildren(...[letter(topic, row), headers(row)].flat().filter(Boolean));
      whole.remove();
      await draw();
    } catch (error) { tell(error); }
  } }, "Read the whole record");
  draw();
  return h("div", { class: "opened" },
    details,
    h("p", { class: "quiet" }, `offset ${count(row.offset)} of partition ${row.partition}, stored ${time(row.stored_at_us)}`,
      row.created_at_us === null ? null : `, made ${time(row.created_at_us)}`, row.value ? `, ${size(row.value.bytes)}` : null),
    row.key ? h("p", {}, "Key ", h("code", {}, textOf(row.key) ?? short(row.key))) : null,
    value, isCut ? whole : null, ...again(topic, row));
}

function remembered(topic, field) {
  const name = "schema of " + topic;
  try { field.value = sessionStorage.getItem(name) || ""; } catch { /* it is typed anew */ }
  field.addEventListener("change", () => { try { sessionStorage.setItem(name, field.value); } catch { /* as above */ } });
}

export async function records(page, name, query) {
  const found = await api(path("topics", name));
  const numbers = found.partition_list.map((row) => row.partition);
  const field = (label, element) => h("label", {}, label, element);
  const together = numbers.length > 1 && numbers.length <= TOGETHER_MAX ? [h("option", { value: "" }, "all")] : [];
  const partition = h("select", {}, together, numbers.map((number) => h("option", { value: number }, String(number))));
  const from = h("input", { placeholder: "newest", title: "An offset, an ISO 8601 time, earliest, or nothing for the newest" });
  const key = h("input", { placeholder: "any" });
  const form = h("select", {}, [["best", "what fits"], ["json", "JSON"], ["avro", "Avro"], ["text", "text"], ["hex", "hex"]].map(([value, word]) => h("option", { value }, word)));
  const schema = h("textarea", { placeholder: '{"type": "record", …}', spellcheck: "false" });
  const asked = h("label", { class: "schema", hidden: true }, "Schema of the values (Avro files have theirs inside)", schema);
  const tail = h("input", { type: "checkbox" });
  const list = h("div", {}), told = h("p", { class: "quiet", role: "status" });
  if (query.has("partition")) partition.value = query.get("partition");
  from.value = query.get("from") || "";
  remembered(name, schema);
  let next = new Map(), rows = [], round = 0;

  const draw = () => list.replaceChildren(table([
    ["#Offset", (row) => (numbers.length > 1 ? `${row.partition} · ${count(row.offset)}` : count(row.offset))],
    ["Stored (UTC)", (row) => time(row.stored_at_us), "wide"], ["Key", (row) => h("span", { class: "value" }, short(row.key)), "key"],
    ["Value", (row) => {
      const details = h("details", { class: "value", ontoggle: () => {
        if (details.open && details.children.length === 1) details.append(opened(name, row, form.value, schema.value));
      } }, h("summary", {}, short(row.value), said(row, "topic") === null ? null : h("span", { class: "tag" }, "dead letter")));
      return details;
    }],
  ], rows, "No records here."));

  const load = async (more) => {
    const own = ++round;
    const chosen = partition.value === "" ? numbers : [Number(partition.value)];
    const begin = askedFor(from.value.trim(), Math.max(1, Math.floor(PAGE / chosen.length)));
    const ending = `limit=${PAGE}` + (key.value ? "&key=" + encodeURIComponent(key.value) : "");
    const got = await Promise.all(chosen.map((number) => api(
      `${path("topics", name, "partitions", number, "records")}?${ending}&${more && next.has(number) ? "offset=" + next.get(number) : begin}`)));
    if (own !== round) return;
    next = new Map(got.map((one) => [one.partition, one.next_offset]));
    const added = got.flatMap((one) => one.records).sort((a, b) => b.stored_at_us - a.stored_at_us || b.offset - a.offset);
    rows = (more ? [...added, ...rows] : added).slice(0, SHOWN_MAX);
    const [only] = got;
    told.textContent = got.length === 1 ? `offsets ${count(only.first_offset)} to ${count(only.end_offset)}, read up to ${count(only.next_offset)}`
      : `${count(rows.length)} records of ${got.length} partitions, the newest first`;
    if (!more || added.length) draw();
  };
  const read = (event) => { event.preventDefault(); load(false).catch(tell); };
  form.addEventListener("change", () => { asked.hidden = form.value !== "avro"; draw(); });
  schema.addEventListener("change", draw);
  page.append(
    h("h1", {}, link(["topics", name], name), " · records"),
    h("form", { class: "tools", onsubmit: read }, field("Partition", partition), field("From", from), field("Key", key), field("Values as", form),
      h("label", { class: "check" }, tail, "live"), h("button", { class: "main" }, "Read"),
      h("button", { type: "button", onclick: () => load(true).catch(tell) }, "Further"), asked),
    told, list);
  if (numbers.length) {
    partition.addEventListener("change", read);
    await load(false);
    every(1, async () => { if (tail.checked) await load(true); });
  }
}
