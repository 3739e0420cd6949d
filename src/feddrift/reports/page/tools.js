"use strict";
// Elements, numbers and colours. Texts are only inserted as text nodes, since names may contain anything.
const $ = (id) => document.getElementById(id);

const NARROW_PX = 600; // screens up to this width have other tables, as in page.css
const isNarrow = () => innerWidth <= NARROW_PX;

// Returns the width of an element of the page in pixels, at most `limit`; the limit if the element is hidden.
const widthOf = (id, limit) => Math.min(limit, $(id).getBoundingClientRect().width || limit);

// Joins a number and its percent sign, so that no line ends between them.
const joinPercent = (text) => (typeof text === "string" ? text.replace(/(\d) %/g, "$1\u00a0%") : text);

const selectShown = (children) =>
  children
    .flat()
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map(joinPercent);

function element(make, tag, attributes, children) {
  const node = make(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...selectShown(children));
  return node;
}
const h = (tag, attributes, ...children) => element((t) => document.createElement(t), tag, attributes, children);
const s = (tag, attributes, ...children) =>
  element((t) => document.createElementNS("http://www.w3.org/2000/svg", t), tag, attributes, children);

function fill(id, ...children) {
  $(id).replaceChildren(...selectShown(children));
}

const known = (x) => x !== null && x !== undefined;
// The score of the page: accuracy, unless the report has another. Shares are shown in percent.
const score = { title: "accuracy", share: true, higher_is_better: true };
const heading = () => score.title.charAt(0).toUpperCase() + score.title.slice(1);
const unit = () => (score.share ? "\u00a0%" : "");
const level = (x, digits = 1) => (known(x) ? (score.share ? (100 * x).toFixed(digits) : x.toFixed(digits + 2)) : "–");
const percent = (x, digits = 1) => (known(x) ? (100 * x).toFixed(digits) : "–");
const number = (x, digits = 2) => (known(x) ? x.toFixed(digits).replace(/^-(0(\.0*)?)$/, "$1") : "–");
const count = (n, one, many = one + "s") => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const megabytes = (x) => (known(x) ? (x / 1e6).toFixed(x < 1e6 ? 3 : x < 1e8 ? 1 : 0) : "–");
const range = (n) => Array.from({ length: n }, (_, i) => i);
const sum = (values) => values.reduce((a, b) => a + b, 0);

function letter(k) {
  return k < 26 ? String.fromCharCode(65 + k) : String(k);
}

// The number of a time step, with its name if it has one.
function timeOf(run, t) {
  return run.times[t] ? `time ${t + 1} (${run.times[t]})` : `time ${t + 1}`;
}

// Returns true if the run may have more time steps later.
function mayContinue(run) {
  return run.n_steps === null ? run.status !== "complete" : run.steps < run.n_steps;
}

// Formats an accuracy in thousandths; -1: no test data, -2: not tested yet.
function testOf(accuracy, nothing = "no test data") {
  return accuracy === -2 ? "not tested yet" : accuracy < 0 ? nothing : level(accuracy / 1000) + unit();
}

// The value of a colour of the current theme, which canvases need.
function colour(name) {
  return getComputedStyle(document.documentElement)
    .getPropertyValue("--" + name)
    .trim();
}
const PALETTE = 20;
const paint = (k) => (k >= 0 && k < PALETTE ? `var(--m${k})` : "var(--other)");

function rgb(hex) {
  const n = parseInt(hex.slice(1), 16);
  return [(n >> 16) & 255, (n >> 8) & 255, n & 255];
}
function light([r, g, b]) {
  return 0.299 * r + 0.587 * g + 0.114 * b > 150;
}

// The colour scale of accuracies: low values have the strongest contrast in both themes.
function ramp(low, high) {
  const dark = document.documentElement.dataset.theme === "dark";
  const stops = (
    dark
      ? ["#ffd9a8", "#ff9d5c", "#d9622b", "#94431f", "#56331f", "#2c2a28"]
      : ["#5e1a05", "#a33c12", "#d9702f", "#f0a96c", "#f8d9b8", "#f6f2ec"]
  ).map(rgb);
  return (value) => {
    const x = (stops.length - 1) * Math.min(1, Math.max(0, (value - low) / Math.max(high - low, 1e-9)));
    const k = Math.min(stops.length - 2, Math.floor(x));
    return stops[k].map((from, i) => Math.round(from + (x - k) * (stops[k + 1][i] - from)));
  };
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// The selection is stored in the address, so that reloads, links and bookmarks keep it.
const state = {
  read() {
    return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  },
};
state.write = (changes) => {
  const now = { ...state.read(), ...changes };
  for (const key of Object.keys(now)) if (now[key] === null) delete now[key];
  history.replaceState(null, "", "#" + new URLSearchParams(now));
};

function tip(event, ...children) {
  const box = $("tip");
  if (!children.length) {
    box.hidden = true;
    return;
  }
  box.replaceChildren(...children);
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const x = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
  box.style.left = Math.max(8, x) + "px";
  box.style.top = Math.max(8, Math.min(event.clientY + 16, innerHeight - height - 8)) + "px";
}
