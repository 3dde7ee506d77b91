"use strict";
// What the pages share: figures as words, axes, tips, the parts a page is made of. Plots draw into a box of the width it
// has, and again when that changes.
const data = JSON.parse(document.getElementById("data").textContent);
// A colour of the scheme; asked of the browser once a painting, since asking between changes makes it lay out again.
const schemeColours = new Map();
function css(name) {
  if (!schemeColours.has(name)) schemeColours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return schemeColours.get(name);
}
const esc = text => String(text).replace(/[&<>"]/g, c => "&#" + c.charCodeAt(0) + ";");
const num = n => n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en-US");
const real = (x, digits) => x === null || x === undefined ? "–" : x.toFixed(digits);
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let u = 0;
  while (n >= 1024 && u < 4) n /= 1024, u++;
  return (u && n < 100 ? n.toFixed(1) : Math.round(n)) + " " + units[u];
}
function time(s) {
  if (s === null || s === undefined) return "–";
  const show = (x, digits, unit) => Number(x.toFixed(digits)) + " " + unit;
  if (s < 1e-9) return "0";
  if (s < 1e-6) return show(s * 1e9, 0, "ns");
  if (s < 1e-3) return show(s * 1e6, 0, "µs");
  if (s < 1) return show(s * 1e3, s < 0.1 ? 1 : 0, "ms");
  if (s < 120) return show(s, s < 10 ? 2 : 1, "s");
  return s < 7200 ? show(s / 60, 1, "min") : show(s / 3600, 1, "h");
}
const percent = (a, b) => b ? (100 * a / b).toFixed(1) + "%" : "–";

// A round step so that about n of them make the span; factors suit what is shown (bytes: powers of two).
function step(span, n, binary) {
  const base = binary ? 2 : 10, unit = Math.pow(base, Math.floor(Math.log(span / n) / Math.log(base)));
  for (const f of binary ? [1, 2] : [1, 2, 5, 10]) if (unit * f * n >= span) return unit * f;
  return unit * base;
}
function ticks(max, n, binary) {
  const out = [], by = step(max || 1, n, binary);
  for (let v = 0; v <= (max || 1) * 1.0001; v += by) out.push(v);
  return out;
}
// The tip of a plot, kept inside it.
function tipOf(box) {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  box.appendChild(tip);
  return {
    show(html, x, y) {
      tip.innerHTML = html;
      tip.style.display = "block";
      const w = tip.offsetWidth, h = tip.offsetHeight;
      tip.style.left = Math.max(0, x + 14 + w > box.clientWidth ? x - w - 14 : x + 14) + "px";
      tip.style.top = Math.max(0, Math.min(y - h / 2, box.clientHeight - h)) + "px";
    },
    hide() { tip.style.display = "none"; }
  };
}
const plots = [];
// paint(box, width) draws; again at each new width and colour scheme.
function plot(box, paint) {
  plots.push(() => { box.replaceChildren(); paint(box, Math.max(240, box.clientWidth)); });
}
let drawn = 0;
function paintAll() {
  drawn = document.documentElement.clientWidth;
  schemeColours.clear();
  plots.forEach(p => p());
}
addEventListener("resize", () => { if (document.documentElement.clientWidth !== drawn) paintAll(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintAll);

function mix(a, b, x) { return a.map((v, i) => Math.round(v + (b[i] - v) * x)); }
function ramp() { // one hue, from the surface to the darkest (in the dark: the lightest)
  const [low, mid, high] = ["--low", "--mid", "--high"].map(n => css(n).split(",").map(Number));
  return x => x <= 0 ? low : x < 0.5 ? mix(low, mid, x * 2) : mix(mid, high, x * 2 - 1);
}
function rampCss(at = ramp()) {
  return `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(x => `rgb(${at(x)})`).join(", ")})`;
}

// ---- The parts of a page
const main = document.createElement("main");
document.body.appendChild(main);
function section(title, text, parent) {
  const s = document.createElement("section");
  s.innerHTML = `<h2>${title}</h2>${text ? `<p>${text}</p>` : ""}`;
  (parent || main).appendChild(s);
  return s;
}
function pair() {
  const d = document.createElement("div");
  d.className = "pair";
  main.appendChild(d);
  return d;
}
function draw(parent, paint) {
  const box = document.createElement("div");
  box.className = "plot";
  parent.appendChild(box);
  plot(box, paint);
}
// columns: [head, row => cell, "text" for words]; total: a last row, or nothing
function table(parent, columns, rows, total) {
  const cells = (r, tag) => columns.map(c => `<${tag}${c[2] ? ' class="text"' : ""}>${c[1](r)}</${tag}>`).join("");
  const box = document.createElement("div");
  box.className = "scroll";
  box.innerHTML = `<table><thead><tr>${columns.map(c => `<th${c[2] ? ' class="text"' : ""}>${c[0]}</th>`).join("")}</tr></thead><tbody>` +
    rows.map(r => `<tr>${cells(r, "td")}</tr>`).join("") + (total ? `<tr>${cells(total, "th")}</tr>` : "") + "</tbody></table>";
  parent.appendChild(box);
}
// What is chosen, by key; options: [value, text]. A choice paints all again.
const state = {};
function choice(parent, label, key, options) {
  if (options.length < 2) return;
  const l = document.createElement("label");
  l.innerHTML = `${label} <select>${options.map(([v, t]) => `<option value="${esc(v)}">${esc(t)}</option>`).join("")}</select>`;
  const select = l.querySelector("select");
  select.onchange = () => { state[key] = options[select.selectedIndex][0]; paintAll(); };
  plots.push(() => { select.selectedIndex = Math.max(0, options.findIndex(o => o[0] === state[key])); });
  parent.appendChild(l);
}
function controls(parent) {
  const d = document.createElement("div");
  d.className = "controls";
  parent.appendChild(d);
  return d;
}
function legend(parent, entries) {
  const d = document.createElement("div");
  d.className = "legend";
  d.innerHTML = entries.map(([name, colour, dash]) =>
    `<span><i class="${dash ? "dash" : ""}" style="${dash ? "border-color" : "background"}:var(${colour})"></i>${name}</span>`).join("");
  parent.appendChild(d);
}
