// The overview: what the broker does now, asked for again and again.
import { api, every, h, offerBucket } from "./frame.js";
import { card, count, size, table } from "./parts.js";

const kept = [];  // what was seen, to make rates of

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

function rates(of) {
  const found = [];
  for (let at = 1; at < kept.length; at += 1) {
    const seconds = (kept[at].at_us - kept[at - 1].at_us) / 1e6;
    found.push(Math.max(0, (of(kept[at]) - of(kept[at - 1])) / seconds));
  }
  return found;
}

function drawOverview(page) {
  const now = kept[kept.length - 1];
  const moved = (name) => (seen) => Object.entries(seen.wires).reduce((sum, [wire, found]) => (wire === "http" ? sum : sum + found[name]), 0);
  const last = (values) => (values.length ? values[values.length - 1] : 0);
  const records = rates((seen) => seen.records), received = rates(moved("received_bytes")), sent = rates(moved("sent_bytes"));
  const silent = { connections: 0, received_bytes: 0, sent_bytes: 0 };
  const names = [...new Set([...Object.keys(now.listeners), ...Object.keys(now.wires)])].sort();
  const wires = names.map((name) => [name, now.wires[name] || silent]).map(([name, wire]) => {
    const of = (what) => last(rates((seen) => (seen.wires[name] || wire)[what]));
    return { name, ...wire, received: of("received_bytes"), sent: of("sent_bytes") };
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
      card("Stored", size(now.stored_bytes)), card("Connections turned away", count(now.refused))),
    h("h2", {}, "Wires"),
    table([
      ["Wire", (wire) => wire.name], ["Listens", (wire) => now.listeners[wire.name] || "–", "wide"], ["#Connections", (wire) => count(wire.connections)],
      ["#Received/s", (wire) => size(wire.received)], ["#Sent/s", (wire) => size(wire.sent)],
      ["#Received", (wire) => size(wire.received_bytes), "wide"], ["#Sent", (wire) => size(wire.sent_bytes), "wide"],
    ], wires, "Nothing is listened to."),
    h("p", { class: "quiet" }, `Polywire ${now.version}`));
}

export async function overview(page) {
  const look = async () => {
    kept.push(await api("/overview"));
    if (kept.length > 90) kept.shift();
    offerBucket(kept[kept.length - 1]);
    drawOverview(page);
  };
  await look();
  every(2, look);
}
