// The records of a topic: browse, decode, follow and send again.
import { api, endpoint, every, h, showError } from "./frame.js";
import { decoded, isFile } from "./avro.js";
import { bytesOf, hex, instant, isNewest, partOf, short, startQuery, textOf } from "./bytes.js";
import { count, form, link, path, save, size, table, time } from "./parts.js";
import { produceForm } from "./produce.js";

const PAGE = 50;
const SHOWN_MAX = 500;
const TOGETHER_MAX = 16;  // partitions that are read at once
const FILTER_MAX = 1000;  // characters
const STORED = "Stored";
const TIMES = "An offset, or a time such as 2026-01-31 18:00";

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
    h("p", { class: "quiet" }, `partition ${row.partition}, offset ${count(row.offset)}, stored `, time(row.stored_at_us),
      ...(row.created_at_us === null ? [] : [", created ", time(row.created_at_us)]), row.value ? `, ${size(row.value.bytes)}` : null),
    row.key ? h("p", {}, "Key ", h("code", {}, textOf(row.key) ?? short(row.key))) : null,
    value, isCut ? whole : null, ...actions(topic, row));
}

// Keeps the schema of a topic for as long as the browser window is open.
function rememberSchema(topic, field) {
  const name = "schema of " + topic;
  try { field.value = sessionStorage.getItem(name) || ""; } catch { /* without storage the user types it again */ }
  field.addEventListener("change", () => { try { sessionStorage.setItem(name, field.value); } catch { /* as above */ } });
}

// The conditions of the form as parameters of the API.
function conditions(fields) {
  return ["key", "search", "json"].filter((name) => fields[name].value !== "").map((name) => `&${name}=${encodeURIComponent(fields[name].value)}`).join("");
}

// Offsets of the records that are shown: one range for each partition.
function rangesOf(rows) {
  const ranges = new Map();
  for (const { partition, offset } of rows) {
    const [low, high] = ranges.get(partition) || [offset, offset];
    ranges.set(partition, [Math.min(low, offset), Math.max(high, offset)]);
  }
  return [...ranges].map(([partition, [low, high]]) => `${partition}:${low}-${high + 1}`).join(",");
}

// A form that downloads records as a file. `selected` returns the rows that are shown, the chosen partition and the conditions.
function downloads(name, selected) {
  const what = h("select", {}, h("option", { value: "shown" }, "the records shown"), h("option", { value: "range" }, "a range"));
  const from = h("input", { placeholder: "earliest", title: TIMES, size: 16, disabled: true }), until = h("input", { placeholder: "end", title: TIMES, size: 16, disabled: true });
  what.addEventListener("change", () => { from.disabled = until.disabled = what.value === "shown"; });
  const at = (text) => encodeURIComponent(/^\d+$/.test(text) ? text : instant(text));
  const kind = h("select", {}, [["json", "JSON"], ["csv", "CSV"], ["parquet", "Parquet"]].map(([value, word]) => h("option", { value }, word)));
  const fields = { kind: ["Format", kind], what: ["Records", what], from: ["From", from], until: ["Until", until] };
  return form(fields, "Download", async (values) => {
    const { rows, partition, filter } = selected();
    if (values.what === "shown" && !rows.length) throw new Error("no records are shown");
    const range = values.what === "shown" ? "&offsets=" + rangesOf(rows)
      : (partition === "" ? "" : "&partition=" + partition) + (values.from.trim() && values.from.trim() !== "earliest" ? "&from=" + at(values.from.trim()) : "") + (values.until.trim() ? "&until=" + at(values.until.trim()) : "");
    const response = await fetch(endpoint(`${path("topics", name, "download")}?format=${values.kind}${range}${filter}`));
    if (!response.ok) throw new Error((await response.json()).error.message);
    save(`${name.replace(/[^A-Za-z0-9._-]/g, "_")}.${values.kind}`, await response.blob());
    const more = response.headers.get("X-Polywire-More") === "1" ? "; there are more: download a smaller range" : "";
    return `${count(Number(response.headers.get("X-Polywire-Records")))} records${more}`;
  });
}

// What was read, in one line. With conditions it says how many records were compared.
function summaryOf(pages, rows, isFiltered) {
  const [only] = pages;
  if (isFiltered) {
    const compared = pages.reduce((sum, found) => sum + found.looked_at, 0);
    const ended = pages.every((found) => found.begin_offset <= found.first_offset && found.next_offset >= found.end_offset);
    return `${count(rows.length)} records match; compared ${count(compared)} in this step${ended ? "" : ". Load more continues the search"}`;
  }
  return pages.length === 1 ? `offsets ${count(only.first_offset)} to ${count(only.end_offset)}, read up to ${count(only.next_offset)}`
    : `${count(rows.length)} records of ${pages.length} partitions`;
}

export async function records(page, name, query) {
  const found = await api(path("topics", name));
  const numbers = found.partition_list.map((row) => row.partition);
  const field = (label, element) => h("label", {}, label, element);
  const together = numbers.length > 1 && numbers.length <= TOGETHER_MAX ? [h("option", { value: "" }, "all")] : [];
  const partition = h("select", {}, together, numbers.map((number) => h("option", { value: number }, String(number))));
  const from = h("input", { placeholder: "newest", title: TIMES + ", or earliest; empty for the newest records", size: 14 });
  const fields = {
    key: h("input", { placeholder: "any", size: 10 }),
    search: h("input", { type: "search", placeholder: "in key, value or headers", size: 20, maxlength: FILTER_MAX }),
    json: h("input", { placeholder: "items[*].price >= 10", size: 20, maxlength: FILTER_MAX, spellcheck: "false",
      title: "A path and a comparison: = != < <= > >= or ~ (contains). [0] is the first item, [*] any. A path alone: the field exists." }),
  };
  const shape = h("select", {}, [["best", "auto"], ["json", "JSON"], ["avro", "Avro"], ["text", "text"], ["hex", "hex"]].map(([value, word]) => h("option", { value }, word)));
  const schema = h("textarea", { placeholder: '{"type": "record", …}', spellcheck: "false" });
  const schemaField = h("label", { class: "schema", hidden: true }, "Schema of the values (not needed for Avro files, which contain it)", schema);
  const tail = h("input", { type: "checkbox" });
  const list = h("div", {}), summary = h("p", { class: "quiet", role: "status" });
  if (query.has("partition")) partition.value = query.get("partition");
  from.value = query.get("from") || "";
  for (const [condition, element] of Object.entries(fields)) element.value = query.get(condition) || "";
  rememberSchema(name, schema);
  const sort = { title: STORED, falls: true };
  let pages = new Map(), rows = [], round = 0, isBackwards = true;

  const draw = () => list.replaceChildren(table([
    ["#Offset", (row) => (numbers.length > 1 ? `${row.partition} · ${count(row.offset)}` : count(row.offset)), "", (row) => row.offset],
    [STORED, (row) => time(row.stored_at_us), "wide", (row) => [row.stored_at_us, row.offset]],
    ["Key", (row) => h("span", { class: "value" }, short(row.key)), "key", (row) => (row.key ? short(row.key) : null)],
    ["Value", (row) => {
      const details = h("details", { class: "value", ontoggle: () => {
        if (details.open && details.children.length === 1) details.append(recordDetails(name, row, shape.value, schema.value));
      } }, h("summary", {}, short(row.value), deadHeader(row, "topic") === null ? null : h("span", { class: "tag" }, "dead letter")));
      return details;
    }, "", (row) => (row.value ? short(row.value) : null)],
  ], rows, "There are no records.", sort));

  // `step`: "first", "more" (older records if the newest were read first, otherwise later ones), or "live" (later ones)
  const load = async (step) => {
    const started = ++round;
    const chosen = partition.value === "" ? numbers : [Number(partition.value)];
    if (step === "first") isBackwards = isNewest(from.value.trim());
    const filter = conditions(fields), each = Math.max(1, Math.floor(PAGE / chosen.length));
    const startAt = (number) => {
      const before = step === "first" ? undefined : pages.get(number);
      if (!before) return startQuery(from.value.trim(), each);
      return isBackwards && step === "more" ? `tail=${each}&before=${before.begin_offset}` : "offset=" + before.next_offset;
    };
    summary.setAttribute("aria-busy", "true");
    const found = await Promise.all(chosen.map((number) => api(`${path("topics", name, "partitions", number, "records")}?limit=${PAGE}${filter}&${startAt(number)}`)));
    if (started !== round) return;  // a later request has replaced this one
    summary.removeAttribute("aria-busy");
    pages = new Map(found.map((now) => {
      const before = step === "first" ? now : pages.get(now.partition) || now;
      return [now.partition, { ...now, begin_offset: Math.min(before.begin_offset, now.begin_offset), next_offset: Math.max(before.next_offset, now.next_offset) }];
    }));
    const added = found.flatMap((now) => now.records);
    rows = step === "first" ? added : step === "more" && isBackwards ? [...rows, ...added] : [...added, ...rows];
    const isLong = rows.length > SHOWN_MAX;
    rows = step === "live" || !isLong ? rows.slice(0, SHOWN_MAX) : rows.slice(isBackwards ? -SHOWN_MAX : 0, isBackwards ? undefined : SHOWN_MAX);
    summary.textContent = summaryOf([...pages.values()].map((all) => ({ ...all, looked_at: found.find((now) => now.partition === all.partition).looked_at })), rows, filter !== "");
    if (step === "first" || added.length) draw();
  };
  const read = (event) => { event.preventDefault(); load("first").catch(showError); };
  shape.addEventListener("change", () => { schemaField.hidden = shape.value !== "avro"; draw(); });
  schema.addEventListener("change", draw);
  page.append(
    h("h1", {}, link(["topics", name], name), " · records"),
    h("form", { class: "tools", onsubmit: read }, field("Partition", partition), field("From", from), field("Search", fields.search), field("JSON field", fields.json), field("Key", fields.key), field("Values as", shape),
      h("label", { class: "check" }, tail, "live"), h("button", { class: "main" }, "Read"),
      h("button", { type: "button", onclick: () => load("more").catch(showError) }, "Load more"), schemaField),
    summary,
    h("details", { class: "above" }, h("summary", {}, "Download"), h("div", { class: "below" }, downloads(name, () => ({ rows, partition: partition.value, filter: conditions(fields) })))),
    list);
  if (numbers.length) {
    partition.addEventListener("change", read);
    await load("first");
    every(1, async () => { if (tail.checked) await load("live"); });
  }
}
