// Connected clients.
import { api, h } from "./frame.js";
import { filtered, size, table, truncated } from "./parts.js";

export async function clients(page) {
  const found = await api("/connections");
  const draw = (rows) => table([
    ["Protocol", (row) => row.wire || "not detected yet"], ["Dialect", (row) => row.dialect || "–", "wide"], ["Address", (row) => row.peer],
    ["User", (row) => row.user || "–"], ["#Received", (row) => size(row.received_bytes), "wide"], ["#Sent", (row) => size(row.sent_bytes)],
  ], rows, "There are no connections.");
  page.append(h("h1", {}, "Clients"), ...filtered(found.connections, (row) => [row.wire, row.dialect, row.peer, row.user].join(" "), draw), ...truncated(found));
}
