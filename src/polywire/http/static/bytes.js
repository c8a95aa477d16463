// Bytes for display: the admin API returns them as text if they are UTF-8, else in base64.
export function bytesOf(data) {
  if (data.text !== undefined) return new TextEncoder().encode(data.text);
  return Uint8Array.from(atob(data.base64), (letter) => letter.charCodeAt(0));
}

// The text, or null if the bytes are not UTF-8.
export const textOf = (data) => (data.text === undefined ? null : data.text);

// A key or value of a header for display; numeric ones as digits.
export const partOf = (data) => (data === null ? "null" : data.number ?? textOf(data) ?? short(data));

export function hex(bytes) {
  const lines = [];
  for (let at = 0; at < bytes.length; at += 16) {
    const part = [...bytes.slice(at, at + 16)];
    const numbers = part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(47);
    lines.push(`${at.toString(16).padStart(6, "0")}  ${numbers}  ${part.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : ".")).join("")}`);
  }
  return lines.join("\n");
}

// The first characters or bytes, for a table cell.
export function short(data) {
  if (data === null) return "null";
  if (data.text !== undefined) return data.text.slice(0, 120);
  const bytes = bytesOf(data).slice(0, 12);
  return "0x" + [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("") + (data.bytes > 12 ? ` … ${data.bytes} bytes` : "");
}

// A time without a zone is local time, as everywhere in the console.
export function instant(text) {
  if (/(Z|[+-]\d\d:?\d\d)$/i.test(text)) return text;
  const at = new Date(/^\d{4}-\d\d-\d\d$/.test(text) ? text + "T00:00" : text);
  return Number.isNaN(at.getTime()) ? text : at.toISOString();
}

export const isNewest = (text) => text === "" || text === "newest" || text === "latest";

// The query for a start position: an offset, earliest, a time, or the newest records if the text is empty.
export function startQuery(text, newest) {
  if (isNewest(text)) return "tail=" + newest;
  if (/^\d+$/.test(text)) return "offset=" + text;
  return text === "earliest" ? "offset=0" : "time=" + encodeURIComponent(instant(text));
}
