// SQL over topics: a statement, its result as a table or a chart, and the statements of before.
import { api, h } from "./frame.js";
import { POINTS_MAX, chart, numberOf } from "./chart.js";
import { count, path, save, table } from "./parts.js";

const PAGE = 100, HISTORY_MAX = 20, TOPICS_MAX = 200, OPEN_MAX = 20;
const HISTORY = "sql history";
const EXAMPLES = [
  ["Newest records", (topic) => `select partition, "offset", timestamp, key, value\nfrom ${topic}\norder by timestamp desc\nlimit 50`],
  ["Records per minute", (topic) => `select time_bucket(interval '1 minute', timestamp) as minute, count(*) as records\nfrom ${topic}\ngroup by minute\norder by minute`],
  ["Records per partition", (topic) => `select partition, count(*) as records, min("offset") as first_offset, max("offset") as last_offset\nfrom ${topic}\ngroup by partition\norder by partition`],
  ["Fields of JSON values", (topic) => `select decode(value)::json->>'id' as id, count(*) as records\nfrom ${topic}\ngroup by id\norder by records desc\nlimit 20`],
  ["Most frequent keys", (topic) => `select decode(key) as key, count(*) as records\nfrom ${topic}\ngroup by key\norder by records desc\nlimit 20`],
  ["Size of values", (topic) => `select count(*) as records, avg(octet_length(value)) as mean_bytes, max(octet_length(value)) as largest_bytes\nfrom ${topic}`],
  ["Columns", (topic) => `describe ${topic}`],
];

const RESERVED = new Set("all and any as asc both case cast check column create desc distinct do else end except false fetch for foreign from grant group having in initially intersect into lateral leading limit not null offset on only or order pivot primary references returning select show some symmetric table then to trailing true union unique unpivot using variadic when where window with describe summarize qualify".split(" "));

export const quoted = (name) => (/^[a-z_][a-z0-9_]*$/.test(name) && !RESERVED.has(name) ? name : '"' + name.replaceAll('"', '""') + '"');

function stored() {
  try { return JSON.parse(localStorage.getItem(HISTORY)) || []; } catch { return []; }
}
function store(statement) {
  const all = [statement, ...stored().filter((other) => other !== statement)].slice(0, HISTORY_MAX);
  try { localStorage.setItem(HISTORY, JSON.stringify(all)); } catch { /* without storage there is no history */ }
}

// A value of a cell as text. Bytes that are no text are hexadecimal, as DuckDB writes them.
function textOf(value) {
  if (value === null) return "NULL";
  if (typeof value !== "object") return String(value);
  return typeof value.hex === "string" && Object.keys(value).length === 1 ? "\\x" + value.hex : JSON.stringify(value);
}

function cell(value) {
  return h("span", { class: value === null ? "cell null" : "cell" }, textOf(value));
}

// Spreadsheets evaluate texts that begin like a formula: see downloads.py.
const harmless = (text) => /^'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/.test(text) && !/^[+-]\d+(\.\d+)?(e[+-]?\d+)?$/i.test(text) ? "'" + text : text;

function csv(found) {
  const field = (value) => {
    const text = value === null ? "" : harmless(textOf(value));
    return /[",\r\n]/.test(text) || value === "" ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  return [found.columns.map((column) => column.name), ...found.rows].map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
}

const NUMERIC = /^(U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT|DOUBLE|DECIMAL.*)$/;

function rowsView(found) {
  let at = 0;
  const list = h("div", {}), position = h("span", { class: "quiet", role: "status" });
  const columns = found.columns.map((column, index) => [
    (NUMERIC.test(column.type) ? "#" : "") + column.name, (row) => cell(row[index]), null, column.type]);
  const move = (to) => {
    at = to;
    list.replaceChildren(table(columns, found.rows.slice(at, at + PAGE), "The result has no rows."));
    list.querySelectorAll("th").forEach((head, index) => head.append(h("small", {}, found.columns[index].type)));
    position.textContent = `rows ${count(at + 1)} to ${count(Math.min(at + PAGE, found.rows.length))} of ${count(found.rows.length)}`;
    back.disabled = at === 0;
    next.disabled = at + PAGE >= found.rows.length;
  };
  const back = h("button", { type: "button", onclick: () => move(at - PAGE) }, "Previous");
  const next = h("button", { type: "button", onclick: () => move(at + PAGE) }, "Next");
  move(0);
  return [list, found.rows.length > PAGE ? h("p", { class: "tools below" }, back, next, position) : null];
}

function chartView(found) {
  const isNumber = found.columns.map((_, index) => found.rows.some((row) => numberOf(row[index]) !== null) && found.rows.every((row) => row[index] === null || numberOf(row[index]) !== null));
  const numbers = found.columns.map((_, index) => index).filter((index) => isNumber[index]);
  if (!numbers.length) return [h("p", { class: "empty" }, "A chart needs a column of numbers.")];
  const names = (indexes) => indexes.map((index) => h("option", { value: index }, found.columns[index].name));
  const y = h("select", {}, names(numbers)), x = h("select", {}, h("option", { value: "" }, "row number"), names(found.columns.map((_, index) => index)));
  const kind = h("select", {}, h("option", { value: "bar" }, "bars"), h("option", { value: "line" }, "line"));
  const label = found.columns.findIndex((_, index) => !isNumber[index]);
  x.value = label >= 0 ? label : found.columns.length > 1 ? 0 : "";
  y.value = numbers.filter((index) => String(index) !== x.value).pop() ?? numbers[0];
  if (found.rows.length > 60 || (label >= 0 && /^(TIME|DATE)/.test(found.columns[label].type))) kind.value = "line";
  const drawing = h("div", {}), note = h("p", { class: "quiet" });
  const draw = () => {
    const rows = found.rows.filter((row) => numberOf(row[y.value]) !== null);
    const points = rows.slice(0, POINTS_MAX).map((row, at) => [x.value === "" ? String(at + 1) : textOf(row[x.value]), numberOf(row[y.value])]);
    drawing.replaceChildren(chart(kind.value, points, found.columns[y.value].name, document.getElementById("main").clientWidth));
    note.textContent = rows.length > POINTS_MAX ? `The chart shows the first ${count(POINTS_MAX)} of ${count(rows.length)} rows.` : "";
  };
  for (const field of [x, y, kind]) field.addEventListener("change", draw);
  draw();
  const field = (text, element) => h("label", {}, text, element);
  return [h("form", { class: "tools", onsubmit: (event) => event.preventDefault() }, field("Chart", kind), field("Horizontal", x), field("Vertical", y)), drawing, note];
}

function result(found) {
  const shown = h("div", {});
  const views = [["Table", rowsView], ["Chart", chartView]];
  const buttons = views.map(([name, draw]) => h("button", { type: "button", "aria-pressed": "false", onclick: () => choose(name, draw) }, name));
  const choose = (name, draw) => {
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === name)));
    shown.replaceChildren(...draw(found).filter(Boolean));
  };
  const limit = { rows: `Only the first ${count(found.rows.length)} rows are shown: this is the limit of a result.`, bytes: `Only the first ${count(found.rows.length)} rows are shown: more would exceed the limit of 4 MiB.` }[found.limit];
  choose(...views[0]);
  return [
    h("p", { class: "tools" }, buttons, h("button", { type: "button", onclick: () => save("query.csv", new Blob([csv(found)], { type: "text/csv" })) }, "Save as CSV"),
      h("span", { class: "quiet result" }, `${count(found.rows.length)} ${found.rows.length === 1 ? "row" : "rows"} in ${found.seconds.toFixed(2)} s`)),
    limit ? h("p", { class: "message", role: "status" }, limit) : null,
    found.cut ? h("p", { class: "message" }, "Long values are cut at 64 KiB.") : null,
    shown];
}

export async function sql(page, _, query) {
  const statement = h("textarea", { class: "sql", spellcheck: "false", autocapitalize: "off", autocomplete: "off", rows: 7, placeholder: 'select * from topic limit 10' });
  const output = h("div", {}), status = h("span", { class: "quiet result", role: "status" });
  const run = h("button", { class: "main", title: "Ctrl+Enter" }, "Run"), cancel = h("button", { type: "button", disabled: true }, "Cancel");
  const history = h("div", {});
  let running = null;  // the id of the query that is running
  statement.value = query.get("q") || stored()[0] || "";

  const drawHistory = () => {
    const all = stored();
    const forget = h("button", { type: "button", onclick: () => { try { localStorage.removeItem(HISTORY); } catch { /* it is empty */ } drawHistory(); } }, "Forget all");
    history.replaceChildren(...(all.length ? [h("details", { class: "below" }, h("summary", {}, `Recent statements (${count(all.length)})`),
      h("ul", { class: "history" }, all.map((text) => h("li", {}, h("button", { type: "button", class: "text", onclick: () => { statement.value = text; statement.focus(); } }, text)))),
      forget)] : []));
  };
  const insert = (text) => {
    statement.setRangeText(text, statement.selectionStart, statement.selectionEnd, "end");
    statement.focus();
  };
  const stop = (options) => {
    const id = running;
    if (id !== null) api(path("sql", id), undefined, "DELETE", options).catch(() => { /* it has ended */ });
  };
  const submit = async () => {
    const text = statement.value.trim();
    if (!text || running !== null) return;
    const id = running = Date.now().toString(36) + Math.random().toString(36).slice(2), begun = performance.now();
    run.disabled = true;
    cancel.disabled = false;
    const tick = () => { status.textContent = `running for ${((performance.now() - begun) / 1000).toFixed(0)} s`; };
    const timer = setInterval(tick, 1000);
    tick();
    store(text);
    drawHistory();
    try {
      output.replaceChildren(...result(await api("/sql", { statement: text, id })).filter(Boolean));
    } catch (error) {
      output.replaceChildren(h("p", { class: "message bad", role: "alert" }, error.message));
    }
    clearInterval(timer);
    status.textContent = "";
    running = null;
    run.disabled = false;
    cancel.disabled = true;
  };
  cancel.addEventListener("click", () => { status.textContent = "cancelling"; stop(); });
  for (const event of ["hashchange", "pagehide"]) addEventListener(event, () => stop({ keepalive: true }), { once: true });
  statement.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); submit(); }
    if (event.key === "Escape" && running !== null) stop();
  });

  const found = await api("/topics");
  const names = found.topics.map((row) => row.name);
  const example = h("select", {}, h("option", { value: "" }, "choose …"), EXAMPLES.map(([name], at) => h("option", { value: at }, name)));
  const topic = h("select", {}, h("option", { value: "" }, names.length ? "choose …" : "there are none"), names.map((name) => h("option", { value: name }, name)));
  example.addEventListener("change", () => {
    if (example.value !== "") statement.value = EXAMPLES[example.value][1](quoted(topic.value || names[0] || "topic"));
    example.value = "";
    statement.focus();
  });
  const chips = names.slice(0, TOPICS_MAX).map((name) => h("button", { type: "button", class: "chip", title: `Insert ${name}`, onclick: () => insert(quoted(name)) }, name));
  const field = (label, element) => h("label", {}, label, element);
  drawHistory();
  page.append(
    h("h1", {}, "SQL"),
    h("form", { onsubmit: (event) => { event.preventDefault(); submit(); } },
      h("label", {}, "Statement: a SELECT of DuckDB over topics", statement),
      h("p", { class: "tools below" }, run, cancel, status, h("span", { class: "space" }), field("Topic of examples", topic), field("Example", example))),
    names.length ? h("details", { class: "topics", open: names.length <= OPEN_MAX }, h("summary", {}, `Topics (${count(names.length)}): click to insert a name`), h("p", { class: "tools below" }, chips)) : null,
    history, output);
}
