// The overview: the broker's activity, polled every two seconds.
import { api, every, h, offerBucket } from "./frame.js";
import { card, count, size, table } from "./parts.js";

const samples = [];  // the latest responses, from which rates are computed

function rate(values) {
  const most = Math.max(...values, 1);
  const step = 200 / Math.max(values.length - 1, 1);
  const points = values.map((value, at) => `${(at * step).toFixed(1)},${(38 - (34 * value) / most).toFixed(1)}`);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "rate");
  svg.setAttribute("viewBox", "0 0 200 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", points.length > 1 ? "M" + points.join("L") : "");
  svg.append(line);
  return svg;
}

function rates(counter) {
  const perSecond = [];
  for (let at = 1; at < samples.length; at += 1) {
    const seconds = (samples[at].at_us - samples[at - 1].at_us) / 1e6;
    perSecond.push(Math.max(0, (counter(samples[at]) - counter(samples[at - 1])) / seconds));
  }
  return perSecond;
}

function drawOverview(page) {
  const now = samples[samples.length - 1];
  const total = (name) => (sample) => Object.entries(sample.wires).reduce((sum, [wire, counters]) => (wire === "http" ? sum : sum + counters[name]), 0);
  const last = (values) => (values.length ? values[values.length - 1] : 0);
  const records = rates((sample) => sample.records), received = rates(total("received_bytes")), sent = rates(total("sent_bytes"));
  const unused = { connections: 0, received_bytes: 0, sent_bytes: 0 };
  const names = [...new Set([...Object.keys(now.listeners), ...Object.keys(now.wires)])].sort();
  const wires = names.map((name) => [name, now.wires[name] || unused]).map(([name, wire]) => {
    const rateOf = (counter) => last(rates((sample) => (sample.wires[name] || wire)[counter]));
    return { name, ...wire, received: rateOf("received_bytes"), sent: rateOf("sent_bytes") };
  });
  page.replaceChildren(
    h("h1", {}, "Overview"),
    ...(now.ready ? [] : [h("p", { class: "message bad", role: "alert" }, now.readiness)]),
    h("div", { class: "cards" },
      card("Records stored per second", count(Math.round(last(records))), rate(records)),
      card("Received per second", size(last(received)), rate(received)),
      card("Sent per second", size(last(sent)), rate(sent))),
    h("div", { class: "cards" },
      card("Topics", count(now.topics)), card("Partitions", count(now.partitions)), card("Records", count(now.records)),
      card("Stored", size(now.stored_bytes)), card("Connections rejected", count(now.refused))),
    h("h2", {}, "Protocols"),
    table([
      ["Protocol", (wire) => wire.name], ["Listener", (wire) => now.listeners[wire.name] || "–", "wide"], ["#Connections", (wire) => count(wire.connections)],
      ["#Received/s", (wire) => size(wire.received)], ["#Sent/s", (wire) => size(wire.sent)],
      ["#Received", (wire) => size(wire.received_bytes), "wide"], ["#Sent", (wire) => size(wire.sent_bytes), "wide"],
    ], wires, "There are no listeners."),
    h("p", { class: "quiet" }, `Polywire ${now.version}`));
}

export async function overview(page) {
  const poll = async () => {
    samples.push(await api("/overview"));
    if (samples.length > 90) samples.shift();
    offerBucket(samples[samples.length - 1]);
    drawOverview(page);
  };
  await poll();
  every(2, poll);
}
