// The frame of the console: routes, keyboard shortcuts and requests to the admin API. Names and data from clients become text nodes, never markup.

let views = {};  // by name; set by open(), because the pages import this file

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Browsers remove the segments "." and "..", also if they are percent-encoded, so these names are encoded twice.
export const endpoint = (path) => "/api/v1" + path.replace(/(?<=\/)(\.{1,2}|(%25(25)*2E){1,2})(?=[/?]|$)/g, (name) => name.replaceAll("%", "%25").replaceAll(".", "%252E"));

export async function api(path, body, method, more = {}) {
  const marked = { "X-Polywire": "console" };  // lists of clients do not contain connections of consoles
  const options = body === undefined && !method ? { headers: marked } : {
    ...more,
    method: method || "POST",
    headers: { ...marked, "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  };
  const response = await fetch(endpoint(path), options);
  const content = await response.json();
  if (!response.ok) throw new Error(content.error ? content.error.message : response.statusText);
  return content;
}

const SLOW_MS = 250;
let visit = 0;  // number of the current page, so that work of an earlier page stops
const main = document.getElementById("main");

// Returns a function that tells whether the present page is still shown.
export function isShown() {
  const started = visit;
  return () => started === visit;
}

export function every(seconds, work) {
  const started = visit;
  const repeat = async () => {
    if (started !== visit) return;
    if (!document.hidden) await work().catch((error) => showError(error));
    setTimeout(repeat, seconds * 1000);
  };
  setTimeout(repeat, seconds * 1000);
}

export function showError(error) {
  const message = main.querySelector(".message.bad") || main.insertBefore(h("p", { class: "message bad", role: "alert" }), main.firstChild);
  message.textContent = error.message;
}

export async function show() {
  const started = ++visit;
  const [path, query] = (location.hash.slice(1) || "/").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const [name, ...rest] = parts.length ? parts : ["overview"];
  for (const link of document.querySelectorAll("nav a")) {
    const on = link.getAttribute("href") === (name === "overview" ? "#/" : "#/" + name);
    if (on) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  const page = h("div", {});
  // a fast page replaces the old one at once, so that nothing flickers
  const slow = setTimeout(() => { if (started === visit) main.replaceChildren(h("p", { class: "loading", role: "status" }, "Loading…")); }, SLOW_MS);
  try {
    const view = views[name];
    if (!view) throw new Error("page not found");
    await view(page, rest, new URLSearchParams(query || ""));
    if (started !== visit) return;
    main.replaceChildren(page);
    main.setAttribute("data-shown", name);
  } catch (error) {
    if (started !== visit) return;
    main.replaceChildren();
    showError(error);
  } finally {
    clearTimeout(slow);
  }
  document.title = [...parts.slice(1).reverse(), name, "Polywire"].join(" · ");
}

async function showUser() {
  try {
    const self = await api("/self");
    if (!self.open) document.getElementById("who").replaceChildren(h("a", { href: "#/users/" + encodeURIComponent(self.name) }, self.name));
  } catch { /* the page itself shows the error */ }
}

// Only a broker with a bucket has this page, and only users who can read the overview get the link.
const HAS_BUCKET = "has bucket";
export function offerBucket(overview) {
  document.getElementById("bucket").hidden = !overview.bucket;
  try { sessionStorage.setItem(HAS_BUCKET, overview.bucket ? "yes" : ""); } catch { /* without storage the overview offers it again */ }
}

async function watch() {
  const state = document.getElementById("state");
  try {
    const response = await fetch("/readyz", { headers: { "X-Polywire": "console" } });
    state.textContent = response.ok ? "ready" : (await response.text()).trim();
    state.className = response.ok ? "good" : "bad";
  } catch {
    state.textContent = "unreachable";
    state.className = "bad";
  }
  setTimeout(watch, 10000);
}

let isPrefixed = false;  // whether the last key was g
function press(event) {
  if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const pages = { o: "#/", t: "#/topics", s: "#/sql", d: "#/dead", g: "#/groups", w: "#/queues", l: "#/links", c: "#/clients", u: "#/users", q: "#/quotas", b: "#/bucket" };
  if (isPrefixed && pages[event.key]) { location.hash = pages[event.key]; isPrefixed = false; return; }
  isPrefixed = event.key === "g";
  if (event.key === "r") show();
  if (event.key === "/") { const filter = main.querySelector("input"); if (filter) { filter.focus(); event.preventDefault(); } }
}

// Shows the page of the current address, and the new page when the address changes.
export function open(pages) {
  views = pages;
  try { document.getElementById("bucket").hidden = !sessionStorage.getItem(HAS_BUCKET); } catch { /* as above */ }
  addEventListener("keydown", press);
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
  addEventListener("hashchange", () => { show(); main.focus(); });
  show();
  watch();
  showUser();
}
