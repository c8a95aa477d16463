// Quotas of users and client ids: their limits, and what clients use of them now.
import { api, every, h, show, showError } from "./frame.js";
import { dangerous, form, span, table, truncated } from "./parts.js";

const KINDS = ["produce", "fetch", "requests"];
const POLL_S = 2;
const keyOf = (row) => JSON.stringify([row.user, row.client_id]);
const nameOf = (name) => (name === null ? "any" : name === "*" ? "every other" : name);
const hint = "Names: * stands for all without a quota of their own. Limits: bytes or requests per second, such as 500kB, 1MB or 10MiB; none if empty. A change applies at once.";

// Limits are usually decimal, so a limit of 1 MB must not be shown as 977 KiB.
function decimal(number, kind) {
  const unit = kind === "requests" ? "" : "B";
  for (const [factor, prefix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (number >= factor) return `${+(number / factor).toFixed(1)} ${prefix}${unit}`;
  return `${+number.toFixed(1)} ${unit}`.trim();
}

async function load() {
  const found = await api("/quotas");
  return { ...found, at: performance.now() };
}

// Returns what a row used of a limit in each second since the last time, and the limit.
function usage(row, kind, before, seconds) {
  if (row[kind] === null) return "–";
  const limit = `${decimal(row[kind], kind)}/s`;
  const used = before && before.used[kind] !== undefined ? Math.max(row.used[kind] - before.used[kind], 0) / seconds : null;
  return used === null ? limit : `${decimal(used, kind)} of ${limit}`;
}

export async function quotas(page) {
  let found = await load(), drawn = "";
  const cells = new Map();
  const fields = {
    user: ["User", h("input", { autocomplete: "off" })], client_id: ["Client id", h("input", { autocomplete: "off" })],
    ...Object.fromEntries(KINDS.map((kind) => [kind, [`${kind[0].toUpperCase()}${kind.slice(1)} per second`, h("input", { placeholder: "no limit", size: 10, autocomplete: "off" })]])),
  };
  const edit = (row) => {
    for (const [name, [, field]] of Object.entries(fields)) field.value = row[name] ?? "";
    fields.produce[1].focus();
  };
  const remove = (row) => api("/quotas", { user: row.user, client_id: row.client_id }, "DELETE").then(show).catch(showError);
  const change = form(fields, "Set", async (values) => {
    const limits = Object.fromEntries(KINDS.map((kind) => [kind, values[kind].trim() || null]));
    await api("/quotas", { user: values.user.trim() || null, client_id: values.client_id.trim() || null, ...limits });
    show();
  });
  const cell = (row, name) => {
    const element = h("span", {});
    cells.set(keyOf(row) + name, element);
    return element;
  };
  const list = h("div", {});
  const draw = (before) => {
    const seconds = before ? (found.at - before.at) / 1000 : 0;
    const earlier = new Map((before ? before.quotas : []).map((row) => [keyOf(row), row]));
    const now = JSON.stringify(found.quotas.map((row) => [keyOf(row), row.configured, ...KINDS.map((kind) => row[kind])]));
    if (now !== drawn) {
      cells.clear();
      list.replaceChildren(table([
        ["User", (row) => nameOf(row.user)], ["Client id", (row) => nameOf(row.client_id)],
        ...KINDS.map((kind) => [`#${fields[kind][0].split(" ")[0]}`, (row) => cell(row, kind)]),
        ["#Delays", (row) => cell(row, "delay"), "wide"], ["Defined in", (row) => (row.configured ? "configuration" : "broker"), "wide"],
        ["", (row) => h("span", { class: "tools" }, h("button", { type: "button", onclick: () => edit(row) }, "Edit"), row.configured ? null : dangerous("Remove", "Remove quota", () => remove(row)))],
      ], found.quotas, "There are no quotas."), ...truncated(found));
      drawn = now;
    }
    for (const row of found.quotas) {
      for (const kind of KINDS) cells.get(keyOf(row) + kind).textContent = usage(row, kind, earlier.get(keyOf(row)), seconds);
      cells.get(keyOf(row) + "delay").textContent = span(row.delay_s);
    }
  };
  draw(null);
  page.append(h("h1", {}, "Quotas"), list, h("h2", {}, "Set a quota"), change, h("p", { class: "quiet" }, hint));
  every(POLL_S, async () => {
    const before = found;
    found = await load();
    draw(before);
  });
}
