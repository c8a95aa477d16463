// Connected clients.
import { api, h } from "./frame.js";
import { count, filtered, size, table, truncated } from "./parts.js";

export async function clients(page) {
  const found = await api("/connections");
  const isConsole = (row) => row.wire === "http" && row.dialect === "console";
  const rows = found.connections.filter((row) => !isConsole(row)), hidden = found.connections.length - rows.length;
  const sort = {};
  const draw = (rows) => table([
    ["Protocol", (row) => row.wire || "not detected yet", "", (row) => row.wire], ["Client software", (row) => row.dialect || "–", "wide", (row) => row.dialect],
    ["Address", (row) => row.peer, "", (row) => row.peer], ["User", (row) => row.user || "–", "", (row) => row.user],
    ["#Received", (row) => size(row.received_bytes), "wide", (row) => row.received_bytes], ["#Sent", (row) => size(row.sent_bytes), "", (row) => row.sent_bytes],
  ], rows, "There are no clients.", sort);
  page.append(h("h1", {}, "Clients"), ...filtered(rows, (row) => [row.wire, row.dialect, row.peer, row.user].join(" "), draw), ...truncated(found),
    ...(hidden ? [h("p", { class: "quiet" }, hidden === 1 ? "One connection of a console is not listed." : `${count(hidden)} connections of consoles are not listed.`)] : []));
}
