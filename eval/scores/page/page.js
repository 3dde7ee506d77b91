// The page: sections in the order of questions. Everything it says is in data.
const texts = data.sections.filter(s => !s.task && !s.table), tasks = data.sections.filter(s => s.task), ablations = data.sections.filter(s => s.table);
const TITLES = { divergence: "Divergence from the full cache", nll: "Likelihood of the text", recall: "Recall", needle: "Needle", multiturn: "Dialogues" };
const TABLES = { 4: "layer budgets", 6: "parts of the method", 7: "similarity of keys or values", 8: "merge weights", 9: "heavy hitters to recent window, and the EMA" };
const titleOf = s => TITLES[s.measure] || s.measure;
const groupOf = (s, by) => s.groups.filter(g => by.includes(g.by));
const scoreOf = (s, g, name, rho) => g && g.scores[s.policies.indexOf(name)] && g.scores[s.policies.indexOf(name)][s.rhos.indexOf(rho)];
// What an interval is drawn from stands beside it where that is little.
for (const s of data.sections) for (const g of s.groups) for (const x of g.scores.flat())
  for (const f in FIGURES) if (x[f]) x[f].few = (f === "ratio" || f === "more" ? x.drawn_pairs : x.drawn) < data.few;
const fewNote = s => s.groups[0].scores.flat().some(x => x[s.figure] && x[s.figure].few)
  ? ` <b>Few</b>: drawn from under ${data.few} ${data.resampled === "sources" ? "sources" : places(s)}; such an interval is too narrow, and who leads may be chance.` : "";
const rhoText = rho => "rho " + Number(rho.toPrecision(3));

// ---- State that all sections share (rho); each section's own choices are kept by its name
const rhos = [...new Set(data.sections.flatMap(s => s.rhos))].sort((a, b) => a - b);
state.rho = rhos.includes(0.2) ? 0.2 : rhos[0];
const rhoChoice = (parent, s) => choice(parent, "rho", "rho", s.rhos.map(r => [r, String(Number(r.toPrecision(3)))]));
const rhoIn = s => s.rhos.includes(state.rho) ? state.rho : s.rhos[0];
// Groups as options: all, then by context and kind, or by task and placement.
function groupName(g) {
  const words = [g.kind, g.task, g.placement].filter(x => x);
  if (g.context) words.push("context " + num(g.context));
  return words.join(", ") || "all";
}
function groupChoice(parent, s, key, by) {
  const list = groupOf(s, by).filter(g => g.units);
  state[key] = 0;
  choice(parent, "over", key, list.map((g, i) => [i, groupName(g)]));
  return () => list[state[key]] || s.groups[0];
}
function detail(parent, summary) {
  const d = document.createElement("details");
  d.innerHTML = `<summary>${summary}</summary>`;
  parent.appendChild(d);
  return d;
}
function repainted(parent, html) {
  const d = document.createElement("div");
  parent.appendChild(d);
  plots.push(() => { d.innerHTML = html(); });
}
const places = s => s.task ? "samples" : "places";
const list = items => items.length ? `<ul class="plain">${items.map(i => `<li>${i}</li>`).join("")}</ul>` : "";

// Policies by the main figure over a group, the best first: at the rhos given, the first of them at which a policy has it.
function ranked(s, at = s.rhos, g = s.groups[0]) {
  const figure = (n, rho) => ((scoreOf(s, g, n, rho) || {})[s.figure] || [])[0];
  const key = n => {
    const first = at.map(rho => figure(n, rho)).find(known);
    return known(first) ? first * (FIGURES[s.figure].up ? -1 : 1) : Infinity;
  };
  return [...s.policies].sort((a, b) => key(a) - key(b) || 0);
}
for (const s of [...texts, ...tasks]) addPolicies(ranked(s));

// ---- The head
{
  const run = data.runs[0] || {}, model = run.model || {}, lead = texts[0] || tasks[0];
  const tiles = [];
  if (lead) lead.rhos.forEach((rho, i) => {
    const base = lead.baselines[i], best = lead.best[i];
    const s = best && scoreOf(lead, lead.groups[0], best, rho), v = s && (lead.task ? s.exact : s.ratio);
    if (!s || !s[lead.figure]) return;
    const few = s[lead.figure].few ? `, of few ${places(lead)} (${num(s.drawn)})` : "";
    tiles.push([esc(best), (lead.task ? `best at ${rhoText(rho)}: ${v ? share(v[0]) : "–"} right` :
      v && base && base !== best ? `best at ${rhoText(rho)}: ${v[0].toFixed(2)} of ${esc(base)}'s ${lead.figure === "kl" ? "KL" : "loss"}` : `best at ${rhoText(rho)}`) + few]);
  });
  for (const s of [...texts, ...tasks]) tiles.push([num(s.groups[0].units), `${places(s)}: ${titleOf(s).toLowerCase()}`]);
  const head = document.createElement("header");
  head.innerHTML = `<h1>Cache policies at equal memory</h1><p class="sub">${esc(model.name || "kvfold eval")}${model.file ? ` (${esc(model.file)})` : ""} · ` +
    `${num(Object.keys(data.sources).length)} sources · ${num(data.cells)} cells · intervals: 95%, paired bootstrap, ${num(data.resamples)} resamples of ` +
    `${data.resampled === "sources" ? "whole sources" : "places or samples"} · baseline: ${esc(data.baseline === "best" ? "the best published policy at each rho" : data.baseline)}</p>` +
    `<div class="tiles">${tiles.map(([b, t]) => `<div class="tile"><b>${b}</b><span>${t}</span></div>`).join("")}</div>`;
  main.appendChild(head);
}

// ---- A score by how much is kept, its table, and what is left out
function scoreSection(s) {
  const key = s.measure, figures = (s.task ? ["exact", "more", "hits", "nll_more"] : ["kl", "ratio", "nll_more", "nll", "agree", "hits"]).filter(f =>
    s.groups[0].scores.some(row => row.some(x => x[f])));
  const box = section(titleOf(s) + " by memory", `Means over ${num(s.groups[0].units)} ${places(s)}; bars and bands are intervals of 95%.${fewNote(s)} ` +
    "rho is the share of the full cache's blocks that a policy may hold." + (s.task ? ` Counted where the full cache answers at least ${Math.round(data.full_least * 100)}%.` : ""));
  const c = controls(box);
  state[key + ".figure"] = figures[0];
  choice(c, "figure", key + ".figure", figures.map(f => [f, FIGURES[f].name]));
  const group = groupChoice(c, s, key + ".group", s.task ? ["all", "context", "task", "task and placement"] : ["all", "context", "kind"]);
  const names = ranked(s);
  policyLegend(box, names);
  draw(box, (b, w) => {
    const f = state[key + ".figure"], g = group();
    const series = shown(names).map(n => ({ name: n, points: s.rhos.map(r => [r, (scoreOf(s, g, n, r) || {})[f]]) }));
    curves(b, w, series, { height: w < 500 ? 330 : 400, xs: s.rhos, xShow: r => Number(r.toPrecision(3)), xLog: true, xTip: rhoText, figure: withFull(f, g), marks: true,
      xName: "rho" });
  });
  const d = detail(box, "Table, with what was held");
  rhoChoice(controls(d), s);
  repainted(d, () => scoreTable(s, group(), rhoIn(s), figures));
  leftOut(box, s);
}
// What the full cache does is the line to reach, where it is known.
function withFull(f, g) {
  const full = f === "exact" ? g.full : f === "hits" ? g.full_hits : null;
  return known(full) ? { ...FIGURES[f], line: full, axis: `${FIGURES[f].axis}; dashed: the full cache, ${share(full)}` } : FIGURES[f];
}
function scoreTable(s, g, rho, figures) {
  const rows = s.table ? s.policies : ranked(s, [rho], g);
  const base = s.baselines[s.rhos.indexOf(rho)];
  const head = ["policy", ...figures.map(f => esc(f === "ratio" || f === "more" ? `${FIGURES[f].name} ${base}` : FIGURES[f].name)), "held, of the target", "most", places(s)];
  const body = rows.map(n => {
    const x = scoreOf(s, g, n, rho);
    return [esc(n), ...figures.map(f => x[f] ? withInterval(x[f], FIGURES[f].show) : "–"), known(x.held) ? share(x.held) : "–",
      known(x.held_most) ? share(x.held_most) : "–", x.n === g.units ? num(x.n) : `${num(x.n)} of ${num(g.units)}`];
  });
  return `<p class="none">${esc(groupName(g))}, ${rhoText(rho)}</p><div class="scroll"><table><thead><tr>${head.map(h => `<th>${h}</th>`).join("")}</tr></thead><tbody>` +
    body.map(r => `<tr>${r.map(c => `<td>${c}</td>`).join("")}</tr>`).join("") + "</tbody></table></div>";
}
function leftOut(box, s) {
  const dropped = groupOf(s, ["cell"]).filter(g => !g.counts).map(g => `${esc(groupName(g))}: the full cache answers ${share(g.full)} of ${num(g.units)}`);
  const empty = [];
  s.policies.forEach((n, p) => s.rhos.forEach((r, k) => {
    const x = s.groups[0].scores[p][k], words = [];
    if (x.empty) words.push(`${num(x.empty)} empty${x.empty > 1 ? ", the first" : ""}: ${esc(x.why)}`);
    if (x.over) words.push(`${num(x.over)} held more than 101% of the target`);
    if (x.missing && x.n) words.push(`${num(x.missing)} not run`);
    if (words.length) empty.push(`${esc(n)} at ${rhoText(r)}: ${words.join("; ")}`);
  }));
  if (dropped.length) detail(box, `Not counted (${dropped.length})`).insertAdjacentHTML("beforeend", list(dropped));
  if (empty.length) detail(box, `Empty cells, and what broke the rule (${empty.length})`).insertAdjacentHTML("beforeend", list(empty));
}

// ---- Against the baseline
function againstSection(s) {
  if (!s.baselines.some(known)) return;
  const key = "against " + s.measure, f = s.task ? "more" : "ratio";
  const box = section(`${titleOf(s)}: against the baseline`, s.task ? "Difference of the shares of right answers over the same samples; right of the line is better than the baseline."
    : `Ratio of mean ${s.figure === "kl" ? "KL" : "loss"} over the same places; left of the line is better than the baseline.`);
  const c = controls(box);
  rhoChoice(c, s);
  const group = groupChoice(c, s, key, s.task ? ["all", "context", "task", "task and placement"] : ["all", "context", "kind"]);
  policyLegend(box, ranked(s), true);
  draw(box, (b, w) => {
    const rho = rhoIn(s), base = s.baselines[s.rhos.indexOf(rho)];
    const rows = shown(ranked(s, [rho], group()))
      .map(n => ({ name: n, value: (scoreOf(s, group(), n, rho) || {})[f], styled: true }));
    forest(b, w, rows, { ...FIGURES[f], axis: s.task ? `right answers, more than ${base}` : `${s.figure === "kl" ? "KL" : "loss"} over that of ${base}` });
  });
}

// ---- By position
function positionSection(s) {
  if (!s.curves || !s.curves.groups.length) return;
  const key = "position " + s.measure, curves_ = s.curves.groups, figures = ["nll_more", "nll", "kl"].filter(f => curves_[0][f].some(p => p.some(known)));
  if (!figures.length) return;
  const box = section("By position", "Running mean over the tokens after the prompt, of all places together: whether a policy loses more the longer it goes on.");
  const c = controls(box), names = ranked(s);
  state[key + ".figure"] = figures[0], state[key + ".group"] = 0; // group: all of them
  choice(c, "figure", key + ".figure", figures.map(f => [f, FIGURES[f].name]));
  rhoChoice(c, s);
  choice(c, "over", key + ".group", curves_.map((g, i) => [i, g.context ? "context " + num(g.context) : "all"]));
  policyLegend(box, names);
  draw(box, (b, w) => {
    const f = state[key + ".figure"], g = curves_[state[key + ".group"]], rho = s.rhos.indexOf(rhoIn(s)), ends = s.curves.ends;
    const from = Math.min(Math.ceil(ends.length / 24), ends.length - 1); // the first few are noise
    const series = shown(names).filter(n => g[f][s.policies.indexOf(n)][rho]).map(n => ({ name: n, points: g[f][s.policies.indexOf(n)][rho].map((v, i) => [ends[i], [v]]).slice(from) }));
    const last = ends[ends.length - 1];
    curves(b, w, series, { height: w < 500 ? 330 : 400, xs: ticks(last, w < 500 ? 3 : 7, false).filter(x => x && x <= last), xShow: num, xName: "tokens after the prompt",
      xTip: x => `${num(x)} tokens, ${rhoText(s.rhos[rho])}`, figure: { ...FIGURES[f], log: false, line: f === "nll" ? undefined : FIGURES[f].line } });
  });
  if (curves_[0].full) repainted(box, () => { const g = curves_[state[key + ".group"]]; return g.full ? `<p class="none">The full cache's NLL over these tokens: ${nats(g.full[g.full.length - 1])} nats a token.</p>` : ""; });
}

// ---- Layers
// A map for each policy whose head groups have sizes of their own. What is common to all maps is their scale.
function headMaps(box, s, visible) {
  const of = n => s.head_budgets[s.policies.indexOf(n)][s.rhos.indexOf(rhoIn(s))];
  for (const n of s.policies.filter(p => s.head_budgets[s.policies.indexOf(p)].some(known)))
    draw(box, (b, w) => {
      const most = Math.max(...s.policies.map(of).filter(Boolean).flat(2));
      if (visible().includes(n) && of(n)) headMap(b, w, of(n), most, `${n}: share of the budget by layer and KV head group, 1 = equal`, visible());
      else b.innerHTML = "";
    });
}
function layerSection(s) {
  const has = n => s.budgets[s.policies.indexOf(n)].some(known), names = ranked(s).filter(has);
  if (!names.length && !s.density && !s.variance) return;
  const box = section("Layers", "What a layer gets of the budget, 1 being an equal share, on average over the places; and why: how much its prompt's attention sums vary over the tokens, raw and as the density that budgets are made of.");
  const budget = n => s.budgets[s.policies.indexOf(n)][s.rhos.indexOf(rhoIn(s))], visible = () => shown(names).filter(budget);
  rhoChoice(controls(box), s);
  policyLegend(box, names);
  draw(box, (b, w) => {
    const series = visible().map(n => ({ name: n, points: budget(n).map((v, l) => [l, [v]]) }));
    const n = Math.max(1, ...series.map(x => x.points.length));
    curves(b, w, series, { height: w < 500 ? 300 : 340, xs: [...Array(n).keys()].filter(l => l % (w < 500 ? 5 : 2) === 0), xShow: l => l, xSpan: [-0.5, n - 0.5], xName: "layer", xTip: l => `layer ${l}`,
      figure: { axis: "share of the budget, 1 = equal", show: x => x.toFixed(2), line: 1 } });
  });
  headMaps(box, s, visible);
  for (const [values, name] of [[s.density, "density (head minmax)"], [s.variance, "variance of the attention sums"]])
    if (values) draw(box, (b, w) => layerBars(b, w, values, name, visible()));
}

// ---- Needle maps
function mapSection(s) {
  const exact = new Set(s.units.map(u => u.depth).filter(known)), tenths = exact.size > 11, contexts = s.contexts;
  const depthOf = u => tenths && known(u.depth) ? Math.min(9, Math.floor(u.depth * 10)) / 10 : u.depth;
  const depths = [...new Set(s.units.map(depthOf).filter(known))].sort((a, b) => a - b);
  if (!depths.length) return;
  const box = section(`${titleOf(s)}: by depth and context`, "Share of right answers, in %: the fact's depth in the prompt down" + (tenths ? ", by tenths" : "") + ", its length across. " +
    `Pale with a broken edge: the full cache answers less than ${Math.round(data.full_least * 100)}%, so the cell does not count.`);
  rhoChoice(controls(box), s);
  const key = document.createElement("div");
  key.className = "legend";
  box.appendChild(key);
  plots.push(() => { key.innerHTML = `<span>0%<span class="ramp" style="background:${rampCss()}"></span>100%</span>`; });
  const counts = u => groupOf(s, ["cell"]).some(g => g.counts && g.context === u.context && g.task === u.task && g.placement === u.placement);
  const at = values => (d, c) => {
    const all = s.units.map((u, i) => [u, values[i]]).filter(([u, v]) => depthOf(u) === d && u.context === c && known(v));
    const counted = all.filter(([u]) => counts(u)), found = counted.length ? counted : all;
    return found.length ? { right: found.reduce((a, x) => a + x[1], 0) / found.length, n: found.length, counts: counted.length > 0 } : null;
  };
  const maps = document.createElement("div");
  maps.className = "maps";
  policyLegend(box, ranked(s), true);
  box.appendChild(maps);
  plots.push(() => {
    maps.replaceChildren();
    const rho = s.rhos.indexOf(rhoIn(s));
    const all = [["full cache", s.units.map(u => u.full_exact)], ...shown(ranked(s)).map(n => [n, s.values.exact[s.policies.indexOf(n)][rho]])];
    for (const [name, values] of all) {
      const d = document.createElement("div"), p = document.createElement("div"), right = values.filter((v, i) => known(v) && counts(s.units[i]));
      if (!values.some(known)) continue;
      p.className = "plot";
      d.innerHTML = `<h3>${esc(name)} <span>${right.length ? share(right.reduce((a, b) => a + b, 0) / right.length) : ""}</span></h3>`;
      d.appendChild(p);
      maps.appendChild(d);
      needleMap(p, Math.max(150, p.clientWidth), depths, contexts, at(values));
    }
  });
}

// ---- Text by text
function textTable(s) {
  const key = "texts " + s.measure, box = section("Text by text", "Each place; the best of a row in bold."), c = controls(box), figures = ["kl", "nll_more", "nll"].filter(f => s.values[f] && s.values[f].some(p => p.some(r => r.some(known))));
  if (!figures.length) return void box.remove();
  state[key] = figures[0];
  choice(c, "figure", key, figures.map(f => [f, FIGURES[f].name]));
  rhoChoice(c, s);
  policyLegend(box, ranked(s), true);
  repainted(box, () => {
    const f = state[key], rho = s.rhos.indexOf(rhoIn(s)), names = shown(ranked(s));
    const order = s.units.map((u, i) => i).sort((a, b) => s.units[a].source.localeCompare(s.units[b].source, "en", { numeric: true }) || s.units[a].context - s.units[b].context || s.units[a].offset - s.units[b].offset);
    const rows = order.map(i => {
      const u = s.units[i], values = names.map(n => s.values[f] && s.values[f][s.policies.indexOf(n)][rho][i]), best = Math.min(...names.map((n, k) => n === "full" || !known(values[k]) ? Infinity : values[k]));
      return `<tr><td>${esc(u.source)}</td><td class="text">${esc(u.kind || "")}</td><td>${num(u.context)}</td><td>${num(u.offset)}</td><td>${known(u.full_nll) ? nats(u.full_nll) : "–"}</td>` +
        values.map(v => `<td${v === best ? ' class="best"' : ""}>${known(v) ? nats(v) : "–"}</td>`).join("") + "</tr>";
    });
    return `<div class="scroll tall"><table><thead><tr><th>text</th><th class="text">kind</th><th>context</th><th>from token</th><th>full cache's NLL</th>${names.map(n => `<th>${esc(n)}</th>`).join("")}</tr></thead><tbody>${rows.join("")}</tbody></table></div>`;
  });
}

// ---- Ablations
function ablationSection(s) {
  const key = "ablation " + s.table, base = s.baselines[0], box = section(`Ablation, table ${esc(s.table)}${TABLES[s.table] ? ": " + TABLES[s.table] : ""}`,
    `Variants of D2O as the paper's table ${esc(s.table)} has them, over ${num(s.groups[0].units)} ${places(s)}${base ? `; held against ${esc(base)}, which is d2o as it is` : ""}.`);
  const c = controls(box);
  rhoChoice(c, s);
  groupChoice(c, s, key, ["all", "context", "kind"]);
  const group = () => groupOf(s, ["all", "context", "kind"]).filter(g => g.units)[state[key]] || s.groups[0];
  draw(box, (b, w) => forest(b, w, s.policies.map(n => ({ name: n, value: (scoreOf(s, group(), n, rhoIn(s)) || {}).ratio })),
    { ...FIGURES.ratio, axis: `${s.figure === "kl" ? "KL" : "loss"} over that of ${base}` }));
  const d = detail(box, "Table");
  repainted(d, () => scoreTable(s, group(), rhoIn(s), ["kl", "ratio", "nll_more", "agree"].filter(f => s.groups[0].scores.some(r => r.some(x => x[f])))));
  leftOut(box, s);
}

// ---- All of it
for (const s of texts) {
  scoreSection(s);
  againstSection(s);
  positionSection(s);
  layerSection(s);
}
for (const s of tasks) {
  scoreSection(s);
  againstSection(s);
  mapSection(s);
}
ablations.forEach(ablationSection);
texts.forEach(textTable);
{
  const box = section("The runs");
  table(box, [["measure", r => esc(r.measure), "text"], ["model", r => esc(r.model ? r.model.name || r.model.file : ""), "text"], ["version", r => esc(r.version || ""), "text"],
    ["commit", r => esc(String(r.commit || "").slice(0, 12)), "text"], ["threads", r => num(r.threads)], ["K and V", r => esc(r.kv_type || ""), "text"], ["block", r => num(r.block_size)],
    ["evicted every", r => num(r.k)]], data.runs);
  const words = [];
  if (data.bad_lines) words.push(`${num(data.bad_lines)} lines were no records`);
  if (data.replaced) words.push(`${num(data.replaced)} cells were there more than once: the last counts`);
  if (data.left_out) words.push(`${num(data.left_out)} cells of sources that were not asked for are left out`);
  box.insertAdjacentHTML("beforeend", list(words) + `<p class="none" style="margin-top:10px">kvfold ${esc(data.version)}; sources read: ${Object.keys(data.sources).map(esc).join(", ")}.</p>`);
}
paintAll();
