// Charts as SVG: bars and lines of a result, and rates over time.
import { count, size } from "./parts.js";

export const POINTS_MAX = 500;
const WIDTH_MIN = 320, WIDTH_MAX = 1000, HEIGHT = 300, LEFT = 76, RIGHT = 12, TOP = 12, BOTTOM = 34;
const TICKS = 4, LABEL_WIDTH = 110, LABEL_CHARS = 14;
const TIME = /^\d{4}-\d\d-\d\d[ T]\d\d:\d\d/;

function s(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// A value of a cell as a number; null if it is none. Decimals and large integers are text in results.
export const numberOf = (value) => (value === null || typeof value === "boolean" || typeof value === "object" || value === "" || !Number.isFinite(Number(value)) ? null : Number(value));

// Of times, only the part in which they differ.
function labelsOf(points) {
  const labels = points.map(([label]) => label);
  if (!labels.every((label) => TIME.test(label))) return labels;
  return labels.every((label) => label.slice(0, 10) === labels[0].slice(0, 10)) ? labels.map((label) => label.slice(11, 19)) : labels.map((label) => label.slice(5, 16));
}

const short = (text) => (text.length > LABEL_CHARS ? text.slice(0, LABEL_CHARS - 1) + "…" : text);
const tickLabel = (value) => (Math.abs(value) >= 1e9 || (value && Math.abs(value) < 1e-3) ? value.toExponential(1) : value.toLocaleString("en", { maximumFractionDigits: 3 }));

// The smallest round step of which at most TICKS fit into a span.
function step(span) {
  const raw = span / TICKS, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((factor) => factor * power).find((found) => found >= raw * (1 - 1e-9));
}

// points: [label, number] in the order of the result. kind: "bar" or "line". space: width in pixels, so that text has its usual size.
export function chart(kind, points, title, space) {
  const wide = Math.min(WIDTH_MAX, Math.max(WIDTH_MIN, space)), labels = labelsOf(points);
  const values = points.map(([, value]) => value);
  let low = Math.min(...values), high = Math.max(...values);
  if (kind === "bar") { low = Math.min(low, 0); high = Math.max(high, 0); }
  if (low === high) { low -= 1; high += low < 0 && high === 0 ? 1 : 0.5; }
  const size = step(high - low), first = Math.floor(low / size), last = Math.ceil(high / size);
  const bottom = HEIGHT - BOTTOM, inner = wide - LEFT - RIGHT, width = inner / points.length;
  const y = (value) => bottom - ((value / size - first) / (last - first)) * (bottom - TOP);
  const x = (at) => LEFT + (at + 0.5) * width;
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${wide} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${count(points.length)} values from ${tickLabel(Math.min(...values))} to ${tickLabel(Math.max(...values))}` });
  for (let tick = first; tick <= last; tick += 1) {
    svg.append(s("line", { class: tick === 0 ? "zero" : "grid", x1: LEFT, x2: wide - RIGHT, y1: y(tick * size), y2: y(tick * size) }));
    svg.append(s("text", { x: LEFT - 8, y: y(tick * size) + 4, "text-anchor": "end" }, tickLabel(tick * size)));
  }
  const every = Math.ceil((points.length * LABEL_WIDTH) / inner);
  labels.forEach((label, at) => { if (at % every === 0) svg.append(s("text", { x: x(at), y: HEIGHT - 12, "text-anchor": "middle" }, short(label))); });
  if (kind === "bar") {
    points.forEach(([label, value], at) => {
      const bar = s("rect", { class: "bar", x: x(at) - width * 0.4, width: Math.max(width * 0.8, 0.5), y: Math.min(y(value), y(0)), height: Math.max(Math.abs(y(value) - y(0)), 0.5) });
      bar.append(s("title", {}, `${label}: ${value}`));
      svg.append(bar);
    });
    return svg;
  }
  svg.append(s("path", { class: "line", d: "M" + points.map(([, value], at) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join("L") }));
  if (points.length <= 100) {
    points.forEach(([label, value], at) => {
      const dot = s("circle", { class: "bar", cx: x(at), cy: y(value), r: 3 });
      dot.append(s("title", {}, `${label}: ${value}`));
      svg.append(dot);
    });
  }
  return svg;
}

// Rates over time

const RATE_HEIGHT = 150, RATE_LEFT = 64, RATE_BOTTOM = 24, RATE_TOP = 10, RATE_TICKS = 3, TIME_LABEL = 56;
const TIME_STEPS_S = [60, 120, 300, 600, 900, 1800];

// How values are written, and the unit in which the steps of the axis are round.
const SCALES = {
  count: { text: (value) => tickLabel(value), unit: () => 1 },
  bytes: { text: (value) => size(value), unit: (high) => 1024 ** Math.floor(Math.log(Math.max(high, 1)) / Math.log(1024)) },
};
const clock = (at, seconds) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(seconds ? { second: "2-digit" } : {}), hourCycle: "h23" });

// points: [time in seconds, value per second], in order. Gaps longer than `gap` seconds are not drawn. from, to: the time axis.
export function rateChart(points, { title, kind, from, to, gap, space }) {
  const wide = Math.min(WIDTH_MAX, Math.max(260, space)), { text, unit } = SCALES[kind];
  const high = Math.max(...points.map(([, value]) => value), 0);
  const factor = unit(high), span = Math.max(high / factor, kind === "count" ? 1 : 1 / factor);
  const raw = span / RATE_TICKS, power = 10 ** Math.floor(Math.log10(raw));
  const tick = [1, 2, 5, 10].map((by) => by * power).find((found) => found >= raw * (1 - 1e-9)) * factor;
  const top = Math.max(1, Math.ceil(high / tick - 1e-9)) * tick;
  const bottom = RATE_HEIGHT - RATE_BOTTOM, right = wide - RIGHT;
  const x = (at) => RATE_LEFT + ((at - from) / (to - from)) * (right - RATE_LEFT), y = (value) => bottom - (value / top) * (bottom - RATE_TOP);
  const svg = s("svg", { class: "chart rates", viewBox: `0 0 ${wide} ${RATE_HEIGHT}`, role: "img", "aria-label": `${title}, the last ${Math.round((to - from) / 60)} minutes: at most ${text(high)}` });
  for (let value = 0; value <= top * (1 + 1e-9); value += tick) {
    svg.append(s("line", { class: value === 0 ? "zero" : "grid", x1: RATE_LEFT, x2: right, y1: y(value), y2: y(value) }));
    svg.append(s("text", { x: RATE_LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, text(value)));
  }
  const every = TIME_STEPS_S.find((seconds) => ((to - from) / seconds) * TIME_LABEL <= right - RATE_LEFT) || 3600;
  const zone = new Date().getTimezoneOffset() * 60;  // labels are at full minutes of local time
  for (let at = Math.ceil((from - zone) / every) * every + zone; at <= to; at += every) {
    svg.append(s("line", { class: "grid", x1: x(at), x2: x(at), y1: RATE_TOP, y2: bottom }));
    if (x(at) > RATE_LEFT + 10 && x(at) < right - 14) svg.append(s("text", { x: x(at), y: RATE_HEIGHT - 7, "text-anchor": "middle" }, clock(at)));
  }
  let line = "", before = -Infinity;
  for (const [at, value] of points) {
    line += `${at - before > gap ? "M" : "L"}${x(at).toFixed(1)},${y(value).toFixed(1)}`;
    before = at;
  }
  svg.append(s("path", { class: "line", d: line }));
  for (const [at, value] of points) {  // wide invisible bars show a value on hover
    const area = s("rect", { class: "area", x: x(at) - 4, width: 8, y: RATE_TOP, height: bottom - RATE_TOP });
    area.append(s("title", {}, `${clock(at, true)}: ${text(value)}/s`));
    svg.append(area);
  }
  return svg;
}
