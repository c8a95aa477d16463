// The frame of the console: routes, keys, and the way to the admin API. Whatever peers have named or sent becomes text nodes, never markup.

let views = {};  // by name; set by open(), as pages import this file

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export async function api(path, body, method) {
  const options = body === undefined && !method ? {} : {
    method: method || "POST",
    headers: { "X-Polywire": "1", "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  };
  const answer = await fetch("/api/v1" + path, options);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ? found.error.message : answer.statusText);
  return found;
}

let shown = 0;  // counts pages, so that one that was left does not go on
const main = document.getElementById("main");

export function every(seconds, work) {
  const own = shown;
  const go = async () => {
    if (own !== shown) return;
    if (!document.hidden) await work().catch((error) => tell(error));
    setTimeout(go, seconds * 1000);
  };
  setTimeout(go, seconds * 1000);
}

export function tell(error) {
  const place = main.querySelector(".message.bad") || main.insertBefore(h("p", { class: "message bad", role: "alert" }), main.firstChild);
  place.textContent = error.message;
}

export async function show() {
  const own = ++shown;
  const [path, query] = (location.hash.slice(1) || "/").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const [name, ...rest] = parts.length ? parts : ["overview"];
  for (const link of document.querySelectorAll("nav a")) {
    const on = link.getAttribute("href") === (name === "overview" ? "#/" : "#/" + name);
    if (on) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  const page = h("div", {});
  try {
    const view = views[name];
    if (!view) throw new Error("there is no such page");
    await view(page, rest, new URLSearchParams(query || ""));
    if (own !== shown) return;
    main.replaceChildren(page);
    main.setAttribute("data-shown", name);
  } catch (error) {
    if (own !== shown) return;
    main.replaceChildren();
    tell(error);
  }
  document.title = [...parts.slice(1).reverse(), name, "Polywire"].join(" · ");
}

async function greet() {
  try {
    const self = await api("/self");
    if (!self.open) document.getElementById("who").replaceChildren(h("a", { href: "#/users/" + encodeURIComponent(self.name) }, self.name));
  } catch { /* the page says why */ }
}

// Only a broker on a bucket has that page, and only who may see the overview is told of it.
export const offerBucket = (told) => { document.getElementById("bucket").hidden = !told.bucket; };

async function watch() {
  const state = document.getElementById("state");
  try {
    const answer = await fetch("/readyz");
    state.textContent = answer.ok ? "ready" : (await answer.text()).trim();
    state.className = answer.ok ? "good" : "bad";
  } catch {
    state.textContent = "not reached";
    state.className = "bad";
  }
  setTimeout(watch, 10000);
}

let leader = false;
function press(event) {
  if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const pages = { o: "#/", t: "#/topics", d: "#/dead", g: "#/groups", c: "#/clients", u: "#/users", b: "#/bucket" };
  if (leader && pages[event.key]) { location.hash = pages[event.key]; leader = false; return; }
  leader = event.key === "g";
  if (event.key === "r") show();
  if (event.key === "/") { const filter = main.querySelector("input"); if (filter) { filter.focus(); event.preventDefault(); } }
}

// Shows the page of the address, and each one that it changes to.
export function open(pages) {
  views = pages;
  addEventListener("keydown", press);
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
  addEventListener("hashchange", () => { show(); main.focus(); });
  show();
  watch();
  greet();
}
