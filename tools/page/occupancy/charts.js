// Charts of the occupancy page: lines over time, the heat map, bars, histograms.
const S = data.series, points = S.begin_s.length;
const kept = n => data.block_bytes ? bytes(n * data.block_bytes) : num(n) + " blocks";

const T0 = points ? S.begin_s[0] : 0, T1 = points ? S.end_s[points - 1] : 1, span = Math.max(T1 - T0, 1e-9);
function timeAxis(left, right, y, n) {
  let out = "";
  for (const t of ticks(span, n, false)) {
    const x = left + t / span * (right - left), end = t / span > 0.97;
    out += `<line x1="${x}" x2="${x}" y1="${y}" y2="${y + 4}" stroke="${css("--axis")}"/>` +
      `<text x="${x}" y="${y + 17}" text-anchor="${t === 0 ? "start" : end ? "end" : "middle"}">${time(t)}</text>`;
  }
  return out;
}
function pointAt(t) { // the last point that begins at or before t
  let a = 0, b = points - 1;
  while (a < b) {
    const m = (a + b + 1) >> 1;
    if (S.begin_s[m] <= t) a = m; else b = m - 1;
  }
  return a;
}

// Steps over time, one area and lines: series [{values, colour, area}], value -> text.
function lines(box, width, height, series, max, show, binary, limit) {
  const left = 66, right = width - 12, top = 10, bottom = height - 26;
  const X = t => left + (t - T0) / span * (right - left), Y = v => bottom - v / (max || 1) * (bottom - top);
  let out = "";
  for (const v of ticks(max, 4, binary))
    out += `<line x1="${left}" x2="${right}" y1="${Y(v)}" y2="${Y(v)}" stroke="${css("--grid")}"/>` +
      `<text x="${left - 8}" y="${Y(v) + 4}" text-anchor="end">${show(v)}</text>`;
  out += timeAxis(left, right, bottom, width < 500 ? 3 : 7);
  for (const s of series) {
    let path = "";
    for (let i = 0; i < points; i++)
      path += `${i ? "L" : "M"}${X(S.begin_s[i]).toFixed(1)} ${Y(s.values[i]).toFixed(1)}L${X(S.end_s[i]).toFixed(1)} ${Y(s.values[i]).toFixed(1)}`;
    if (s.area && points)
      out += `<path d="${path}L${X(T1)} ${bottom}L${X(T0)} ${bottom}Z" fill="${css(s.colour)}" fill-opacity="0.16"/>`;
    out += `<path d="${path}" fill="none" stroke="${css(s.colour)}" stroke-width="2" stroke-linejoin="round"/>`;
  }
  if (limit !== undefined && limit <= max)
    out += `<line x1="${left}" x2="${right}" y1="${Y(limit)}" y2="${Y(limit)}" stroke="${css("--ink-2")}" stroke-dasharray="5 4"/>`;
  out += `<line class="at" x1="0" x2="0" y1="${top}" y2="${bottom}" stroke="${css("--axis")}" visibility="hidden"/>`;
  box.innerHTML = `<svg viewBox="0 0 ${width} ${height}" height="${height}" role="img">${out}</svg>`;
  const tip = tipOf(box), at = box.querySelector(".at");
  box.onpointermove = e => {
    const x = e.clientX - box.getBoundingClientRect().left;
    if (!points || x < left || x > right) return box.onpointerleave();
    const i = pointAt(T0 + (x - left) / (right - left) * span);
    at.setAttribute("x1", x), at.setAttribute("x2", x), at.setAttribute("visibility", "visible");
    tip.show(`<b>${time(S.begin_s[i])}</b><br>` + series.map(s => `${s.name}: <b>${show(s.values[i])}</b>`).join("<br>"),
      x, e.clientY - box.getBoundingClientRect().top);
  };
  box.onpointerleave = () => { at.setAttribute("visibility", "hidden"); tip.hide(); };
}

// The whole pool, part on part: parts [{name, colour, values}], from below; over: a line {name, values, base} above its base.
function stack(box, width, height, parts, over, max, show, binary) {
  const left = 66, right = width - 12, top = 10, bottom = height - 26;
  const X = t => left + (t - T0) / span * (right - left), Y = v => bottom - v / (max || 1) * (bottom - top);
  const edge = f => { // steps: each point holds from its begin to the next one's
    let path = "";
    for (let i = 0; i < points; i++) path += `${i ? "L" : "M"}${X(S.begin_s[i]).toFixed(1)} ${Y(f(i)).toFixed(1)}L${X(i + 1 < points ? S.begin_s[i + 1] : T1).toFixed(1)} ${Y(f(i)).toFixed(1)}`;
    return path;
  };
  const below = k => i => parts.slice(0, k).reduce((t, p) => t + p.values[i], 0);
  let out = "";
  for (let k = parts.length - 1; k >= 0 && points; k--) // the upper ones first: each covers what is below it
    out += `<path d="${edge(below(k + 1))}L${X(T1)} ${bottom}L${X(T0)} ${bottom}Z" fill="${css("--surface")}"/>` +
      `<path d="${edge(below(k + 1))}L${X(T1)} ${bottom}L${X(T0)} ${bottom}Z" fill="${css(parts[k].colour)}" fill-opacity="${parts[k].name === "free" ? 0.35 : 0.8}"/>`;
  if (points) out += `<path d="${edge(i => over.base[i] + over.values[i])}" fill="none" stroke="${css("--ink-2")}" stroke-width="1.5" stroke-dasharray="5 4"/>`;
  for (const v of ticks(max, 4, binary))
    out += `<line x1="${left}" x2="${right}" y1="${Y(v)}" y2="${Y(v)}" stroke="${css("--grid")}" stroke-opacity="0.6"/>` +
      `<text x="${left - 8}" y="${Y(v) + 4}" text-anchor="end">${show(v)}</text>`;
  out += timeAxis(left, right, bottom, width < 500 ? 3 : 7);
  box.innerHTML = `<svg viewBox="0 0 ${width} ${height}" height="${height}" role="img" aria-label="the pool over time">${out}</svg>`;
  const tip = tipOf(box);
  box.onpointermove = e => {
    const r = box.getBoundingClientRect(), x = e.clientX - r.left;
    if (!points || x < left || x > right) return tip.hide();
    const i = pointAt(T0 + (x - left) / (right - left) * span);
    tip.show(`<b>${time(S.begin_s[i])}</b><br>` + [...parts].reverse().concat(over).map(p => `${p.name}: <b>${show(Math.round(p.values[i]))}</b>`).join("<br>"), x, e.clientY - r.top);
  };
  box.onpointerleave = tip.hide;
}

// Against the mean of the layers: this much less or more has the full colour.
const SPREAD = 0.5;
function diverging() { // from the colour of less over the surface to that of more
  const rgb = name => css(name).match(/\w\w/g).map(h => parseInt(h, 16)), [less, none, more] = [rgb("--full"), rgb("--surface"), rgb("--held")];
  return x => x < 0.5 ? mix(less, none, Math.max(0, x) * 2) : mix(none, more, Math.min(1, x) * 2 - 1);
}

// Layers down, time across; a column of pixels takes the most of the points it covers.
function heat(box, width) {
  const n = data.n_layers, left = 44, right = width - 12, w = right - left;
  const row = Math.max(n > 64 ? 4 : 8, Math.min(18, Math.floor(520 / n))), h = row * n, top = 4, ratio = devicePixelRatio || 1;
  let most = 1;
  for (const r of S.blocks) for (const v of r) if (v > most) most = v;
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(w * ratio)), canvas.height = h;
  canvas.style.cssText = `position:absolute;left:${left}px;top:${top}px;width:${w}px;height:${h}px;image-rendering:pixelated`;
  const relative = state.heat === "mean", means = S.blocks.map(r => r.reduce((a, v) => a + v, 0) / n);
  const part = (v, mean) => !relative ? v / most : mean ? 0.5 + (v / mean - 1) / (2 * SPREAD) : 0.5;
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, h), colour = relative ? diverging() : ramp();
  for (let x = 0; points && x < canvas.width; x++) {
    const a = pointAt(T0 + x / canvas.width * span), b = pointAt(T0 + (x + 1) / canvas.width * span);
    const gap = S.end_s[a] < T0 + x / canvas.width * span && a === b; // nothing ran: the pool keeps what it had
    for (let l = 0; l < n; l++) {
      let v = 0, mean = 0;
      for (let i = a; i <= b; i++) if (S.blocks[i][l] >= v) v = S.blocks[i][l], mean = means[i];
      const [r, g, bl] = colour(gap && v === 0 && !relative ? 0 : part(v, mean));
      for (let y = l * row; y < (l + 1) * row - (row > 6 ? 1 : 0); y++) {
        const k = 4 * (y * canvas.width + x);
        image.data[k] = r, image.data[k + 1] = g, image.data[k + 2] = bl, image.data[k + 3] = 255;
      }
    }
  }
  context.putImageData(image, 0, 0);
  const every = Math.max(1, Math.ceil(16 / row));
  let labels = "";
  for (let l = 0; l < n; l += every)
    labels += `<text x="${left - 8}" y="${top + l * row + row / 2 + 4}" text-anchor="end">${l}</text>`;
  box.innerHTML = `<svg viewBox="0 0 ${width} ${h + 30}" height="${h + 30}" role="img" aria-label="blocks of each layer over time">` +
    labels + timeAxis(left, right, h + top, width < 500 ? 3 : 7) + "</svg>";
  box.appendChild(canvas);
  const tip = tipOf(box);
  box.onpointermove = e => {
    const r = box.getBoundingClientRect(), x = e.clientX - r.left, y = e.clientY - r.top;
    const l = Math.floor((y - top) / row);
    if (!points || x < left || x > right || l < 0 || l >= n) return tip.hide();
    const i = pointAt(T0 + (x - left) / w * span);
    tip.show(`layer <b>${l}</b> at ${time(S.begin_s[i])}<br><b>${num(S.blocks[i][l])}</b> blocks, ${kept(S.blocks[i][l])}<br>` +
      `${percent(S.blocks[i][l], means[i])} of the layers' mean`, x, y);
  };
  box.onpointerleave = tip.hide;
}

// One bar a layer, two panels side by side on one scale of layers: what it got, and why.
function bars(box, width, panels) {
  const n = data.n_layers, row = n > 48 ? 10 : 16, top = 24, height = top + n * row + 6, left = 34, gap = 26;
  const w = (width - left - 12 - gap * (panels.length - 1)) / panels.length;
  let out = "";
  for (let l = 0; l < n; l += row < 12 ? 2 : 1)
    out += `<text x="${left - 8}" y="${top + l * row + row / 2 + 4}" text-anchor="end">${l}</text>`;
  panels.forEach((p, k) => {
    const x0 = left + k * (w + gap), most = Math.max(...p.values.map(v => v || 0), 1e-9), room = w - 46;
    out += `<text class="name" x="${x0}" y="13">${p.name}</text><line x1="${x0}" x2="${x0}" y1="${top}" y2="${height - 6}" stroke="${css("--axis")}"/>`;
    p.values.forEach((v, l) => {
      if (v === null) return;
      const length = Math.max(1, v / most * room), y = top + l * row + 2, bar = row - 4, r = Math.min(3, length, bar / 2);
      out += `<path d="M${x0} ${y}h${length - r}q${r} 0 ${r} ${r}v${bar - 2 * r}q0 ${r} ${-r} ${r}H${x0}Z" fill="${css(p.colour)}"/>`;
      if (row >= 12) out += `<text x="${x0 + length + 5}" y="${y + bar / 2 + 4}">${p.show(v)}</text>`;
    });
  });
  box.innerHTML = `<svg viewBox="0 0 ${width} ${height}" height="${height}" role="img">${out}</svg>`;
  const tip = tipOf(box);
  box.onpointermove = e => {
    const r = box.getBoundingClientRect(), l = Math.floor((e.clientY - r.top - top) / row);
    if (l < 0 || l >= n) return tip.hide();
    tip.show(`layer <b>${l}</b><br>` + panels.map(p => `${p.name}: <b>${p.values[l] === null ? "–" : p.show(p.values[l])}</b>`).join("<br>"),
      e.clientX - r.left, e.clientY - r.top);
  };
  box.onpointerleave = tip.hide;
}

// A histogram of powers of two; unit turns a value into text.
function histogram(box, width, h, show) {
  const first = h.buckets.findIndex(v => v), shown = h.buckets.slice(first), left = 8, bottom = 118, top = 14;
  if (first < 0) return void (box.innerHTML = '<p class="none">None yet.</p>');
  const w = (width - 2 * left) / shown.length, bar = Math.min(24, Math.max(2, w - 2)), most = Math.max(...shown);
  let out = `<line x1="${left}" x2="${width - left}" y1="${bottom}" y2="${bottom}" stroke="${css("--axis")}"/>`;
  const floor = b => b + first ? Math.pow(2, b + first - 1) : 0, every = Math.ceil(62 / w);
  shown.forEach((v, b) => {
    const x = left + b * w + (w - bar) / 2, length = v / most * (bottom - top);
    if (v) out += `<rect x="${x}" y="${bottom - length}" width="${bar}" height="${length}" rx="2" fill="${css("--held")}"/>`;
    if (b % every === 0) out += `<text x="${left + b * w + w / 2}" y="${bottom + 17}" text-anchor="middle">${show(floor(b))}</text>`;
  });
  box.innerHTML = `<svg viewBox="0 0 ${width} 140" height="140" role="img">${out}</svg>`;
  const tip = tipOf(box);
  box.onpointermove = e => {
    const r = box.getBoundingClientRect(), b = Math.floor((e.clientX - r.left - left) / w);
    if (b < 0 || b >= shown.length) return tip.hide();
    tip.show(`from ${show(floor(b))} to under ${show(floor(b + 1))}<br><b>${num(shown[b])}</b> of ${num(h.n)}`, e.clientX - r.left, 60);
  };
  box.onpointerleave = tip.hide;
}
