// The overview: the broker's activity in the last hour, and its protocols.
import { rateChart } from "./chart.js";
import { api, every, h, offerBucket } from "./frame.js";
import { card, count, link, size, table } from "./parts.js";

const POLL_S = 2, HISTORY_POLL_S = 10, HOUR_S = 3600;
const LIVE_MAX = 30;  // responses from which the present rates are computed; the broker has the older ones
const samples = [];
let history = { interval_s: 10, samples: [] };

function rates(counter) {
  const perSecond = [];
  for (let at = 1; at < samples.length; at += 1) {
    const seconds = (samples[at].at_us - samples[at - 1].at_us) / 1e6;
    perSecond.push([samples[at].at_us / 1e6, Math.max(0, (counter(samples[at]) - counter(samples[at - 1])) / seconds)]);
  }
  return perSecond;
}

// Rates of the last hour: those that the broker remembers, and newer ones that this page has computed.
function hourOf(name, live) {
  const known = history.samples.map((sample) => [sample.number * history.interval_s, sample[name]]);
  const last = known.length ? known[known.length - 1][0] : 0;
  return [...known, ...live.filter(([at]) => at > last)];
}

const CHARTS = [
  { name: "records", title: "Records stored per second", kind: "count", text: (value) => count(Math.round(value)) },
  { name: "received_bytes", title: "Received per second", kind: "bytes", text: size },
  { name: "sent_bytes", title: "Sent per second", kind: "bytes", text: size },
];

function charts(page, now) {
  const total = (name) => (sample) => Object.entries(sample.wires).reduce((sum, [wire, counters]) => (wire === "http" ? sum : sum + counters[name]), 0);
  const to = now.at_us / 1e6, space = Math.min(page.clientWidth || document.getElementById("main").clientWidth - 48, 1200);
  const columns = space > 900 ? 3 : 1, wide = space / columns - 48;
  return h("div", { class: "charts" }, CHARTS.map(({ name, title, kind, text }) => {
    const live = rates(name === "records" ? (sample) => sample.records : total(name));
    const last = live.length ? live[live.length - 1][1] : 0;
    return h("div", { class: "card" }, h("span", {}, title), h("b", {}, text(last)),
      rateChart(hourOf(name, live), { title, kind, from: to - HOUR_S, to, gap: 3 * history.interval_s, space: wide }));
  }));
}

const protocolOf = (listener) => listener.replace(/-tls$/, "");

// The addresses of a protocol, which can have a listener with TLS and one without.
function addresses(protocol, listeners) {
  const own = Object.entries(listeners).filter(([name]) => protocolOf(name) === protocol);
  return own.map(([name, address]) => (name === protocol ? address : `${address} (TLS)`)).join(", ");
}

const LINKS_SHOWN_MAX = 5;

// A message about links that fail, which leads to their pages.
function failing(names) {
  if (!names.length) return [];
  const shown = names.slice(0, LINKS_SHOWN_MAX).flatMap((name, at) => [at ? ", " : "", link(["links", name], name)]);
  const more = names.length > LINKS_SHOWN_MAX ? `, and ${count(names.length - LINKS_SHOWN_MAX)} more` : "";
  return [h("p", { class: "message bad", role: "alert" }, "Links that fail: ", shown, more)];
}

function drawOverview(page) {
  const now = samples[samples.length - 1];
  const last = (values) => (values.length ? values[values.length - 1][1] : 0);
  const unused = { connections: 0, received_bytes: 0, sent_bytes: 0 };
  const names = [...new Set([...Object.keys(now.listeners).map(protocolOf), ...Object.keys(now.wires)])].sort();
  const wires = names.map((name) => [name, now.wires[name] || unused]).map(([name, wire]) => {
    const rateOf = (counter) => last(rates((sample) => (sample.wires[name] || wire)[counter]));
    return { name, ...wire, received: rateOf("received_bytes"), sent: rateOf("sent_bytes") };
  });
  page.replaceChildren(
    h("h1", {}, "Overview"),
    ...(now.ready ? [] : [h("p", { class: "message bad", role: "alert" }, now.readiness)]),
    ...failing(now.failing_links),
    charts(page, now),
    h("div", { class: "cards" },
      card("Topics", count(now.topics)), card("Partitions", count(now.partitions)), card("Records", count(now.records)),
      card("Stored", size(now.stored_bytes)), card("Connections rejected", count(now.refused))),
    h("h2", {}, "Protocols"),
    table([
      ["Protocol", (wire) => wire.name], ["Listener", (wire) => addresses(wire.name, now.listeners) || "–", "wide"], ["#Connections", (wire) => count(wire.connections)],
      ["#Received/s", (wire) => size(wire.received)], ["#Sent/s", (wire) => size(wire.sent)],
      ["#Received", (wire) => size(wire.received_bytes), "wide"], ["#Sent", (wire) => size(wire.sent_bytes), "wide"],
    ], wires, "There are no listeners."),
    h("p", { class: "quiet" }, `Charts show the last hour; traffic of this console is not in them. Polywire ${now.version}`));
}

export async function overview(page) {
  const poll = async () => {
    samples.push(await api("/overview"));
    if (samples.length > LIVE_MAX) samples.shift();
    offerBucket(samples[samples.length - 1]);
    drawOverview(page);
  };
  const remember = async () => { history = await api("/history"); };
  await remember();
  await poll();
  every(POLL_S, poll);
  every(HISTORY_POLL_S, remember);
}
