// Cut-over of a link's topics, and the way back. Nothing changes until everything is copied, and it can be cancelled until then.
import { api, h, isShown, show, showError } from "./frame.js";
import { count, path } from "./parts.js";

const PAUSE_MS = 300;  // between requests, if the broker answers at once
const SHOWN_MAX = 5;

const CUT_OVER = {
  verb: "cut-over", label: "Cut over", target: (isReversed) => (isReversed ? "reversed" : "cut-over"), done: "Cut over",
  title: (link) => `Cut over topics of the link ${link}?`,
  steps: (isReversed) => [
    "First stop the producers at the source. Consumers may keep reading.",
    "The broker waits until every record is copied and nothing has arrived at the source for 300 ms. Then clients can write the topics here.",
    isReversed ? "From then on the link copies records that clients write here to the source, so that you can fall back." : "Records that arrive at the source later are not copied. Without copying back, you cannot fall back.",
    "Then start the producers with the address of this broker.",
  ],
};
const FALL_BACK = {
  verb: "fall-back", label: "Fall back", target: () => "following", done: "Fallen back",
  title: (link) => `Fall back to the source of the link ${link}?`,
  steps: () => [
    "First stop the producers at this broker.",
    "The broker waits until the source has every record and nothing has been written here for 300 ms. Then the topics are read-only here, and the link follows the source again.",
    "Then start the producers with the address of the source.",
  ],
};

const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

function reasonOf(waiting, error) {
  const failed = error || (waiting.find((row) => row.error) || {}).error;
  if (failed) return `The link fails: ${failed}`;
  const behind = waiting.filter((row) => row.lag);
  if (!behind.length) return "Waiting until nothing arrives any more.";
  const facts = behind.slice(0, SHOWN_MAX).map((row) => `${row.topic} (${count(row.lag)})`).join(", ");
  return `Waiting for records to be copied: ${facts}${behind.length > SHOWN_MAX ? " …" : ""}`;
}

// A button that opens the confirmation of a change, makes it and shows its progress in `panel`.
function change(kind, found, panel) {
  const at = path("links", found.name), isHere = isShown();
  const begin = () => {
    const topics = h("input", { size: 28, placeholder: "all topics of the link", autocomplete: "off" });
    const reverse = h("input", { type: "checkbox" });
    const steps = h("ol", {}), problem = h("p", { role: "alert", class: "bad" });
    const draw = () => steps.replaceChildren(...kind.steps(reverse.checked).map((text) => h("li", {}, text)));
    reverse.addEventListener("change", draw);
    draw();
    const start = h("button", { type: "button", class: "main", onclick: async () => {
      start.disabled = true;
      problem.textContent = "";
      try {
        await run(topics.value.split(/[\s,]+/).filter(Boolean), reverse.checked);
      } catch (error) {
        if (problem.isConnected) problem.textContent = error.message; else showError(error);
      }
      start.disabled = false;
    } }, `${kind.label} now`);
    panel.replaceChildren(h("div", { class: "message", role: "group", "aria-label": kind.title(found.name) },
      h("p", {}, h("b", {}, kind.title(found.name))), steps,
      h("p", { class: "tools" }, h("label", {}, "Topics", topics),
        kind === CUT_OVER ? h("label", { class: "check" }, reverse, "copy later records back to the source") : null),
      h("p", { class: "tools" }, start,
        h("button", { type: "button", onclick: () => panel.replaceChildren() }, "Back")), problem));
  };
  const run = async (topics, isReversed) => {
    const named = topics.length ? { topics } : {};
    const body = kind === CUT_OVER ? { ...named, reverse: isReversed } : named;
    let isCancelled = false;
    const status = h("p", { role: "status" }, "Starting …");
    const cancel = h("button", { type: "button", onclick: () => { isCancelled = true; cancel.disabled = true; } }, "Cancel");
    const ask = async () => {
      const answer = await api(`${at}/${kind.verb}`, body);
      return { ...answer, waiting: answer.topics.filter((row) => row.phase !== kind.target(isReversed)) };
    };
    let answer = await ask();  // an error leaves the confirmation as it is
    panel.replaceChildren(h("div", { class: "message" }, status, h("p", { class: "tools" }, cancel)));
    try {
      while (!answer.topics.length || answer.waiting.length) {
        status.textContent = answer.topics.length ? reasonOf(answer.waiting, answer.error) : "The link has not found its topics yet.";
        if (isCancelled || !isHere()) break;
        await pause(PAUSE_MS);
        answer = await ask();
      }
    } catch (error) {
      await api(`${at}/cut-over/cancel`, named).catch(() => null);
      panel.replaceChildren(h("p", { class: "message bad", role: "alert" }, `${error.message}. Topics that have not changed yet stay as they are.`));
      return;
    }
    if (answer.waiting.length || !answer.topics.length) {
      const { topics: left } = await api(`${at}/cut-over/cancel`, named);
      const before = new Map(found.topic_reports.map((row) => [row.topic, row.phase])), target = kind.target(isReversed);
      const changed = left.filter((row) => row.phase === target && before.get(row.topic) !== target).length;
      panel.replaceChildren(h("p", { class: "message", role: "status" }, changed ? `Cancelled. ${count(changed)} topics had changed before that.` : "Cancelled: nothing has changed."));
      return;
    }
    const pauseS = Math.max(...answer.topics.map((row) => row.pause_s));
    if (!isHere()) return;
    await show();
    document.querySelector("main h1").after(h("p", { class: "message", role: "status" }, `${kind.done}: ${count(answer.topics.length)} topics, writes paused for ${pauseS.toFixed(2)} s. Now start the producers ${kind === CUT_OVER ? "here" : "at the source"}.`));
  };
  return h("button", { type: "button", onclick: begin }, `${kind.label} …`);
}

export function switchOver(found) {
  const panel = h("div", { class: "below", id: "switch" });
  const isReversed = found.topic_reports.some((row) => row.phase === "reversed");
  const isFollowing = !found.topic_reports.length || found.topic_reports.some((row) => row.phase === "following" || row.phase === "waiting");
  return [
    h("h2", {}, "Switch over"),
    h("p", { class: "tools" }, isFollowing ? change(CUT_OVER, found, panel) : null, isReversed ? change(FALL_BACK, found, panel) : null),
    isFollowing || isReversed ? null : h("p", { class: "quiet" }, "All topics are cut over, and nothing is copied back: delete the link when the old broker is not needed any more."),
    panel,
  ].filter(Boolean);
}
