// The dashboard in the browser: takes changed fragments from the server and puts them into their
// places, and counts the time from and to the instants in them. The server escapes all text.
"use strict";

const STALE_MS = 5000;
const UNITS = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];

let source = null;
let heardAtMs = performance.now();
let now = { wallS: Date.now() / 1000, polledS: Date.now() / 1000, atMs: performance.now() };

// As `duration` of the terminal: at most two units.
function duration(seconds) {
  if (seconds < 0) return "-" + duration(-seconds);
  const left = Math.floor(seconds);
  for (const [index, [unit, size]] of UNITS.entries()) {
    if (left < size && unit !== "s") continue;
    const rest = left % size;
    const next = UNITS[index + 1];
    const more = next ? Math.floor(rest / next[1]) : 0;
    return Math.floor(left / size) + unit + (more ? ` ${more}${next[0]}` : "");
  }
  return "0s";
}

function wallS() {
  return now.wallS + (performance.now() - now.atMs) / 1000;
}

function made(html, isRow) {
  const template = document.createElement("template");
  template.innerHTML = isRow ? `<table><tbody>${html}</tbody></table>` : html;
  return isRow ? template.content.querySelector("tr") : template.content.firstElementChild;
}

// Replaces an element; the keyboard's focus stays on the same link.
function replace(old, fresh) {
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  old.replaceWith(fresh);
  const href = focused && focused.getAttribute("href");
  if (href) {
    const again = [...fresh.querySelectorAll("a")].find((a) => a.getAttribute("href") === href);
    if (again) again.focus({ preventScroll: true });
  }
}

function takeList([place, order, items]) {
  const list = document.querySelector(`[data-list="${CSS.escape(place)}"]`);
  if (!list) return;
  const isRow = list.tagName === "TBODY";
  const known = new Map([...list.children].map((child) => [child.dataset.key, child]));
  for (const [key, html] of Object.entries(items)) {
    const fresh = made(html, isRow);
    fresh.dataset.key = key;
    const old = known.get(key);
    if (old) replace(old, fresh);
    known.set(key, fresh);
  }
  if (!order) return;
  order.forEach((key, index) => {
    const child = known.get(key);
    known.delete(key);
    if (child && list.children[index] !== child) list.insertBefore(child, list.children[index] || null);
  });
  for (const gone of known.values()) gone.remove();
}

function take(event) {
  const update = JSON.parse(event.data);
  heardAtMs = performance.now();
  now = { wallS: update.now, polledS: update.polled, atMs: heardAtMs };
  for (const [place, html] of Object.entries(update.changes.texts)) {
    for (const element of document.querySelectorAll(`[data-text="${CSS.escape(place)}"]`)) {
      element.innerHTML = html;
    }
  }
  update.changes.lists.forEach(takeList);
  // Texts of places that came with a list just now.
  for (const [place, html] of Object.entries(update.changes.texts)) {
    if (!place.startsWith("about-")) continue;
    const element = document.querySelector(`[data-text="${CSS.escape(place)}"]`);
    if (element) element.innerHTML = html;
  }
  document.body.dataset.version = event.lastEventId;
  count();
}

function count() {
  const atS = wallS();
  for (const element of document.querySelectorAll("time[data-since]")) {
    set(element, duration(Math.max(0, atS - element.dataset.since)));
  }
  for (const element of document.querySelectorAll("time[data-until]")) {
    const leftS = element.dataset.until - atS;
    set(element, leftS >= 0 ? `${duration(leftS)} left` : `LATE by ${duration(-leftS)}`);
    element.classList.toggle("bad", leftS < 0);
  }
  for (const bar of document.querySelectorAll("rect[data-since]")) {
    const share = (atS - bar.dataset.since) / bar.dataset.span;
    const room = 100 - parseFloat(bar.getAttribute("x"));
    bar.setAttribute("width", `${Math.max(0.5, Math.min(room, share * 100)).toFixed(2)}%`);
  }
  const silentMs = performance.now() - heardAtMs;
  const ageS = atS - now.polledS;
  const lost = document.getElementById("lost");
  lost.hidden = silentMs < STALE_MS && ageS * 1000 < STALE_MS;
  if (lost.hidden) return;
  if (silentMs < STALE_MS) set(lost, `▲ the coordinator has not answered for ${duration(ageS)}; waiting`);
  else set(lost, `▲ this dashboard's server has not answered for ${duration(silentMs / 1000)}; trying again`);
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function open() {
  close();
  source = new EventSource(document.body.dataset.live + "?seen=" + encodeURIComponent(document.body.dataset.version || ""));
  source.onmessage = take;
  source.onerror = () => {
    // A stream that was refused is not tried again by the browser: the session may be over.
    if (source && source.readyState === EventSource.CLOSED) setTimeout(() => location.reload(), 5000);
  };
}

function close() {
  if (source) source.close();
  source = null;
}

// A tab that is not looked at costs nothing, and leaves its connection to others.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) close();
  else open();
});

if (document.body.dataset.live) {
  open();
  setInterval(count, 500);
}
