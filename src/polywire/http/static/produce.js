// The form that produces a record.
import { api, h } from "./frame.js";
import { path } from "./parts.js";

export function produceForm(name, initial = {}) {
  const key = h("input", { name: "key", value: initial.key || null }), value = h("textarea", { name: "value" });
  value.value = initial.value || "";
  const result = h("p", { role: "status", class: "quiet" });
  return h("form", { onsubmit: async (event) => {
    event.preventDefault();
    const body = { value: value.value };
    if (key.value) body.key = key.value;
    try {
      const stored = await api(path("topics", name) + "/records", body);
      result.textContent = `stored in partition ${stored.partition} at offset ${stored.offset}`;
    } catch (error) { result.textContent = error.message; }
  } }, h("label", {}, "Key (optional)", key), h("label", {}, "Value", value), h("p", {}, h("button", { class: "main" }, "Produce")), result);
}
