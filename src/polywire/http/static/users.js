// Users, what they may do, and who one is oneself.
import { api, h, show, tell } from "./frame.js";
import { dangerous, filtered, form, left, link, path, table, time } from "./parts.js";

const words = (text) => text.split(",").map((word) => word.trim()).filter(Boolean);
const may = (user) => (user.everything ? "everything" : user.permissions.join(", ") || "nothing");
const secret = () => h("input", { type: "password", autocomplete: "new-password", required: true });
const hint = "Permissions are words with commas between them: admin, manage_topics, consume, produce, group, transaction, read_servers …; word@stream or word@stream/topic gives one there only.";

function list(found) {
  const draw = (rows) => table([
    ["User", (row) => link(["users", row.name], row.name)], ["State", (row) => (row.active ? "active" : "inactive")],
    ["May do", (row) => h("span", { class: "value" }, may(row))], ["Kept in", (row) => (row.configured ? "users file" : "broker"), "wide"],
    ["#Tokens", (row) => row.tokens.length, "wide"],
  ], rows, "There are no users.");
  const make = form({
    name: ["Name", h("input", { required: true, autocomplete: "off" })], password: ["Password", secret()],
    permissions: ["Permissions", h("input", { placeholder: "none", size: 32, autocomplete: "off" })],
  }, "Add", async (given) => {
    await api(path("users", given.name), { password: given.password, permissions: words(given.permissions) });
    location.hash = path("users", given.name);
  });
  return [
    ...(found.open ? [h("p", { class: "message" }, "This broker has no users file: whoever reaches it may do everything, whatever users it keeps.")] : []),
    ...filtered(found.users, (row) => row.name + " " + may(row), draw), ...left(found),
    h("h2", {}, "Add a user"), make, h("p", { class: "quiet" }, hint)];
}

function own(self) {
  const made = h("div", {});
  const rows = self.tokens.map((name) => ({ name }));
  const end = (name) => api(path("tokens", name), undefined, "DELETE").then(show).catch(tell);
  const token = form({
    name: ["Name", h("input", { required: true, autocomplete: "off" })],
    days: ["Days until it ends", h("input", { type: "number", min: 1, max: 3650, placeholder: "never" })],
  }, "Make a token", async (given) => {
    const found = await api(path("tokens", given.name), given.days ? { expires_in_s: given.days * 86400 } : {});
    made.replaceChildren(h("p", { class: "message" }, `Token ${found.name}, shown this once: `, h("code", {}, found.token)));
    return "made";
  });
  return [
    h("h2", {}, "Your tokens"),
    table([["Token", (row) => row.name], ["", (row) => dangerous("End", "End it for good", () => end(row.name))]], rows, "You have no tokens."),
    h("div", { class: "below" }, token), made];
}

function password(user, self) {
  const fields = { password: ["New password", secret()] };
  const mine = user.name === self.name;
  if (mine) fields.old = ["Password until now", h("input", { type: "password", autocomplete: "current-password", required: true })];
  return [h("h2", {}, "Password"), form(fields, "Replace", async (given) => {
    await api(path("users", user.name) + "/password", given);
    return mine ? "replaced; log in anew" : "replaced; logins and tokens of before have ended";
  })];
}

async function user(page, name) {
  const self = await api("/self");
  const found = await api(path("users", name));
  const at = path("users", name);
  const permissions = h("textarea", {});
  permissions.value = found.permissions.join(", ");
  const remove = async () => {
    try { await api(at, undefined, "DELETE"); location.hash = "/users"; } catch (error) { tell(error); }
  };
  const change = found.configured ? [h("p", { class: "message" }, "This user is kept in the users file: change it there, with polywire user.")] : [
    h("h2", {}, "Permissions"),
    form({ permissions: ["", permissions] }, "Save", async (given) => {
      await api(at + "/permissions", { permissions: words(given.permissions) });
      show();
    }),
    h("p", { class: "quiet" }, hint),
    ...password(found, self),
    h("h2", {}, "Logging in"),
    h("p", { class: "tools" },
      h("button", { type: "button", onclick: () => api(at + "/active", { active: !found.active }).then(show).catch(tell) },
        found.active ? "Let this user log in no more" : "Let this user log in"),
      dangerous("Delete", "Delete this user for good", remove))];
  page.append(
    h("h1", {}, name),
    table([["State", (row) => (row.active ? "active" : "inactive")], ["May do", (row) => h("span", { class: "value" }, may(row))],
      ["SCRAM", (row) => (row.scram ? "yes" : "no"), "wide"], ["Made (UTC)", (row) => time(row.created_at_us), "wide"]], [found], ""),
    ...change,
    ...(name === self.name && !self.open ? own(found) : []));
}

export async function users(page, [name]) {
  if (name !== undefined) return user(page, name);
  page.append(h("h1", {}, "Users"));
  try {
    page.append(...list(await api("/users")));
  } catch (error) {
    const self = await api("/self");
    page.append(h("p", { class: "message" }, error.message), h("p", {}, link(["users", self.name], "What you may do, your password and your tokens")));
  }
}
