// Links: topics of other brokers that this broker follows.
import { api, every, h, show, showError } from "./frame.js";
import { card, count, dangerous, form, link, path, span, table, truncated } from "./parts.js";
import { switchOver } from "./switch.js";

const POLL_S = 2;
const rate = (number) => (number < 10 ? number.toFixed(1) : count(Math.round(number)));
const state = (row) => h("span", { class: row.state === "failing" ? "bad" : row.state === "running" ? "good" : null, title: row.error || null }, row.state);
const lag = (row) => (row.lag === null ? "–" : count(row.lag));
const timeLag = (row) => (row.lag_s === null ? "–" : span(row.lag_s));
const words = (text) => text.split(/[\s,]+/).filter(Boolean);
const secret = () => h("input", { type: "password", autocomplete: "off", placeholder: "if it needs one" });

export async function links(page, [name]) {
  if (name !== undefined) return one(page, name);
  const found = await api("/links");
  const draw = (rows) => table([
    ["Link", (row) => link(["links", row.name], row.name)], ["Source", (row) => h("span", { class: "value" }, row.source), "wide"],
    ["Topics", (row) => h("span", { class: "value" }, row.topics.join(", ")), "wide"], ["State", state],
    ["#Lag", lag], ["#Time lag", timeLag], ["#Records/s", (row) => rate(row.rate), "wide"],
    ["Error", (row) => row.error || "–", "wide"],
  ], rows, "There are no links. A link copies topics of another broker, and follows them until you switch over.");
  const results = h("div", {}, draw(found.links));
  every(POLL_S, async () => results.replaceChildren(draw((await api("/links")).links)));
  page.append(h("h1", {}, "Links"), results, ...(found.can_alter ? newLink() : []));
}

// The URL of the source, with the password if it has a user only.
function sourceOf(values) {
  const at = values.source.lastIndexOf("@");
  if (at < 0 || !values.password) return values.source;
  return `${values.source.slice(0, at)}:${encodeURIComponent(values.password)}${values.source.slice(at)}`;
}

function newLink() {
  const preview = h("div", { class: "below" });
  const start = h("select", {}, h("option", { value: "earliest" }, "all records"), h("option", { value: "latest" }, "new records"));
  const fields = {
    name: ["Name", h("input", { required: true, autocomplete: "off", size: 14 })],
    source: ["Source", h("input", { required: true, autocomplete: "off", size: 34, placeholder: "kafka://reader@old:9092" })],
    password: ["Password", secret()],
    topics: ["Topics", h("input", { required: true, autocomplete: "off", size: 24, placeholder: "orders*, payments" })],
    start: ["Copy", start],
  };
  const check = form(fields, "Check", async (values) => {
    preview.replaceChildren();
    const body = { source: sourceOf(values), topics: words(values.topics), start: values.start };
    const plan = await api(path("links", values.name), { ...body, dry_run: true });
    const create = async () => {
      try { await api(path("links", values.name), body); location.hash = path("links", values.name); } catch (error) { showError(error); }
    };
    preview.replaceChildren(...planned(plan, create));
    return "";
  });
  return [h("h2", {}, "Create a link"), check, preview];
}

function planned(plan, create) {
  const others = plan.topics.filter((row) => row.other_settings.length).map((row) => `settings of ${row.topic} that are not carried: ${row.other_settings.join(", ")}`);
  const notes = [...plan.notes, ...others];
  const unless = (cell) => (row) => (row.error ? "–" : cell(row));
  const settings = (row) => Object.entries(row.settings).filter(([, value]) => value && value !== "none").map(([name, value]) => `${name}=${value}`).join(", ");
  return [
    h("p", { class: "message", role: "status" }, "Preview: nothing has changed yet."),
    table([
      ["Topic", (row) => row.topic, "key"], ["#Partitions", unless((row) => count(row.partitions)), "wide"], ["#Records", unless((row) => count(row.records))],
      ["Topic here", unless((row) => (row.creates ? "is created" : "exists")), "wide"], ["Offsets", unless((row) => row.offsets), "wide"],
      ["Settings", (row) => h("span", { class: "value" }, settings(row) || "–"), "wide"],
      ["Error", (row) => (row.error ? h("span", { class: "bad" }, row.error) : "–")],
    ], plan.topics, "No topic matches yet."),
    ...(notes.length ? [h("h2", {}, "Notes"), h("ul", { class: "quiet" }, notes.map((text) => h("li", {}, text)))] : []),
    plan.topics.some((row) => row.error) ? null : h("p", { class: "below" }, h("button", { type: "button", class: "main", onclick: create }, "Create link")),
  ].filter(Boolean);
}

function details(found) {
  return [
    found.error ? h("p", { class: "message bad", role: "alert" }, `The link fails: ${found.error}. The broker tries again.`) : null,
    h("div", { class: "cards" },
      card("State", found.state), card("Records behind", lag(found)), card("Time lag", timeLag(found)),
      card("Records per second", rate(found.rate)), card("Topics", count(found.followed))),
    table([
      ["Topic", (row) => link(["topics", row.topic], row.topic)], ["#Partitions", (row) => count(row.partitions), "wide"],
      ["#Copied", (row) => count(row.copied)], ["#Lag", lag], ["#Time lag", timeLag, "wide"],
      ["#Records/s", (row) => rate(row.rate), "wide"],
      ["State", (row) => (row.error ? "failing" : row.phase || "following"), "wide"], ["Offsets", (row) => (row.shifted ? "differ" : "same"), "wide"],
      ["Changed at the source", (row) => h("span", { class: "value" }, row.settings || "–"), "wide"],
      ["Error", (row) => (row.error ? h("span", { class: "bad" }, row.error) : "–")],
    ], found.topic_reports, "The link has not reported any topic yet."),
    ...truncated(found),
  ].filter(Boolean);
}

function actions(found) {
  const at = path("links", found.name);
  const remove = async () => {
    try { await api(at, undefined, "DELETE"); location.hash = "/links"; } catch (error) { showError(error); }
  };
  const isPaused = found.state === "paused";
  const pause = () => api(at + "/paused", { paused: !isPaused }).then(show).catch(showError);
  return [
    h("h2", {}, "Change"),
    h("p", { class: "tools" }, h("button", { type: "button", onclick: pause }, isPaused ? "Resume" : "Pause"), dangerous("Delete", "Delete link", remove)),
    h("p", { class: "quiet" }, "Topics and records remain if you delete the link.")];
}

async function one(page, name) {
  const found = await api(path("links", name));
  const current = h("div", {}, details(found));
  every(POLL_S, async () => current.replaceChildren(...details(await api(path("links", name)))));
  page.append(
    h("h1", {}, name), h("p", { class: "quiet" }, "Follows ", h("span", { class: "value" }, found.topics.join(", ")), " of ", h("span", { class: "value" }, found.source),
      found.start === "latest" ? ", new records only." : "."),
    current, ...(found.can_alter ? [...switchOver(found), ...actions(found)] : []));
}
