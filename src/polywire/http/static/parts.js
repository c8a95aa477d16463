// What pages are made of: numbers, sizes and times as they are shown, tables, cards and forms.
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

// columns: [title, cell of a row, class]; a title that begins with # is a column of numbers.
export function table(columns, rows, none) {
  if (!rows.length) return h("div", { class: "table" }, h("p", { class: "empty" }, none));
  const classes = columns.map(([title, , more]) => [title.startsWith("#") ? "number" : "", more || ""].join(" ").trim() || null);
  const head = h("tr", {}, columns.map(([title], at) => h("th", { scope: "col", class: classes[at] }, title.replace("#", ""))));
  const body = rows.map((row) => h("tr", {}, columns.map(([, cell], at) => h("td", { class: classes[at] }, cell(row)))));
  return h("div", { class: "table" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

export const card = (title, value, ...more) => h("div", { class: "card" }, h("span", {}, title), h("b", {}, value), ...more);

export function filtered(rows, words, draw) {
  const place = h("div", {});
  const input = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter", oninput: () => {
    const wanted = input.value.toLowerCase();
    place.replaceChildren(draw(rows.filter((row) => words(row).toLowerCase().includes(wanted))));
  } });
  place.replaceChildren(draw(rows));
  return [h("form", { class: "tools", onsubmit: (event) => event.preventDefault() }, input), place];
}

export const left = (found) => (found.more ? [h("p", { class: "quiet" }, "There are more than are shown.")] : []);

// A form of labelled fields, {name: element}; work gets their values, and what it returns is told beside it.
export function form(labels, button, work) {
  const told = h("p", { role: "status", class: "quiet told" });
  const labelled = Object.values(labels).map(([label, element]) => h("label", {}, label, element));
  const element = h("form", { class: "tools", onsubmit: async (event) => {
    event.preventDefault();
    const values = Object.fromEntries(Object.entries(labels).map(([name, [, field]]) => [name, field.value]));
    try {
      told.replaceChildren(await work(values) || "");
      told.classList.remove("bad");
    } catch (error) {
      told.textContent = error.message;
      told.classList.add("bad");
    }
  } }, labelled, h("button", {}, button), told);
  return element;
}

// What cannot be taken back asks once more.
export function dangerous(label, again, work) {
  const button = h("button", { type: "button", class: "danger", onclick: () => {
    if (button.textContent === again) { work(); return; }
    button.textContent = again;
    setTimeout(() => { button.textContent = label; }, 5000);
  } }, label);
  return button;
}
