// Bytes as they are shown: the admin API tells them as text where they are, else in base64.
export function bytesOf(data) {
  if (data.text !== undefined) return new TextEncoder().encode(data.text);
  return Uint8Array.from(atob(data.base64), (letter) => letter.charCodeAt(0));
}

// The text that they are, or null.
export const textOf = (data) => (data.text === undefined ? null : data.text);

// A key or value of a header as a person reads it: numbers in digits.
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

// The beginning, for a cell.
export function short(data) {
  if (data === null) return "null";
  if (data.text !== undefined) return data.text.slice(0, 120);
  const bytes = bytesOf(data).slice(0, 12);
  return "0x" + [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("") + (data.bytes > 12 ? ` … ${data.bytes} bytes` : "");
}

// Where to read from, as a query: an offset, earliest, a time, or nothing for so many of the newest.
export function askedFor(text, newest) {
  if (text === "" || text === "newest" || text === "latest") return "tail=" + newest;
  if (/^\d+$/.test(text)) return "offset=" + text;
  return text === "earliest" ? "offset=0" : "time=" + encodeURIComponent(text);
}
