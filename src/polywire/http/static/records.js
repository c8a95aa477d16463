// The records of a partition: found, spelled, followed, and sent again.
import { api, every, h, tell } from "./console.js";
import { count, link, path, table, time } from "./parts.js";
import { produceForm } from "./topics.js";

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

export async function records(page, name) {
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
