// Users, their permissions, and the password and tokens of the current user.
import { api, h, show, showError } from "./frame.js";
import { dangerous, filtered, form, link, path, table, time, truncated } from "./parts.js";

const words = (text) => text.split(",").map((word) => word.trim()).filter(Boolean);
const permissionsOf = (user) => (user.everything ? "all" : user.permissions.join(", ") || "none");
const secret = () => h("input", { type: "password", autocomplete: "new-password", required: true });
const hint = "Comma-separated permissions: admin, manage_topics, consume, produce, group, transaction, read_servers … Use permission@stream or permission@stream/topic to limit one to a stream or a topic.";

function list(found) {
  const draw = (rows) => table([
    ["User", (row) => link(["users", row.name], row.name)], ["State", (row) => (row.active ? "active" : "inactive")],
    ["Permissions", (row) => h("span", { class: "value" }, permissionsOf(row))], ["Defined in", (row) => (row.configured ? "users file" : "broker"), "wide"],
    ["#Tokens", (row) => row.tokens.length, "wide"],
  ], rows, "There are no users.");
  const addUser = form({
    name: ["Name", h("input", { required: true, autocomplete: "off" })], password: ["Password", secret()],
    permissions: ["Permissions", h("input", { placeholder: "none", size: 32, autocomplete: "off" })],
  }, "Add", async (values) => {
    await api(path("users", values.name), { password: values.password, permissions: words(values.permissions) });
    location.hash = path("users", values.name);
  });
  return [
    ...(found.open ? [h("p", { class: "message" }, "Authentication is off because this broker has no users file: every client can do everything.")] : []),
    ...filtered(found.users, (row) => row.name + " " + permissionsOf(row), draw), ...truncated(found),
    h("h2", {}, "Add a user"), addUser, h("p", { class: "quiet" }, hint)];
}

function tokens(self) {
  const created = h("div", {});
  const rows = self.tokens.map((name) => ({ name }));
  const revoke = (name) => api(path("tokens", name), undefined, "DELETE").then(show).catch(showError);
  const createToken = form({
    name: ["Name", h("input", { required: true, autocomplete: "off" })],
    days: ["Expires in days", h("input", { type: "number", min: 1, max: 3650, placeholder: "never" })],
  }, "Create token", async (values) => {
    const found = await api(path("tokens", values.name), values.days ? { expires_in_s: values.days * 86400 } : {});
    created.replaceChildren(h("p", { class: "message" }, `Token ${found.name}, shown only once: `, h("code", {}, found.token)));
    return "created";
  });
  return [
    h("h2", {}, "Your tokens"),
    table([["Token", (row) => row.name], ["", (row) => dangerous("Revoke", "Revoke permanently", () => revoke(row.name))]], rows, "You have no tokens."),
    h("div", { class: "below" }, createToken), created];
}

function password(user, self) {
  const fields = { password: ["New password", secret()] };
  const isSelf = user.name === self.name;
  if (isSelf) fields.old = ["Current password", h("input", { type: "password", autocomplete: "current-password", required: true })];
  return [h("h2", {}, "Password"), form(fields, "Change password", async (values) => {
    await api(path("users", user.name) + "/password", values);
    return isSelf ? "changed; log in again" : "changed; existing logins and tokens are revoked";
  })];
}

async function user(page, name) {
  const self = await api("/self");
  const found = await api(path("users", name));
  const at = path("users", name);
  const permissions = h("textarea", {});
  permissions.value = found.permissions.join(", ");
  const remove = async () => {
    try { await api(at, undefined, "DELETE"); location.hash = "/users"; } catch (error) { showError(error); }
  };
  const change = found.configured ? [h("p", { class: "message" }, "This user is defined in the users file: change it there with polywire user.")] : [
    h("h2", {}, "Permissions"),
    form({ permissions: ["", permissions] }, "Save", async (values) => {
      await api(at + "/permissions", { permissions: words(values.permissions) });
      show();
    }),
    h("p", { class: "quiet" }, hint),
    ...password(found, self),
    h("h2", {}, "Login"),
    h("p", { class: "tools" },
      h("button", { type: "button", onclick: () => api(at + "/active", { active: !found.active }).then(show).catch(showError) },
        found.active ? "Disable login" : "Enable login"),
      dangerous("Delete", "Delete user permanently", remove))];
  page.append(
    h("h1", {}, name),
    table([["State", (row) => (row.active ? "active" : "inactive")], ["Permissions", (row) => h("span", { class: "value" }, permissionsOf(row))],
      ["SCRAM", (row) => (row.scram ? "yes" : "no"), "wide"], ["Created", (row) => time(row.created_at_us), "wide"]], [found], ""),
    ...change,
    ...(name === self.name && !self.open ? tokens(found) : []));
}

export async function users(page, [name]) {
  if (name !== undefined) return user(page, name);
  page.append(h("h1", {}, "Users"));
  try {
    page.append(...list(await api("/users")));
  } catch (error) {
    const self = await api("/self");
    page.append(h("p", { class: "message" }, error.message), h("p", {}, link(["users", self.name], "Your permissions, password and tokens")));
  }
}
