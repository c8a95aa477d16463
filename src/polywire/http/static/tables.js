// The table of a topic: its state, how to read it, and its settings.
import { api, every, h, show } from "./frame.js";
import { card, count, form, path, size, span, time } from "./parts.js";
import { quoted } from "./sql.js";

const FORMATS = [["none", "off"], ["delta", "Delta"], ["delta,iceberg", "Delta and Iceberg"]];
const FRESHNESS_MAX = 86400;
const LATE = 2;  // a table that is older than this many times its freshness is late
const LATE_S = 10;
const POLL_S = 2;

const isWritten = (found) => found.version >= 0;
const isLate = (found) => found.age_s > LATE * found.freshness_s + LATE_S;

// The state in one line, for lists.
export function tableSummary(found) {
  if (!found) return "–";
  const name = found.formats.replace(",", ", ");
  if (found.error) return h("span", { class: "bad", title: found.error }, `${name}: cannot be written`);
  if (found.version === undefined || !isWritten(found)) return `${name}: not written yet`;
  const late = isLate(found);
  return h("span", { class: late ? "bad" : null, title: `${count(found.behind)} records behind` },
    found.behind || late ? `${name}: ${span(found.age_s)} behind` : `${name}: up to date`);
}

export const tableWords = (found) => (!found ? "" : `table ${found.formats} ${found.error ? "error" : isWritten(found) && isLate(found) ? "behind late" : ""}`);

function copyButton(text) {
  const button = h("button", { type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch { button.textContent = "Select and copy"; }  // browsers allow it over TLS and on localhost only
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  } }, "Copy");
  return button;
}

function copied(label, text) {
  return h("div", { class: "copied" }, h("span", { class: "quiet" }, label), h("code", {}, text), copyButton(() => text));
}

// Quotes for the shell, SQL and Python, for paths with unusual characters.
const shell = (text) => (/["$`\\!]/.test(text) ? `'${text.replaceAll("'", "'\\''")}'` : `"${text}"`);
const literal = (text) => `'${text.replaceAll("'", "''")}'`;
const python = (text) => JSON.stringify(text);

function readers(name, found) {
  const at = found.url.startsWith("file:") ? decodeURIComponent(new URL(found.url).pathname) : found.url;
  const [stream, topic] = name.includes(".") ? [name.slice(0, name.indexOf(".")), name.slice(name.indexOf(".") + 1)] : ["default", name];
  const catalog = `load_catalog("polywire", type="rest", uri=${python(location.origin + "/iceberg")})`;
  return [
    copied("Files", at),
    h("details", { class: "below" }, h("summary", {}, "Read the table"),
      copied("Polywire, with the newest records", `polywire sql ${shell(`select count(*) from ${quoted(name)}`)}`),
      copied("DuckDB", `duckdb -c ${shell(`from delta_scan(${literal(at)}) limit 10`)}`),
      copied("Polars", `polars.scan_delta(${python(at)}).head(10).collect()`),
      copied("Spark", `spark.read.format("delta").load(${python(at)}).show()`),
      copied("Spark, with the newest records", `polywire.spark.table(spark, ${python(name)}).show()`),
      found.formats.includes("iceberg")
        ? copied("pyiceberg", `${catalog}.load_table((${python(stream)}, ${python(topic)})).scan(limit=10).to_arrow()`) : null),
  ];
}

function rejected(name, found) {
  if (!found.rejected) return [];
  const statement = `select partition, "offset", _error, value from ${quoted(name)} where _error is not null limit 100`;
  return [h("p", { class: "message bad" }, `${count(found.rejected)} rows do not fit the typed columns. ${found.rejected_sample} `,
    h("a", { href: "#/sql?q=" + encodeURIComponent(statement) }, "List them"))];
}

function state(name, found) {
  const written = found.version !== undefined && isWritten(found);
  const late = written && isLate(found);
  const known = (text) => (written ? text() : "–");
  return [
    found.error ? h("p", { class: "message bad", role: "alert" }, `The table cannot be written: ${found.error}. The broker tries again, and the records are safe in the log.`) : null,
    ...rejected(name, found),
    found.notes ? h("p", { class: "message" }, `Typed columns: ${found.notes}.`) : null,
    h("div", { class: "cards" },
      card("Format", found.formats.replace(",", ", ")),
      card("Freshness", span(found.freshness_s)),
      h("div", { class: late ? "card late" : "card" }, h("span", {}, "Behind by"), h("b", {}, known(() => (found.complete_ms ? span(found.age_s) : "–")))),
      card("Records behind", known(() => count(found.behind))),
      card("Rows", known(() => count(found.rows))), found.columns ? card("Typed columns", count(found.columns)) : null, card("Files", known(() => count(found.files))), card("Size", known(() => size(found.size))),
      card("Version", known(() => count(found.version))),
      card("Last commit took", known(() => (found.commit_s < 1 ? `${Math.round(found.commit_s * 1000)} ms` : `${found.commit_s.toFixed(1)} s`))),
      card("Skipped records", known(() => count(found.skipped)))),
    h("p", { class: "quiet" }, ...(written ? ["The last commit was at ", time(found.committed_ms * 1000), "."] : ["The table was not written yet."])),
    found.skipped ? h("p", { class: "quiet" }, "Retention removed the skipped records before they were written.") : null,
  ].filter(Boolean);
}

function settingsForm(name, topic) {
  const settings = topic.settings;
  const formats = h("select", {}, h("option", { value: "" }, "the broker's setting"), FORMATS.map(([value, word]) => h("option", { value }, word)));
  const freshness = h("input", { type: "number", min: 1, max: FRESHNESS_MAX, placeholder: "the broker's setting", value: settings.table_freshness_s });
  formats.value = settings.table ?? "";
  return form({ table: ["Table", formats], freshness: ["Freshness in seconds", freshness] }, "Save", async (values) => {
    await api(path("topics", name, "settings"), { table: values.table || null, table_freshness_s: values.freshness ? Number(values.freshness) : null });
    setTimeout(show, 500);
    return "saved";
  });
}

// The panel of a topic's page; nothing if the broker has no tables.
export function tablePanel(name, topic) {
  const found = topic.table;
  if (!found && !(topic.has_tables && topic.can_alter)) return [];
  const change = topic.can_alter ? h("details", { class: "below" }, h("summary", {}, "Change"), h("div", { class: "below" }, settingsForm(name, topic))) : null;
  if (!found) return [h("h2", {}, "Table"), h("p", { class: "quiet" }, "The records of this topic are not written to a table."), change];
  const current = h("div", {}, state(name, found));
  every(POLL_S, async () => {
    const { table } = await api(path("topics", name));
    if (table) current.replaceChildren(...state(name, table));
  });
  const files = found.url ? readers(name, found) : [h("p", { class: "quiet" }, "The path of the table is shown on the broker's machine, to users who may consume the topic.")];
  return [h("h2", {}, "Table"), current, ...files, change].filter(Boolean);
}
