// Keeps a page fresh: asks for its content again and puts what has changed into the elements marked data-live, by their ids.
// The server renders and escapes; nothing here makes HTML. Hidden tabs ask for nothing. Says so when the server does not answer.
//
// For other scripts: dashboard.go({rank: 5}) changes fields of the address and asks at once; the event "fresh" on document follows
// every swap. An element marked data-pending has the page asked again soon.
"use strict";
const dashboard = (() => {
  const LIMIT_MS = 20000, SOON_MS = 700, MOST_MS = 30000;
  const main = document.getElementById("main"), light = document.getElementById("live");
  let tag = null, timer = 0, failures = 0, asking = null;
  const periodMs = () => {
    if (main.querySelector("[data-pending]")) return SOON_MS;
    return Number(main.dataset.refreshS || 0) * 1000;
  };
  const say = (state, text) => {
    if (light.dataset.state === state && light.textContent === text) return;
    light.dataset.state = state;
    light.textContent = text;
  };
  const swap = (html) => {
    const fresh = new DOMParser().parseFromString(html, "text/html");
    const focus = document.activeElement && document.activeElement.id;
    for (const old of main.querySelectorAll("[data-live]")) {
      const now = fresh.getElementById(old.id);
      if (!now) continue;
      for (const one of now.attributes) if (old.getAttribute(one.name) !== one.value) old.setAttribute(one.name, one.value);
      if (old.innerHTML === now.innerHTML) continue;
      const open = new Set([...old.querySelectorAll("details[open][id]")].map((one) => one.id));
      old.replaceChildren(...now.childNodes);
      for (const one of old.querySelectorAll("details[id]")) if (open.has(one.id)) one.open = true;
    }
    if (focus && document.activeElement.id !== focus) document.getElementById(focus)?.focus({ preventScroll: true });
    document.dispatchEvent(new CustomEvent("fresh"));
  };
  const ask = async () => {
    clearTimeout(timer);
    if (!main.dataset.fragment || document.hidden) return plan();
    asking?.abort();
    const own = asking = new AbortController();
    const limit = setTimeout(() => own.abort(new Error("time")), LIMIT_MS);
    try {
      const answer = await fetch(main.dataset.fragment + location.search, {
        signal: own.signal, cache: "no-store", headers: tag ? { "If-None-Match": tag } : {},
      });
      if (answer.status === 401) return location.reload();
      if (answer.status !== 304) {
        if (!answer.ok) throw new Error(String(answer.status));
        const html = await answer.text();
        tag = answer.headers.get("ETag");
        swap(html);
      }
      failures = 0;
    } catch {
      if (asking !== own) return;
      failures += 1;
    } finally {
      clearTimeout(limit);
    }
    if (asking === own) plan();
  };
  const plan = () => {
    clearTimeout(timer);
    const period = periodMs();
    if (!main.dataset.fragment || !period) return say("still", "");
    if (document.hidden) return say("paused", "paused");
    if (failures) say("gone", "server does not answer");
    else say("live", "live");
    timer = setTimeout(ask, Math.min(period * 2 ** Math.min(failures, 4), Math.max(MOST_MS, period)));
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? plan() : ask()));
  const go = (fields) => {
    const address = new URL(location.href);
    for (const [name, value] of Object.entries(fields)) {
      if (value === null || value === "") address.searchParams.delete(name);
      else address.searchParams.set(name, value);
    }
    history.replaceState(null, "", address);
    return ask();
  };
  plan();
  return { go, ask };
})();
