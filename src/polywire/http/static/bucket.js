// The bucket that holds the log: who leads, what is not stored yet, what is asked of the bucket and what that costs.
import { api, every, h, offerBucket } from "./frame.js";
import { card, count, size, span, table } from "./parts.js";

const kept = [];  // what was seen, to make rates of
const MONTH_S = 30 * 86400;

const ms = (seconds) => (seconds < 0.01 ? (seconds * 1000).toFixed(1) : count(Math.round(seconds * 1000))) + " ms";
const money = (cost) => cost.toLocaleString("en", cost < 1 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 2 });

// How much a number of a row grew since the first look that is kept; rows are found again by what `same` says of them.
function grown(rows, row, same, name) {
  const before = kept[0].bucket ? rows(kept[0].bucket).find((other) => same(other) === same(row)) : null;
  return Math.max(0, row[name] - (before ? before[name] : kept.length > 1 ? 0 : row[name]));
}

function drawRequests(bucket, seconds) {
  const same = (row) => row.verb + " " + row.outcome;
  const of = (row, name) => grown((seen) => seen.requests, row, same, name);
  return table([
    ["Request", (row) => row.verb, "whole"],
    ["Outcome", (row) => h("span", { class: row.outcome === "failed" ? "bad" : null }, row.outcome), "whole"],
    ["#Per second", (row) => (of(row, "requests") / seconds).toFixed(1)],
    ["#Mean", (row) => (of(row, "requests") ? ms(of(row, "seconds") / of(row, "requests")) : "–")],
    ["#99 % within", (row) => (row.p99_s === null ? "> 10 s" : ms(row.p99_s)), "wide"], ["#Requests", (row) => count(row.requests), "wide"],
  ], bucket.requests, "Nothing was asked of it.");
}

function drawCharges(bucket, seconds) {
  const perSecond = (row) => grown((seen) => seen.charges, row, (other) => other.kind, "requests") / seconds;
  const priced = bucket.charges.some((row) => row.price !== null);
  const columns = [["Charged as", (row) => row.kind, "whole"], ["#Requests", (row) => count(row.requests)], ["#Per second", (row) => perSecond(row).toFixed(1), "wide"]];
  if (priced) {
    columns.push(["#Price of 1,000", (row) => money(row.price), "wide"], ["#Cost", (row) => money(row.cost)],
      ["#30 days so", (row) => money(perSecond(row) * MONTH_S * row.price / 1000)]);
  }
  const words = priced ? "Requests only, at the prices of --bucket-prices, and what 30 days would cost at this rate; what is stored and what leaves the region costs besides."
    : "Tell prices with --bucket-prices put=…,list=…,get=…, and what the requests cost is shown here.";
  return [table(columns, bucket.charges, "Nothing was asked of it."), h("p", { class: "quiet" }, words)];
}

function draw(page) {
  const now = kept[kept.length - 1], bucket = now.bucket;
  if (!bucket) {
    page.replaceChildren(h("h1", {}, "Bucket"), h("p", { class: "message" }, "The log of this broker lies in its data directory, not in a bucket."));
    return;
  }
  const seconds = Math.max((now.at_us - kept[0].at_us) / 1e6, 1e-6);
  page.replaceChildren(
    h("h1", {}, "Bucket"),
    h("p", { class: "quiet" }, bucket.url, " · log ", bucket.id),
    h("div", { class: "cards" },
      card("This broker", bucket.node), card("Leads shard " + bucket.shard + " in epoch", count(bucket.epoch)),
      card("Not stored yet", size(bucket.unstored_bytes)), card("The oldest of it for", bucket.unstored_seconds ? ms(bucket.unstored_seconds) : "0 s")),
    h("div", { class: "cards" },
      card("Put", size(bucket.put_bytes)), card("Got", size(bucket.got_bytes)),
      card("Kept on disk", `${size(bucket.cache_bytes)} of ${size(bucket.cache_bytes_max)}`),
      card("Journal objects", `${count(bucket.journal_objects)} of ${count(bucket.journal_objects_max)}`)),
    h("h2", {}, "Brokers"),
    table([
      ["Broker", (node) => node.name], ["State", (node) => h("span", { class: node.state === "silent" || node.state === "deposed" ? "bad" : null }, node.state)],
      ["#Epoch", (node) => (node.epoch === null ? "–" : count(node.epoch))],
    ], bucket.nodes, "Nobody was seen yet."),
    h("p", { class: "quiet" }, `This process began to lead ${count(bucket.led)} ×, and was deposed ${count(bucket.deposed)} ×.`),
    h("h2", {}, "Requests"), drawRequests(bucket, seconds),
    h("h2", {}, "What stores charge for"), ...drawCharges(bucket, seconds),
    h("p", { class: "quiet" }, kept.length > 1 ? `Rates and means are of the last ${span(seconds)}.` : "Rates come with the next look."));
}

export async function bucket(page) {
  const look = async () => {
    kept.push(await api("/overview"));
    if (kept.length > 30) kept.shift();
    offerBucket(kept[kept.length - 1]);
    draw(page);
  };
  await look();
  every(2, look);
}
