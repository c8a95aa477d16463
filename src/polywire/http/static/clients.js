// Connected clients.
import { api, h } from "./frame.js";
import { filtered, left, size, table } from "./parts.js";

export async function clients(page) {
  const found = await api("/connections");
  const draw = (rows) => table([
    ["Wire", (row) => row.wire || "not known yet"], ["Dialect", (row) => row.dialect || "–", "wide"], ["Address", (row) => row.peer],
    ["User", (row) => row.user || "–"], ["#Received", (row) => size(row.received_bytes), "wide"], ["#Sent", (row) => size(row.sent_bytes)],
  ], rows, "Nobody is connected.");
  page.append(h("h1", {}, "Clients"), ...filtered(found.connections, (row) => [row.wire, row.dialect, row.peer, row.user].join(" "), draw), ...left(found));
}
