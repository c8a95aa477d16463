// The form that stores a record.
import { api, h } from "./frame.js";
import { path } from "./parts.js";

export function produceForm(name, given = {}) {
  const key = h("input", { name: "key", value: given.key || null }), value = h("textarea", { name: "value" });
  value.value = given.value || "";
  const result = h("p", { role: "status", class: "quiet" });
  return h("form", { onsubmit: async (event) => {
    event.preventDefault();
    const body = { value: value.value };
    if (key.value) body.key = key.value;
    try {
      const stored = await api(path("topics", name) + "/records", body);
      result.textContent = `stored in partition ${stored.partition} at offset ${stored.offset}`;
    } catch (error) { result.textContent = error.message; }
  } }, h("label", {}, "Key, if any", key), h("label", {}, "Value", value), h("p", {}, h("button", { class: "main" }, "Store")), result);
}
