// Settings of a topic or a queue: their values, and forms to change them.
import { api, h, show } from "./frame.js";
import { form, path, size, span, table } from "./parts.js";

const DAY_US = 86400e6;
const DURATIONS = { s: 1e6, min: 60e6, m: 60e6, h: 3600e6, d: DAY_US };
const SIZES = { B: 1, KIB: 1024, MIB: 1024 ** 2, GIB: 1024 ** 3, TIB: 1024 ** 4 };
const SOURCES = { topic: "this topic", group: "group", broker: "the broker's configuration", default: "default" };
const HINTS = { retention_age_us: "such as 7 d or 12 h; 0 for no limit", retention_bytes: "such as 10 GiB; 0 for no limit" };

// A value for people: retention has units.
function shown(name, value) {
  if (value === null || value === "") return "–";
  if (typeof value === "boolean") return value ? "on" : "off";
  if (name === "retention_age_us") return value ? span(value / 1e6) : "no limit";
  if (name === "retention_bytes") return value ? size(value) : "no limit";
  if (name.endsWith("_s")) return span(value);
  if (name.endsWith(".ms")) return span(value / 1000);
  return String(value);
}

// The text for an input, without loss of precision.
function exact(name, value) {
  const units = name === "retention_age_us" ? [["d", DAY_US], ["h", 3600e6], ["min", 60e6], ["s", 1e6]] : name === "retention_bytes" ? [["GiB", 1024 ** 3], ["MiB", 1024 ** 2], ["KiB", 1024]] : [];
  const unit = value ? units.find(([, factor]) => value % factor === 0) : null;
  return unit ? `${value / unit[1]} ${unit[0]}` : String(value);
}

// The number or text that a user typed; numbers may have a unit.
function parsed(name, text) {
  const units = name === "retention_age_us" ? DURATIONS : name === "retention_bytes" ? SIZES : null;
  const found = /^(\d+(?:\.\d+)?)\s*([a-z]*)$/i.exec(text);
  if (!found) return text;
  if (!found[2] || !units) return found[2] ? text : Number(text);
  const factor = units[name === "retention_bytes" ? found[2].toUpperCase().replace(/^([KMGT])B?$/, "$1IB") : found[2].toLowerCase()];
  if (!factor) throw new Error(`unknown unit: ${found[2]} (use ${Object.keys(units).join(", ")})`);
  return Math.round(Number(found[1]) * factor);
}

const DEFAULT = "";  // of a select or an input: the topic has no own value
const isOwn = (row) => row.source === "topic" || row.source === "group";
const isText = (row) => row.allowed === "text" || typeof row.default === "string";
const optionText = (choice) => (typeof choice === "boolean" ? (choice ? "on" : "off") : choice);

function field(row) {
  const own = isOwn(row) ? row.value : null;
  if (row.choices) {
    const select = h("select", {}, h("option", { value: DEFAULT }, `default (${shown(row.name, row.default)})`), row.choices.map((choice) => h("option", { value: JSON.stringify(choice) }, optionText(choice))));
    select.value = own === null ? DEFAULT : JSON.stringify(own);
    return select;
  }
  return h("input", { value: own === null ? DEFAULT : exact(row.name, own), placeholder: `default (${shown(row.name, row.default)})`, title: HINTS[row.name] || row.allowed, autocomplete: "off" });
}

const valueOf = (row, text) => (text.trim() === DEFAULT ? null : row.choices ? JSON.parse(text) : isText(row) ? text : parsed(row.name, text.trim()));

// Fields for a form, by the name of the setting.
const fieldsOf = (rows) => Object.fromEntries(rows.map((row) => [row.name, [row.name, field(row)]]));

// `at` is where changes are sent; null if the user may not make any.
export function settingsPanel(rows, at) {
  const changeable = rows.filter((row) => !row.is_fixed);
  const fields = fieldsOf(changeable);
  const before = Object.fromEntries(changeable.map((row) => [row.name, fields[row.name][1].value]));
  const save = async (values) => {
    const changed = changeable.filter((row) => values[row.name] !== before[row.name]);
    if (!changed.length) return "nothing has changed";
    await api(at, Object.fromEntries(changed.map((row) => [row.name, valueOf(row, values[row.name])])));
    setTimeout(show, 300);
    return "saved";
  };
  return [
    h("h2", {}, "Settings"),
    table([
      ["Setting", (row) => h("span", { class: "value", title: row.meaning }, row.name), "whole"], ["Value", (row) => h("span", { class: isOwn(row) ? "own" : null }, shown(row.name, row.value)), "key"],
      ["Default", (row) => h("span", { class: "quiet" }, shown(row.name, row.default)), "wide"], ["Set by", (row) => h("span", { class: "quiet" }, SOURCES[row.source])],
      ["Meaning", (row) => h("span", { class: "quiet" }, row.meaning), "wide"],
    ], rows, ""),
    at ? h("details", { class: "below" }, h("summary", {}, "Change settings"), h("div", { class: "below" }, form(fields, "Save settings", save))) : null,
  ];
}

// The form that creates a topic; the broker chooses what is empty.
export function createForm() {
  const retention = (name) => h("input", { placeholder: "the broker's setting", title: HINTS[name], size: 14, autocomplete: "off" });
  const fields = {
    name: ["Name", h("input", { required: true, autocomplete: "off", size: 20 })],
    partitions: ["Partitions", h("input", { type: "number", min: 1, placeholder: "default", size: 8 })],
    retention_age_us: ["Retain for", retention("retention_age_us")],
    retention_bytes: ["Retain per partition", retention("retention_bytes")],
    compaction: ["Compaction", h("select", {}, h("option", { value: "" }, "off"), h("option", { value: "true" }, "by key"))],
  };
  return form(fields, "Create topic", async (values) => {
    const body = {};
    if (values.partitions) body.partitions = Number(values.partitions);
    for (const name of ["retention_age_us", "retention_bytes"]) if (values[name].trim()) body[name] = parsed(name, values[name].trim());
    if (values.compaction) body.compaction = true;
    await api(path("topics", values.name.trim()), body);
    location.hash = path("topics", values.name.trim());
  });
}
