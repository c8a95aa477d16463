// Building blocks of pages: formatted numbers, sizes and times, tables, cards and forms.
import { h } from "./frame.js";

export const path = (...parts) => "/" + parts.map(encodeURIComponent).join("/");
export const link = (parts, text) => h("a", { href: "#" + path(...parts) }, text);
export const count = (number) => number.toLocaleString("en");
export const time = (us) => (us ? new Date(us / 1000).toISOString().replace("T", " ").replace("Z", "") : "–");

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

// columns: [title, function from row to cell, class]; a title that begins with # is a numeric column.
export function table(columns, rows, emptyText) {
  if (!rows.length) return h("div", { class: "table" }, h("p", { class: "empty" }, emptyText));
  const classes = columns.map(([title, , more]) => [title.startsWith("#") ? "number" : "", more || ""].join(" ").trim() || null);
  const head = h("tr", {}, columns.map(([title], at) => h("th", { scope: "col", class: classes[at] }, title.replace("#", ""))));
  const body = rows.map((row) => h("tr", {}, columns.map(([, cell], at) => h("td", { class: classes[at] }, cell(row)))));
  return h("div", { class: "table" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
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
  const element = h("form", { class: "tools", onsubmit: async (event) => {
    event.preventDefault();
    const values = Object.fromEntries(Object.entries(labels).map(([name, [, field]]) => [name, field.value]));
    try {
      result.replaceChildren(await work(values) || "");
      result.classList.remove("bad");
    } catch (error) {
      result.textContent = error.message;
      result.classList.add("bad");
    }
  } }, labelled, h("button", {}, button), result);
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
