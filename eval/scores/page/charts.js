// Charts of the evaluation: lines with intervals, forests, layers, needle maps. A policy has one colour, dash and mark all
// over the page; which are hidden is one state for all charts.
const nats = x => Math.abs(x) < 0.1 ? x.toFixed(4) : x.toFixed(Math.abs(x) < 100 ? 3 : 1);
const share = x => (100 * x).toFixed(1) + "%";
const FIGURES = {
  kl: { name: "KL divergence from the full cache", axis: "KL, nats a token", show: nats, log: true },
  ratio: { name: "ratio to the baseline", axis: "ratio to the baseline", show: x => x.toFixed(2), line: 1 },
  nll_more: { name: "NLL above the full cache's", axis: "NLL above the full cache's, nats a token", show: nats, line: 0 },
  nll: { name: "NLL", axis: "NLL, nats a token", show: nats },
  agree: { name: "likeliest token is the full cache's", axis: "likeliest token is the full cache's", show: share, up: true },
  exact: { name: "right answers", axis: "right answers", show: share, up: true },
  hits: { name: "right tokens of the answers", axis: "right tokens of the answers", show: share, up: true },
  more: { name: "right answers minus the baseline's", axis: "right answers minus the baseline's", show: share, line: 0, up: true }
};
const known = x => x !== null && x !== undefined;

// ---- Policies: colours in the order of rank, so that those that lead have colours of their own
const rank = new Map(), hidden = new Set();
function addPolicies(names) { for (const n of names) if (!rank.has(n)) rank.set(n, rank.size); }
const colourOf = name => css("--p" + rank.get(name) % 8);
const dashOf = name => ["", "6 3", "2 3", "9 3 2 3"][(rank.get(name) >> 3) % 4];
function markOf(name, x, y, r) { // a shape beside the colour
  const i = rank.get(name), c = colourOf(name), fill = `fill="${c}" stroke="${css("--surface")}" stroke-width="1"`;
  switch ((i + 3 * (i >> 3)) % 6) {
    case 0: return `<circle cx="${x}" cy="${y}" r="${r}" ${fill}/>`;
    case 1: return `<rect x="${x - r}" y="${y - r}" width="${2 * r}" height="${2 * r}" ${fill}/>`;
    case 2: return `<path d="M${x} ${y - 1.3 * r}L${x + 1.3 * r} ${y}L${x} ${y + 1.3 * r}L${x - 1.3 * r} ${y}Z" ${fill}/>`;
    case 3: return `<path d="M${x} ${y - 1.2 * r}L${x + 1.2 * r} ${y + r}H${x - 1.2 * r}Z" ${fill}/>`;
    case 4: return `<path d="M${x} ${y + 1.2 * r}L${x + 1.2 * r} ${y - r}H${x - 1.2 * r}Z" ${fill}/>`;
    default: return `<path d="M${x - r} ${y - r}L${x + r} ${y + r}M${x + r} ${y - r}L${x - r} ${y + r}" stroke="${c}" stroke-width="2.2"/>`;
  }
}
function swatch(name) {
  return `<svg width="26" height="12" aria-hidden="true"><line x1="0" x2="26" y1="6" y2="6" stroke="${colourOf(name)}" stroke-width="2" ` +
    `stroke-dasharray="${dashOf(name)}"/>${markOf(name, 13, 6, 4)}</svg>`;
}
function focusOn(name) {
  for (const g of document.querySelectorAll("g[data-policy]"))
    g.classList.toggle("dim", name !== null && g.dataset.policy !== String(rank.get(name)));
}
// The legend of a section: a button a policy, pressed while it is shown; slim where the names stand in the plot too.
function policyLegend(parent, names, slim) {
  const d = document.createElement("div");
  d.className = slim ? "policies slim" : "policies";
  d.setAttribute("role", "group");
  d.setAttribute("aria-label", "policies shown");
  parent.appendChild(d);
  plots.push(() => {
    d.innerHTML = names.map(n => `<button type="button" aria-pressed="${!hidden.has(n)}" data-name="${esc(n)}">${swatch(n)}${esc(n)}</button>`).join("") +
      '<button type="button" class="plain" data-all="1">all</button><button type="button" class="plain" data-all="">none</button>';
  });
  d.onclick = e => {
    const b = e.target.closest("button");
    if (!b) return;
    if (b.dataset.all !== undefined) for (const n of names) b.dataset.all ? hidden.delete(n) : hidden.add(n);
    else if (!hidden.delete(b.dataset.name)) hidden.add(b.dataset.name);
    const at = [...d.children].indexOf(b);
    paintAll();
    d.children[at].focus({ preventScroll: true });
  };
  d.onpointerover = e => { const b = e.target.closest("button[data-name]"); focusOn(b && !hidden.has(b.dataset.name) ? b.dataset.name : null); };
  d.onpointerleave = () => focusOn(null);
}
const shown = names => names.filter(n => !hidden.has(n));

// ---- Axes
function niceTicks(low, high, n) {
  const by = step(high - low || 1, n, false), out = [];
  for (let v = Math.ceil(low / by - 1e-9) * by; v <= high + by * 1e-6; v += by) out.push(Math.abs(v) < by * 1e-9 ? 0 : v);
  return out;
}
function logTicks(low, high) {
  const out = [], few = Math.log10(high / low) > 1.6;
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const f of few ? [1, 3] : [1, 2, 5]) { const v = f * 10 ** e; if (v >= low * 0.999 && v <= high * 1.001) out.push(v); }
  return out;
}
const short = v => Math.abs(v) >= 1000 ? num(v) : Number(v.toPrecision(3)).toString();
// A scale from the values to pixels; log where all are above 0.
function scale(values, from, to, log, line) {
  let low = Math.min(...values), high = Math.max(...values);
  if (!values.length) low = 0, high = 1;
  if (!log && known(line)) low = Math.min(low, line), high = Math.max(high, line);
  if (log) low /= 1.08, high *= 1.08;
  else { const room = (high - low || 1) * 0.04; low -= room, high += room; }
  const f = log ? Math.log : x => x, a = f(low), b = f(high);
  const at = v => from + (f(v) - a) / (b - a || 1) * (to - from);
  at.low = low, at.high = high, at.log = log;
  return at;
}
function yAxis(Y, left, right, n, show) {
  return (Y.log ? logTicks(Y.low, Y.high) : niceTicks(Y.low, Y.high, n)).map(v =>
    `<line x1="${left}" x2="${right}" y1="${Y(v)}" y2="${Y(v)}" stroke="${css("--grid")}"/>` +
    `<text x="${left - 8}" y="${Y(v) + 4}" text-anchor="end">${show(v)}</text>`).join("");
}
// Names at the ends of lines, pushed apart: those that would overlap stand together around the middle of their lines.
function endLabels(ends, x, top, bottom) {
  ends.sort((a, b) => a.y - b.y);
  const gap = Math.min(15, (bottom - top) / Math.max(1, ends.length - 1)), stacks = [];
  const begin = s => Math.min(Math.max(s.sum / s.n - gap * (s.n - 1) / 2, top), bottom - gap * (s.n - 1));
  for (const e of ends) {
    stacks.push({ sum: e.y, n: 1 });
    for (let k = stacks.length - 1; k && begin(stacks[k - 1]) + gap * stacks[k - 1].n > begin(stacks[k]); k--) {
      const s = stacks.pop();
      stacks[k - 1].sum += s.sum, stacks[k - 1].n += s.n;
    }
  }
  let i = 0;
  for (const s of stacks) for (let k = 0; k < s.n; k++) ends[i++].at = begin(s) + gap * k;
  return ends.map(e => `<g data-policy="${rank.get(e.name)}"><path d="M${x} ${e.y}L${x + 12} ${e.at}" stroke="${colourOf(e.name)}" fill="none"/>` +
    `<text class="name" x="${x + 16}" y="${e.at + 4}">${esc(e.name)}</text></g>`).join("");
}
// From where to where a chart of these policies goes, with room for their names where there is any.
function span(width, names) {
  const labels = width > 760 && names.length;
  return { labels, left: 58, right: width - (labels ? 30 + Math.max(...names.map(n => n.length)) * 6.6 : 14) };
}
function tipRows(title, rows) { // [name, value, text]: the best first
  return `<b>${title}</b><table>` + rows.map(r => `<tr><td><i style="background:${colourOf(r[0])}"></i>${esc(r[0])}</td><td>${r[2]}</td></tr>`).join("") + "</table>";
}
const withInterval = (v, show) => show(v[0]) + (known(v[1]) ? ` [${show(v[1])}, ${show(v[2])}]` : "") + (v.few ? " few" : "");

// ---- Lines: series [{name, points: [[x, [value, low, high]]]}]; options: height, xs (ticks), xSpan, xShow, xLog, figure, marks
function curves(box, width, series, o) {
  const { labels, left, right } = span(width, series.map(s => s.name)), top = 24, bottom = o.height - 40;
  const figure = o.figure, all = [], xs = [];
  for (const s of series) s.points = s.points.filter(([, v]) => v && known(v[0]) && (!figure.log || v[0] > 0));
  for (const s of series) for (const [x, v] of s.points) {
    xs.push(x), all.push(v[0]);
    if (known(v[1]) && (!figure.log || v[1] > 0)) all.push(v[1], v[2]);
  }
  if (!all.length) return void (box.innerHTML = '<p class="none">Nothing to draw: no policy shown has these figures.</p>');
  const edge = o.marks ? 14 : 0, X = o.xSpan ? x => left + (x - o.xSpan[0]) / (o.xSpan[1] - o.xSpan[0]) * (right - left)
    : scale([...o.xs, ...xs], left + edge, right - edge, o.xLog);
  const Y = scale(all, bottom, top, figure.log, figure.line);
  let out = yAxis(Y, left, right, 6, figure.show === share ? v => Math.round(v * 100) + "%" : short);
  for (const x of o.xs)
    out += `<line x1="${X(x)}" x2="${X(x)}" y1="${bottom}" y2="${bottom + 4}" stroke="${css("--axis")}"/><text x="${X(x)}" y="${bottom + 18}" text-anchor="middle">${o.xShow(x)}</text>`;
  out += `<text x="${box.clientWidth < 500 ? 0 : left}" y="12">${esc(figure.axis)}${figure.log ? " (logarithmic)" : ""}</text>` +
    `<text x="${(left + right) / 2}" y="${o.height - 4}" text-anchor="middle">${o.xName}</text>`;
  if (known(figure.line)) out += `<line x1="${left}" x2="${right}" y1="${Y(figure.line)}" y2="${Y(figure.line)}" stroke="${css("--ink-2")}" stroke-dasharray="5 4"/>`;
  const ends = [];
  series.forEach((s, i) => {
    if (!s.points.length) return;
    const colour = colourOf(s.name), dodge = o.marks ? (i - (series.length - 1) / 2) * Math.min(3, 24 / series.length) : 0;
    const at = s.points.map(([x, v]) => [X(x) + dodge, v]);
    const path = at.map(([x, v], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${Y(v[0]).toFixed(1)}`).join("");
    const bounded = at.filter(([, v]) => known(v[1]) && (!figure.log || v[1] > 0));
    let g = "";
    if (bounded.length > 1 && series.length <= 4)
      g += `<path d="${bounded.map(([x, v], k) => `${k ? "L" : "M"}${x} ${Y(v[2])}`).join("")}${bounded.reverse().map(([x, v]) => `L${x} ${Y(v[1])}`).join("")}Z" fill="${colour}" fill-opacity="0.13"/>`;
    for (const [x, v] of bounded) g += `<line x1="${x}" x2="${x}" y1="${Y(v[1])}" y2="${Y(v[2])}" stroke="${colour}" stroke-width="1.2"/>`;
    g += `<path d="${path}" fill="none" stroke="${colour}" stroke-width="${o.marks ? 1.8 : 1.6}" stroke-dasharray="${dashOf(s.name)}" stroke-linejoin="round"/>`;
    if (o.marks) for (const [x, v] of at) g += markOf(s.name, x, Y(v[0]), 3.6);
    out += `<g data-policy="${rank.get(s.name)}">${g}</g>`;
    const last = at[at.length - 1];
    ends.push({ name: s.name, y: Y(last[1][0]) });
  });
  if (labels) out += endLabels(ends, right + 2, top, bottom);
  out += `<line class="at" x1="0" x2="0" y1="${top}" y2="${bottom}" stroke="${css("--axis")}" visibility="hidden"/>`;
  box.innerHTML = `<svg viewBox="0 0 ${width} ${o.height}" height="${o.height}" role="img" aria-label="${esc(figure.axis)} by ${o.xName}">${out}</svg>`;
  const tip = tipOf(box), at = box.querySelector(".at"), places = [...new Set(xs)].sort((a, b) => a - b);
  box.onpointermove = e => {
    const r = box.getBoundingClientRect(), px = e.clientX - r.left;
    if (px < left - 10 || px > right + 10) return box.onpointerleave();
    const x = places.reduce((a, b) => Math.abs(X(b) - px) < Math.abs(X(a) - px) ? b : a);
    at.setAttribute("x1", X(x)), at.setAttribute("x2", X(x)), at.setAttribute("visibility", "visible");
    const rows = series.map(s => [s.name, s.points.find(p => p[0] === x)]).filter(r => r[1]).map(([n, p]) => [n, p[1][0], withInterval(p[1], figure.show)]);
    tip.show(tipRows(o.xTip(x), rows.sort((a, b) => (a[1] - b[1]) * (figure.up ? -1 : 1))), px, e.clientY - r.top);
  };
  box.onpointerleave = () => { at.setAttribute("visibility", "hidden"); tip.hide(); };
}

// ---- A forest: a row a name, its value and interval on one axis: rows [{name, value: [v, low, high], styled}]
function forest(box, width, rows, figure) {
  rows = rows.filter(r => r.value && known(r.value[0]));
  if (!rows.length) return void (box.innerHTML = '<p class="none">Nothing to draw: there is no baseline, or no policy shown has figures.</p>');
  const longest = Math.max(...rows.map(r => r.name.length)), left = Math.min(width * 0.42, 16 + longest * 6.8);
  const words = rows.map(r => width > 620 ? withInterval(r.value, figure.show) : figure.show(r.value[0])), text = 10 + 6.6 * Math.max(...words.map(t => t.length));
  const right = width - text, row = 22, top = 8, bottom = top + row * rows.length, height = bottom + 40;
  const X = scale(rows.flatMap(r => r.value.filter(known)), left + 8, right - 8, false, figure.line);
  let out = niceTicks(X.low, X.high, width < 500 ? 5 : 7).map(v => `<line x1="${X(v)}" x2="${X(v)}" y1="${top}" y2="${bottom}" stroke="${css("--grid")}"/>` +
    `<text x="${X(v)}" y="${bottom + 16}" text-anchor="middle">${figure.show === share ? Math.round(v * 100) + "%" : short(v)}</text>`).join("");
  if (known(figure.line)) out += `<line x1="${X(figure.line)}" x2="${X(figure.line)}" y1="${top}" y2="${bottom}" stroke="${css("--ink-2")}" stroke-dasharray="5 4"/>`;
  rows.forEach((r, i) => {
    const y = top + row * (i + 0.5), [v, low, high] = r.value, colour = r.styled ? colourOf(r.name) : css("--held");
    const name = r.name.length * 6.8 > left - 12 ? r.name.slice(0, Math.floor((left - 12) / 6.8) - 1) + "…" : r.name;
    let g = `<text class="name" x="${left - 8}" y="${y + 4}" text-anchor="end"><title>${esc(r.name)}</title>${esc(name)}</text>`;
    if (known(low)) g += `<line x1="${X(low)}" x2="${X(high)}" y1="${y}" y2="${y}" stroke="${colour}" stroke-width="2"/>`;
    g += r.styled ? markOf(r.name, X(v), y, 4.5) : `<circle cx="${X(v)}" cy="${y}" r="4.5" fill="${colour}"/>`;
    g += `<text x="${right + 4}" y="${y + 4}">${words[i]}</text>`;
    out += r.styled ? `<g data-policy="${rank.get(r.name)}">${g}</g>` : g;
  });
  out += `<text x="${(left + right) / 2}" y="${height - 5}" text-anchor="middle">${esc(figure.axis)}</text>`;
  box.innerHTML = `<svg viewBox="0 0 ${width} ${height}" height="${height}" role="img" aria-label="${esc(figure.axis)}">${out}</svg>`;
}

// ---- One bar a layer: values, with the name of what they are
function layerBars(box, width, values, name, names) {
  const { left, right } = span(width, names), top = 20, bottom = 90, w = (right - left) / values.length, most = Math.max(...values, 1e-12);
  let out = `<text x="${left}" y="12">${name}</text><line x1="${left}" x2="${right}" y1="${bottom}" y2="${bottom}" stroke="${css("--axis")}"/>` +
    `<text x="${left - 8}" y="${top + 8}" text-anchor="end">${short(most)}</text><text x="${left - 8}" y="${bottom + 1}" text-anchor="end">0</text>`;
  values.forEach((v, l) => {
    const h = v / most * (bottom - top), bar = Math.max(1, Math.min(w - 2, 26));
    out += `<rect x="${left + w * (l + 0.5) - bar / 2}" y="${bottom - h}" width="${bar}" height="${h}" rx="1.5" fill="${css("--density")}"/>`;
    if (l % Math.ceil(24 / w) === 0) out += `<text x="${left + w * (l + 0.5)}" y="${bottom + 16}" text-anchor="middle">${l}</text>`;
  });
  box.innerHTML = `<svg viewBox="0 0 ${width} 112" height="112" role="img" aria-label="${name}">${out}</svg>`;
  const tip = tipOf(box);
  box.onpointermove = e => {
    const r = box.getBoundingClientRect(), l = Math.floor((e.clientX - r.left - left) / w);
    if (l < 0 || l >= values.length) return tip.hide();
    tip.show(`layer <b>${l}</b><br>${name}: <b>${values[l].toPrecision(4)}</b>`, e.clientX - r.left, 50);
  };
  box.onpointerleave = tip.hide;
}

// ---- A map of layers across and head groups down: values[layer][group], dark as they come near most
function headMap(box, width, values, most, name, names) {
  const { left, right } = span(width, names), top = 20, row = 18, w = (right - left) / values.length, n = values[0].length, height = top + row * n + 22;
  const colour = ramp(), dark = c => (c[0] * 299 + c[1] * 587 + c[2] * 114) / 1000 < 140;
  let out = `<text x="${left}" y="12">${esc(name)}</text>`;
  for (let g = 0; g < n; g++) out += `<text x="${left - 6}" y="${top + row * (g + 0.5) + 4}" text-anchor="end">${g}</text>`;
  values.forEach((groups, l) => {
    groups.forEach((v, g) => {
      const fill = colour(v / most);
      out += `<rect x="${left + w * l}" y="${top + row * g}" width="${Math.max(1, w - 1.5)}" height="${row - 1.5}" rx="1.5" fill="rgb(${fill})" stroke="${css("--grid")}"/>`;
      if (w > 25) out += `<text x="${left + w * (l + 0.5)}" y="${top + row * (g + 0.5) + 3}" text-anchor="middle" style="fill:${dark(fill) ? "#ffffff" : "#0b0b0b"};font-size:9px">${v.toFixed(1)}</text>`;
    });
    if (l % Math.ceil(24 / w) === 0) out += `<text x="${left + w * (l + 0.5)}" y="${height - 6}" text-anchor="middle">${l}</text>`;
  });
  box.innerHTML = `<svg viewBox="0 0 ${width} ${height}" height="${height}" role="img" aria-label="${esc(name)}">${out}</svg>`;
  const tip = tipOf(box);
  box.onpointermove = e => {
    const r = box.getBoundingClientRect(), l = Math.floor(((e.clientX - r.left) * width / r.width - left) / w), g = Math.floor((e.clientY - r.top - top) / row);
    if (!values[l] || values[l][g] === undefined) return tip.hide();
    tip.show(`layer <b>${l}</b>, head group <b>${g}</b><br><b>${values[l][g].toFixed(2)}</b> of an equal share`, e.clientX - r.left, e.clientY - r.top);
  };
  box.onpointerleave = tip.hide;
}

// ---- A needle map: depths down, contexts across; at(depth, context): {right, n, counts} or null
function needleMap(box, width, depths, contexts, at) {
  const left = 42, right = width - 2, cell = (right - left) / contexts.length, row = 24, top = 2, height = top + row * depths.length + 20;
  const colour = ramp(), dark = c => (c[0] * 299 + c[1] * 587 + c[2] * 114) / 1000 < 140;
  let out = "";
  depths.forEach((d, i) => {
    out += `<text x="${left - 6}" y="${top + row * (i + 0.5) + 4}" text-anchor="end">${Math.round(d * 100)}%</text>`;
    contexts.forEach((c, k) => {
      const v = at(d, c), x = left + cell * k, y = top + row * i;
      if (!v) return void (out += `<rect x="${x}" y="${y}" width="${cell - 2}" height="${row - 2}" rx="2" fill="none" stroke="${css("--grid")}"/>`);
      const fill = colour(v.right), ink = dark(fill) ? "#ffffff" : "#0b0b0b";
      out += `<rect x="${x}" y="${y}" width="${cell - 2}" height="${row - 2}" rx="2" fill="rgb(${fill})" stroke="${css("--grid")}" ${v.counts ? "" : 'fill-opacity="0.35" stroke-dasharray="3 2"'}/>`;
      if (cell > 26) out += `<text x="${x + cell / 2 - 1}" y="${y + row / 2 + 3}" text-anchor="middle" style="fill:${v.counts ? ink : css("--ink")};font-size:11px">${Math.round(v.right * 100)}</text>`;
    });
  });
  contexts.forEach((c, k) => { out += `<text x="${left + cell * (k + 0.5) - 1}" y="${height - 5}" text-anchor="middle">${c >= 1000 ? Number((c / 1024).toFixed(1)) + "k" : c}</text>`; });
  box.innerHTML = `<svg viewBox="0 0 ${width} ${height}" height="${height}" role="img" aria-label="right answers by depth and context">${out}</svg>`;
  const tip = tipOf(box);
  box.onpointermove = e => {
    const r = box.getBoundingClientRect(), x = (e.clientX - r.left) * width / r.width - left, y = e.clientY - r.top - top;
    const i = Math.floor(y / row), k = Math.floor(x / cell), v = i >= 0 && i < depths.length && k >= 0 && k < contexts.length ? at(depths[i], contexts[k]) : null;
    if (!v) return tip.hide();
    tip.show(`depth ${Math.round(depths[i] * 100)}%, context ${num(contexts[k])}<br><b>${share(v.right)}</b> of ${v.n}${v.counts ? "" : "<br>not counted: the full cache does not know"}`, e.clientX - r.left, y);
  };
  box.onpointerleave = tip.hide;
}
