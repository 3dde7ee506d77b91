// The page: sections in the order of questions. Everything it says is in data.
const P = data.pool, L = data.layers;
const sum = (rows, key) => rows.reduce((s, r) => s + (r[key] || 0), 0);

// ---- The head
const head = document.createElement("header");
head.innerHTML = `<h1>KV-cache occupancy</h1><p class="sub">${esc(data.title)} of ${esc(data.source)} · ${esc(data.policy_label)} · ` +
  `${data.n_layers} layers · pool of ${num(data.n_blocks)} blocks of ${data.block_size} tokens (${bytes(data.n_blocks * data.block_bytes)})</p>` +
  `<div class="tiles">` + [
    [percent(data.peak_blocks, data.n_blocks), "of the pool held, at most"],
    [kept(data.peak_blocks), "held, at most"],
    [kept(data.peak_blocks_full), "with a full cache"],
    [kept(P.cached_max), "cached, at most"],
    [data.peak_blocks_full > data.peak_blocks ? percent(data.peak_blocks_full - data.peak_blocks, data.peak_blocks_full) : "0%", "saved at the peak"],
    [num(data.requests), data.answers === data.requests ? "requests" : `requests, ${num(data.answers)} answers`],
    [num(data.preemptions), "preemptions"],
    [num(data.steps), "steps in " + time(data.seconds)],
    [time(data.wait_max_s), "longest wait"]
  ].map(([b, s]) => `<div class="tile"><b>${b}</b><span>${s}</span></div>`).join("") + "</div>";
main.appendChild(head);

// ---- Held against a full cache
{
  const s = section("Held against a full cache", "What tables hold (the most within each step), and what the same requests would hold if every layer kept every token." +
    (S.steps_per_point > 1 ? ` A point is the most of ${num(S.steps_per_point)} steps.` : ""));
  const scale = data.block_bytes || 1, of = values => values.map(v => v * scale);
  legend(s, [["held", "--held"], ["full cache", "--full"], ["the pool", "--ink-2", true]]);
  const most = Math.max(...S.held, ...S.full, 1) * scale, pool = data.n_blocks * scale;
  const max = pool < most * 2.5 ? Math.max(most, pool) * 1.04 : most * 1.04;
  draw(s, (box, w) => lines(box, w, 260, [
    { name: "full cache", values: of(S.full), colour: "--full" },
    { name: "held", values: of(S.held), colour: "--held", area: true }
  ], max, data.block_bytes ? bytes : num, !!data.block_bytes, pool));
  if (pool > max) s.insertAdjacentHTML("beforeend", `<p class="none">The pool, ${bytes(pool)}, is beyond the top of the chart.</p>`);
  s.insertAdjacentHTML("beforeend", `<p>${aboveFull()}</p>`);
}

// Where held is above the full cache, and what is known of why.
function aboveFull() {
  let worst = -1, n = 0;
  S.held.forEach((v, i) => {
    if (v <= S.full[i]) return;
    n++;
    if (worst < 0 || v - S.full[i] > S.held[worst] - S.full[worst]) worst = i;
  });
  if (worst < 0) return "Held is nowhere above the full cache.";
  const i = worst, reasons = [];
  if (S.compactions[i]) reasons.push(`${num(S.compactions[i])} compactions: a table whose blocks others share, or the prefix cache keeps, is compacted into fresh ` +
    "blocks, and holds both until the compaction is committed");
  if (P.swapped_out_blocks || P.offloaded_blocks) reasons.push("copies to or from the host, which hold both ends until they are done");
  if (P.copied_blocks) reasons.push("blocks copied on write, held beside their source until the copy is done");
  if (P.outside) reasons.push("blocks that handles hold outside of all tables");
  return `Held is above the full cache at ${num(n)} of ${num(points)} points, at most by <b>${kept(S.held[i] - S.full[i])}</b>, at ${time(S.begin_s[i])}: ` +
    `${kept(S.held[i])} within the step, ${kept(S.held_after[i])} after it, ${kept(S.full[i])} with a full cache. ` +
    (reasons.length ? `There were ${reasons.join("; ")}.` : "");
}

// ---- Where the blocks are
{
  const s = section("Where the blocks are", "The whole pool at the end of each " + (S.steps_per_point > 1 ? `${num(S.steps_per_point)}th step` : "step") +
    ". <b>Slack</b>: slots of held blocks that hold no token, as blocks. <b>Cached</b>: held by nobody, kept for the prefix cache, and given up when a block is needed. " +
    "<b>Promised</b>: of what is cached and free, so much is promised to tables that may grow.");
  const scale = data.block_bytes || 1, at = (f, i) => f(i) * scale, range = [...Array(points).keys()];
  const slack = i => Math.min(S.held_after[i], S.slots_idle[i] / data.block_size), free = i => data.n_blocks - S.held_after[i] - S.cached[i];
  const parts = [["tokens", "--held", i => S.held_after[i] - slack(i)], ["slack", "--full", slack], ["cached", "--wait", i => S.cached[i]], ["free", "--axis", free]];
  legend(s, [...parts.map(([name, colour]) => [name, colour]), ["held + promised", "--ink-2", true]]);
  draw(s, (box, w) => stack(box, w, 260, parts.map(([name, colour, f]) => ({ name, colour, values: range.map(i => at(f, i)) })),
    { name: "promised", values: range.map(i => S.promised[i] * scale), base: range.map(i => S.held_after[i] * scale) }, data.n_blocks * scale, data.block_bytes ? bytes : num, !!data.block_bytes));
  const last = points - 1, mean = f => points ? range.reduce((t, i) => t + f(i), 0) / points : null, most = f => points ? Math.max(...range.map(f)) : null;
  table(s, [["blocks", r => r[0]], ["mean", r => kept(Math.round(r[1](mean)))], ["most", r => kept(Math.round(r[1](most)))], ["at the end", r => kept(Math.round(r[2]))], ["of the pool, mean", r => percent(r[1](mean), data.n_blocks)]],
    points ? [...parts.map(([name, , f]) => [name, g => g(f), f(last)]), ["promised", g => g(i => S.promised[i]), S.promised[last]], ["shared by two tables or more", g => g(i => S.shared[i]), S.shared[last]]] : []);
}

// ---- The heat map
{
  const s = section("Blocks of each layer over time", "A row a layer, a column a moment: the most blocks the layer holds within it.");
  state.heat = "blocks";
  choice(controls(s), "show", "heat", [["blocks", "blocks"], ["mean", "against the mean of the layers at that moment"]]);
  const key = document.createElement("div");
  key.className = "legend";
  s.appendChild(key);
  let most = 0;
  for (const r of S.blocks) for (const v of r) most = Math.max(most, v);
  plots.push(() => {
    const relative = state.heat === "mean", end = Math.round(100 * SPREAD) + "%";
    key.innerHTML = relative ? `<span>${end} less<span class="ramp" style="background:${rampCss(diverging())}"></span>${end} more, and beyond</span>`
      : `<span>0<span class="ramp" style="background:${rampCss()}"></span>${num(most)} blocks (${kept(most)})</span>`;
  });
  draw(s, heat);
}

// ---- Requests
{
  const s = section("Requests", "In the batch, and in the queue.");
  legend(s, [["running", "--held"], ["waiting", "--wait"]]);
  draw(s, (box, w) => lines(box, w, 170, [
    { name: "waiting", values: S.waiting, colour: "--wait" },
    { name: "running", values: S.running, colour: "--held", area: true }
  ], Math.max(...S.running, ...S.waiting, 1) * 1.05, num, false));
}

// ---- Budgets
{
  const known = L.some(l => l.keep_mean !== null), reasons = L.some(l => l.density !== null);
  const s = section("The budget of each layer, and why", known
    ? "Tokens a layer keeps, on average over the requests" + (reasons ? ", beside its density F: how much its prompt's attention sums vary over the tokens. " +
      "With layer_sign 1 a layer of high density needs fewer tokens and gets less; the budgets add up to the same total." : ". This policy has no density: layers are equal.")
    : "No request reached its budget: nothing was evicted, and every layer holds every token.");
  if (known) draw(s, (box, w) => bars(box, w, [
    { name: "tokens kept", values: L.map(l => l.keep_mean), colour: "--held", show: num },
    ...(reasons ? [{ name: "density F", values: L.map(l => l.density), colour: "--density", show: x => x.toFixed(3) }] : [])
  ]));
  const d = document.createElement("details");
  d.innerHTML = "<summary>Table of the layers</summary>";
  s.appendChild(d);
  const most = l => Math.max(0, ...S.blocks.map(r => r[l]));
  table(d, [["layer", l => l.layer], ["density F", l => real(l.density, 4)], ["kept, mean", l => real(l.keep_mean, 1)],
    ["least", l => num(l.keep_min)], ["most", l => num(l.keep_max)],
    ...(L.some(l => l.group_keep_mean) ? [["kept by head group, mean", l => l.group_keep_mean ? l.group_keep_mean.map(x => real(x, 1)).join(" ") : "–", "text"]] : []), ["blocks, at most", l => num(l.held_max)],
    ["bytes, at most", l => kept(l.held_max)], ["idle slots, at most", l => num(l.slots_idle_max)],
    ["taken", l => num(l.taken_blocks)], ["freed", l => num(l.freed_blocks)], ["slots evicted", l => num(l.evicted_slots)]],
    L, { layer: "all", density: null, keep_mean: known ? sum(L, "keep_mean") : null, keep_min: null, keep_max: null,
      held_max: data.peak_blocks, slots_idle_max: P.slots_idle_max, taken_blocks: sum(L, "taken_blocks"),
      freed_blocks: sum(L, "freed_blocks"), evicted_slots: sum(L, "evicted_slots") });
}

// ---- The slowest moments
{
  const s = section("The slowest moments", "The steps that took longest.");
  table(s, [["at", r => time(r.begin_s)], ["took", r => time(r.end_s - r.begin_s)], ["in compactions", r => r.compaction_s ? time(r.compaction_s) : "–"],
    ["step", r => num(r.step)], ["prompt tokens", r => num(r.prefill_tokens)], ["decoding", r => num(r.decode_tokens)], ...(data.recomputed_tokens ? [["computed again", r => num(r.recomputed_tokens)]] : []),
    ["running", r => num(r.running)], ["waiting", r => num(r.waiting)], ["preempted", r => num(r.preempted)],
    ["compactions", r => num(r.compactions)], ["held", r => kept(r.held)]], data.slowest_steps);
  const t = section("The longest waits", data.longest_waits.some(r => r.start_s !== null) ? "From arrival to the first step." : "From arrival to the first token.");
  if (!data.longest_waits.length) t.insertAdjacentHTML("beforeend", '<p class="none">No request has begun.</p>');
  else table(t, [["request", r => num(r.id)], ["waited", r => time((r.start_s === null ? r.first_token_s : r.start_s) - r.arrival_s)],
    ["steps", r => num(r.queue_steps)], ["arrival", r => time(r.arrival_s)], ["end", r => time(r.end_s)], ["prompt", r => num(r.prompt_tokens)],
    ["output", r => num(r.output_tokens)], ["preempted", r => num(r.preempted)], ["ended", r => esc(r.end), "text"]], data.longest_waits);
}

// ---- Where the blocks went
{
  const s = section("Where the blocks went", `Taken: <b>${num(P.taken_blocks)}</b>. Fallen free: <b>${num(P.freed_blocks)}</b>, each by one cause. What is left is held (${num(P.held)}) or cached (${num(P.cached)}) at the end.`);
  const causes = [["end", "their request ended, or went back into the queue"], ["compaction", "a compaction took their tokens away"], ["eviction", "the prefix cache gave them up because a block was needed"],
    ["adoption", "the prefix cache took over a newer sequence's blocks of the same tokens, or more, in their place"], ["removal", "the prefix cache forgot them without need of room: it was cleared, or they were about to be written"],
    ["swap", "their sequence went to the host"], ["window", "their tokens left the window of their layer"], ["rollback", "tokens were taken back"], ["release", "a handle let go of them, or a compaction was cancelled"]];
  table(s, [["cause", r => r[0]], ["blocks", r => num(P["freed_by_" + r[0]])], ["of all", r => percent(P["freed_by_" + r[0]], P.freed_blocks)], ["", r => r[1], "text"]],
    causes.filter(r => P["freed_by_" + r[0]]));
}

// ---- Histograms
{
  const p = pair(), show = ns => time(ns * 1e-9);
  const one = (title, text, h) => draw(section(title, text, p), (box, w) => histogram(box, w, h, show));
  one("Lifetime of blocks", "From being taken to falling free.", P.lifetime_ns);
  one("Idle time", "From a block's last use (taken, written, gained a holder) to falling free.", P.idle_time_ns);
  one("Reuse gap", "From a block's last use to the next holder it gains.", P.reuse_gap_ns);
  one("Free gap", "How long a free block lay before it was taken again.", P.free_gap_ns);
}

// ---- Totals
{
  const s = section("Totals");
  const rows = [["prompt tokens", num(data.prompt_tokens)], ["output tokens", num(data.output_tokens)],
    ["batch size reached", num(data.running_max)], ["waiting, at most", num(data.waiting_max)], ["mean wait", time(data.wait_mean_s)],
    ["mean steps in the queue", real(data.queue_steps_mean, 1)],
    ["blocks shared, at most", num(P.shared_max)], ["blocks copied on write", num(P.copied_blocks)], ["blocks promised, at most", num(P.promised_max)],
    ["score pages, at most", num(P.pages_held_max)], ["compactions", num(P.compactions)], ["bytes of the slots that compactions evicted", bytes(P.evicted_bytes)],
    ["bytes that compactions gave back, as whole blocks", bytes(P.freed_bytes)], ["idle slots, at most", num(P.slots_idle_max)],
    ["events dropped by the profile", num(P.events_dropped)]];
  const C = data.prefix_cache;
  if (data.recomputed_tokens) rows.push(["tokens computed again after preemptions", num(data.recomputed_tokens)]);
  if (C && C.again_queries) rows.push(["tokens found of what would have been computed again", `${num(C.again_hit_tokens)} of ${num(C.again_tokens)}`]);
  if (C) rows.push(["prompts with a hit in the prefix cache", `${num(C.hits)} of ${num(C.queries)}`],
    ["tokens found there", C.query_tokens ? `${num(C.hit_tokens)} of ${num(C.query_tokens)}, ${real(100 * C.hit_ratio, 1)}%` : "none"],
    ["block positions that left it for room", num(C.evicted)],
    ["blocks that its copies of the same tokens freed, and lists that it would not take", `${num(P.freed_by_adoption)}, ${num(C.duplicates)}`]);
  const box = document.createElement("div");
  box.className = "scroll";
  box.innerHTML = `<table class="totals"><tbody>${rows.map(([a, b]) => `<tr><td>${a}</td><td>${b}</td></tr>`).join("")}</tbody></table>`;
  s.appendChild(box);
  s.insertAdjacentHTML("beforeend", `<p class="none" style="margin-top:10px">kvfold ${esc(data.version)}; times are ${esc(data.clock)}.</p>`);
}
paintAll();
