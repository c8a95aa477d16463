// Building blocks of pages: formatted numbers, sizes and times, tables, cards and forms.
import { h } from "./frame.js";

export const path = (...parts) => "/" + parts.map(encodeURIComponent).join("/");
export const link = (parts, text) => h("a", { href: "#" + path(...parts) }, text);
export const count = (number) => number.toLocaleString("en");
const two = (number, digits = 2) => String(number).padStart(digits, "0");

// Local time of the browser; the tooltip has UTC.
export function time(us) {
  if (!us) return "–";
  const at = new Date(us / 1000);
  if (Number.isNaN(at.getTime())) return String(us);
  const utc = at.toISOString();
  const local = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}.${two(at.getMilliseconds(), 3)}`;
  return h("time", { datetime: utc, title: utc.replace("T", " ").replace("Z", " UTC") }, local);
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return (unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)) + " " + units[unit];
}

export function span(seconds) {
  if (seconds < 1) return seconds ? "< 1 s" : "0 s";
  if (seconds < 120) return Math.round(seconds) + " s";
  if (seconds < 7200) return Math.round(seconds / 60) + " min";
  return seconds < 172800 ? Math.round(seconds / 3600) + " h" : Math.round(seconds / 86400) + " d";
}

const compare = (a, b) => (Array.isArray(a) ? compare(a[0], b[0]) || compare(a[1], b[1]) : a === null || b === null ? (a === null) - (b === null) : typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);

// columns: [title, function from row to cell, class, function from row to the value to sort by]; a title that begins with # is
// a numeric column. `sort` remembers the chosen order for a table that is drawn again.
export function table(columns, rows, emptyText, sort = {}) {
  if (!rows.length) return h("div", { class: "table" }, h("p", { class: "empty" }, emptyText));
  const classes = columns.map(([title, , more]) => [title.startsWith("#") ? "number" : "", more || ""].join(" ").trim() || null);
  const body = h("tbody", {}), head = h("tr", {});
  const choose = (title) => {
    sort.falls = sort.title === title ? !sort.falls : title.startsWith("#");
    sort.title = title;
    draw();
    head.querySelector("[aria-sort] button").focus();
  };
  const draw = () => {
    const key = (columns.find(([title, , , value]) => value && title === sort.title) || [])[3];
    const sorted = key ? [...rows].sort((a, b) => (sort.falls ? -compare(key(a), key(b)) : compare(key(a), key(b)))) : rows;
    head.replaceChildren(...columns.map(([title, , , value], at) => {
      const text = title.replace("#", ""), on = key && title === sort.title;
      return h("th", { scope: "col", class: classes[at], "aria-sort": on ? (sort.falls ? "descending" : "ascending") : null },
        value ? h("button", { type: "button", class: "sort", onclick: () => choose(title) }, text, on ? (sort.falls ? " ↓" : " ↑") : "") : text);
    }));
    body.replaceChildren(...sorted.map((row) => h("tr", {}, columns.map(([, cell], at) => h("td", { class: classes[at] }, cell(row))))));
  };
  draw();
  return h("div", { class: "table" }, h("table", {}, h("thead", {}, head), body));
}

export const card = (title, value, ...more) => h("div", { class: "card" }, h("span", {}, title), h("b", {}, value), ...more);

// A table with a search field; `words` returns the text of a row that is searched.
export function filtered(rows, words, draw) {
  const results = h("div", {});
  const input = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter", oninput: () => {
    const query = input.value.toLowerCase();
    results.replaceChildren(draw(rows.filter((row) => words(row).toLowerCase().includes(query))));
  } });
  results.replaceChildren(draw(rows));
  return [h("form", { class: "tools", onsubmit: (event) => event.preventDefault() }, input), results];
}

export const truncated = (found) => (found.more ? [h("p", { class: "quiet" }, "The list is incomplete: there are more entries.")] : []);

// A form of labelled fields, {name: [label, element]}. `work` gets their values; its result is shown next to the button.
export function form(labels, button, work) {
  const result = h("p", { role: "status", class: "quiet result" });
  const labelled = Object.values(labels).map(([label, element]) => h("label", {}, label, element));
  const submit = h("button", {}, button);
  const element = h("form", { class: "tools", onsubmit: async (event) => {
    event.preventDefault();
    submit.disabled = true;
    const values = Object.fromEntries(Object.entries(labels).map(([name, [, field]]) => [name, field.value]));
    try {
      result.replaceChildren(await work(values) || "");
      result.classList.remove("bad");
    } catch (error) {
      result.textContent = error.message;
      result.classList.add("bad");
    } finally {
      submit.disabled = false;
    }
  } }, labelled, submit, result);
  return element;
}

// A button that must be clicked twice, for actions that cannot be undone.
export function dangerous(label, confirmation, work) {
  const button = h("button", { type: "button", class: "danger", onclick: () => {
    if (button.textContent === confirmation) { work(); return; }
    button.textContent = confirmation;
    setTimeout(() => { button.textContent = label; }, 5000);
  } }, label);
  return button;
}

// Saves a file that the browser has.
export function save(name, blob) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}
