// The bucket that stores the log: its leader, data not uploaded yet, and requests with their cost.
import { api, every, h, offerBucket } from "./frame.js";
import { card, count, size, span, table } from "./parts.js";

const samples = [];  // the latest responses, from which rates are computed
const MONTH_S = 30 * 86400;

const ms = (seconds) => (seconds < 0.01 ? (seconds * 1000).toFixed(1) : count(Math.round(seconds * 1000))) + " ms";
const money = (cost) => cost.toLocaleString("en", cost < 1 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 2 });

// Increase of a counter since the first sample. `key` identifies a row across samples.
function increase(rows, row, key, counter) {
  const before = samples[0].bucket ? rows(samples[0].bucket).find((other) => key(other) === key(row)) : null;
  return Math.max(0, row[counter] - (before ? before[counter] : samples.length > 1 ? 0 : row[counter]));
}

function drawRequests(bucket, seconds) {
  const key = (row) => row.verb + " " + row.outcome;
  const of = (row, counter) => increase((sample) => sample.requests, row, key, counter);
  return table([
    ["Request", (row) => row.verb, "whole"],
    ["Outcome", (row) => h("span", { class: row.outcome === "failed" ? "bad" : null }, row.outcome), "whole"],
    ["#Per second", (row) => (of(row, "requests") / seconds).toFixed(1)],
    ["#Mean", (row) => (of(row, "requests") ? ms(of(row, "seconds") / of(row, "requests")) : "–")],
    ["#p99", (row) => (row.p99_s === null ? "> 10 s" : ms(row.p99_s)), "wide"], ["#Requests", (row) => count(row.requests), "wide"],
  ], bucket.requests, "There were no requests.");
}

function drawCharges(bucket, seconds) {
  const perSecond = (row) => increase((sample) => sample.charges, row, (other) => other.kind, "requests") / seconds;
  const priced = bucket.charges.some((row) => row.price !== null);
  const columns = [["Charged as", (row) => row.kind, "whole"], ["#Requests", (row) => count(row.requests)], ["#Per second", (row) => perSecond(row).toFixed(1), "wide"]];
  if (priced) {
    columns.push(["#Price of 1,000", (row) => money(row.price), "wide"], ["#Cost", (row) => money(row.cost)],
      ["#Cost of 30 days", (row) => money(perSecond(row) * MONTH_S * row.price / 1000)]);
  }
  const note = priced ? "Cost of requests at the prices of --bucket-prices, so far and for 30 days at the current rate. Storage and traffic out of the region cost extra."
    : "To see the cost of requests, set prices with --bucket-prices put=…,list=…,get=….";
  return [table(columns, bucket.charges, "There were no requests."), h("p", { class: "quiet" }, note)];
}

function draw(page) {
  const now = samples[samples.length - 1], bucket = now.bucket;
  if (!bucket) {
    page.replaceChildren(h("h1", {}, "Bucket"), h("p", { class: "message" }, "This broker stores its log in the data directory, not in a bucket."));
    return;
  }
  const seconds = Math.max((now.at_us - samples[0].at_us) / 1e6, 1e-6);
  page.replaceChildren(
    h("h1", {}, "Bucket"),
    h("p", { class: "quiet" }, bucket.url, " · log ", bucket.id),
    h("div", { class: "cards" },
      card("This broker", bucket.node), card("Leader of shard " + bucket.shard + " in epoch", count(bucket.epoch)),
      card("Not uploaded yet", size(bucket.unstored_bytes)), card("Upload delay", bucket.unstored_seconds ? ms(bucket.unstored_seconds) : "0 s")),
    h("div", { class: "cards" },
      card("Uploaded", size(bucket.put_bytes)), card("Downloaded", size(bucket.got_bytes)),
      card("Disk cache", `${size(bucket.cache_bytes)} of ${size(bucket.cache_bytes_max)}`),
      card("Journal objects", `${count(bucket.journal_objects)} of ${count(bucket.journal_objects_max)}`)),
    h("h2", {}, "Brokers"),
    table([
      ["Broker", (node) => node.name], ["State", (node) => h("span", { class: node.state === "silent" || node.state === "deposed" ? "bad" : null }, node.state)],
      ["#Epoch", (node) => (node.epoch === null ? "–" : count(node.epoch))],
    ], bucket.nodes, "No broker has been seen yet."),
    h("p", { class: "quiet" }, `Times this process became the leader: ${count(bucket.led)}; times it was deposed: ${count(bucket.deposed)}.`),
    h("h2", {}, "Requests"), drawRequests(bucket, seconds),
    h("h2", {}, "Cost of requests"), ...drawCharges(bucket, seconds),
    h("p", { class: "quiet" }, samples.length > 1 ? `Rates and means cover the last ${span(seconds)}.` : "Rates appear after the next update."));
}

export async function bucket(page) {
  const poll = async () => {
    samples.push(await api("/overview"));
    if (samples.length > 30) samples.shift();
    offerBucket(samples[samples.length - 1]);
    draw(page);
  };
  await poll();
  every(2, poll);
}
