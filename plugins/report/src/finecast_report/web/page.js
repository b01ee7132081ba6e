"use strict";
// The sections, in the order in which questions are asked. A section that has nothing to show is
// left out. A new one is a function that returns elements, and a row of SECTIONS.

const SECTIONS = [
  ["plans", "All plans", () => found && found.candidates && plansSection()],
  ["journal", "How the search went", journalSection],
  ["limits", "Which ops cost accuracy", limitsSection],
  ["repairs", "Repaired in place of fp32", repairsSection],
  ["blame", "Ops that make the other model lose accuracy", blameSection],
  ["diff", "What changed", diffSection],
  ["time", "Where the time goes", timeSection],
  ["choices", "What each choice saved and cost", choicesSection],
  ["values", "Ranges of values", valuesSection],
  ["ops", "Every op", opsSection],
  ["graph", "The graph", graphSection],
  ["tuning", "Time of tune itself", tuningSection],
  ["run", "How to run it", runSection],
  ["notes", "What is not known, and warnings", notesSection],
];

const table = (heads, rows, numbers = []) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": heads.filter(Boolean).join(", ") }, el("table", {},
  el("thead", {}, el("tr", {}, heads.map((h, i) => h ? el("th", { scope: "col", class: numbers.includes(i) ? "n" : null }, h) : el("td", {})))),
  el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el(i ? "td" : "th", { scope: i ? null : "row", class: numbers.includes(i) ? "n" : null }, cell)))))));

function header() {
  const answers = data.summary.answers || []; // reports of earlier releases have none
  const tile = (name, value, note) => el("div", {}, el("dt", {}, name), el("dd", {}, value, note ? el("small", {}, note) : null));
  const counts = Object.entries(data.plan.counts).map(([type, n]) => [el("span", { class: "together" }, chip(type), ` ${n}`), " "]);
  const ran = {};
  data.ops.forEach((op) => { if (op.ran) ran[op.ran] = (ran[op.ran] || 0) + 1; });
  const ranText = Object.entries(ran).map(([type, n]) => `${type} ${n}`).join(", ");
  const tiles = [tile("formats of ops", counts, ranText ? `types of the kernels that ran them: ${ranText}` : null)];
  if (found && found.baseline) {
    const improved = found.verdict === "improved", [a, b] = [found.baseline, found.tuned];
    tiles.unshift(
      tile("speed", times(improved ? found.speedup : 1), found.target ? `modelled for ${found.target}` : "measured: the models run in turns"),
      tile("time of a call", ms(b.latency_ms), `fp32 ${ms(a.latency_ms)}`),
      tile(found.metric, digits(b.metric, 6), `fp32 ${digits(a.metric, 6)}${isNumber(asked.target_metric) ? `, asked for ${asked.higher_is_better === false ? "≤" : "≥"} ${digits(asked.target_metric, 6)}` : ""}`),
      tile("size", megabytes(b.size_bytes), `fp32 ${megabytes(a.size_bytes)}`));
    // Predictions are scaled to the plans with most ops in a format: for these both are one figure.
    const [measuredError, predictedError] = found.relative_error ? [found.relative_error.measured, found.relative_error.predicted].map(percent) : [];
    if (found.relative_error) tiles.push(tile("error of the output", measuredError, measuredError === predictedError ? null : `predicted ${predictedError}`));
    tiles.push(tile("effort", count(found.evaluations, "evaluation"), `on all data, fp32's${(found.baselines || []).length ? " and the hint's" : ""} among them; ${count(found.probes, "run")} for the error of single ops; ${digits(found.seconds)} s`));
  }
  if (data.machine) tiles.push(tile("machine", data.machine.cpu || "not known", `${count(data.machine.cores || 0, "core")}, ${data.plan.engine_title} ${(data.machine.libraries || {})[data.plan.engine] || ""}`));
  fill(document.getElementById("top"), {}, [
    el("h1", {}, data.model.name), (answers.length ? answers : [data.summary.verdict]).map((text) => el("p", { class: "verdict" }, sentence(text))),
    (asked.timing_notes || []).map((note) => el("p", { class: "warn" }, "Warning: ", note, ".")),
    conditions(), el("dl", { class: "tiles" }, tiles)]);
}

// What the accuracy and the times are of, as far as that is known.
const feeds = (one) => Object.entries(one).map(([name, dims]) => `${name} ${shape(dims)}`).join(", ");
function conditions() {
  const timed = asked.timed || [];
  const parts = [
    asked.samples ? `the accuracy is that of ${count(asked.samples, "sample")}` : null,
    timed.length === 1 ? `a timed call has the input${Object.keys(timed[0]).length > 1 ? "s" : ""} ${feeds(timed[0])}` : timed.length ? `each time is the sum of ${count(timed.length, "call")}, one after another: ${timed.map(feeds).join("; ")}` : null,
    asked.date ? `made on ${asked.date}` : null,
  ].filter(Boolean).join("; ");
  return parts ? el("p", { class: "soft" }, parts[0].toUpperCase() + parts.slice(1) + ".") : null;
}

function plansSection() {
  const plans = plansOf();
  const races = plans.some((p) => p.last);
  const kinds = Object.entries(WORDS).filter(([kind]) => plans.some((p) => p.kind === kind));
  const rows = [...plans].sort((a, b) => (b.gain || 0) - (a.gain || 0)).map((p) => [
    p.chosen ? el("strong", {}, p.name + " (chosen)") : p.name, [times(p.gain), races && !p.last ? el("small", {}, " first benchmark") : ""], ms(p.ms), percent(p.error) + (p.measured ? "" : " predicted"), digits(p.metric, 6),
    el("span", { class: p.kind === "passed" ? "good" : ["failed", "uncertified"].includes(p.kind) ? "bad" : "soft" }, WORDS[p.kind]), p.changes ? count(p.changes, "op") : "–"]);
  const baselines = found.baselines.map((a) => [a.name, times(found.baseline.latency_ms / a.latency_ms), ms(a.latency_ms), "–", digits(a.metric, 6), WORDS[a.passed ? "passed" : uncertified(a.metric) ? "uncertified" : "failed"], "–"]);
  const fp32 = [[FP32, times(1), ms(found.baseline.latency_ms), percent(0), digits(found.baseline.metric, 6), "the model as given", "–"]];
  return [
    el("p", {}, `A plan has to stay within ${accuracy} on all data.`), el("p", {}, data.summary.next_faster),
    el("figure", {}, frontierChart(plans), el("figcaption", {}, "Each dot is a plan: the further up, the faster; the further left, the more exact. ",
      kinds.map(([kind, words]) => { const colour = { timed: "Grey", passed: "Green", failed: "Red", uncertified: "Red" }[kind]; return `${colour}: ${words}. `; }),
      "The ring is what was chosen, the dashed line what was predicted. A dotted line is the fp32 model under the engine's own precision hint, a setting by which it chooses reduced precision by itself, without a plan.",
      races ? " In a benchmark models run in turns, call by call. Plans of the final benchmark stand at what that measured. The others were in the first benchmark alone: they stand at their speed there, relative to the chosen plan." : "",
      plans.some((p) => /^(plan|step) \d/.test(p.name)) ? " Plans are numbered by predictions, from the most exact plan to the fastest: measured errors and times may have another order." : "")),
    el("details", {}, el("summary", {}, `The same as a table: ${count(plans.length, "plan")}${baselines.length ? ", and " + found.baselines.map((a) => a.name).join(", ") : ""}`),
      table(["plan", found.objective === "latency" ? "speed" : "gain", "a call", "output error", found.metric, "on all data", "differs in"], [...fp32, ...rows, ...baselines], [1, 2, 4]))];
}

function journalSection() {
  const steps = (found && found.journal) || [];
  if (!steps.length) return null;
  const words = { race: "benchmark", "errors of ops": "errors of single ops", "more plans": "more plans proposed", probes: "plans probed" };
  const saving = (s) => `${percent(s.gain)}${s.gain_off >= 0.01 ? ` ± ${Math.round(100 * s.gain_off)}%` : ""}`;
  const rows = steps.filter((s) => s.what !== "end" && s.what !== "fp32").map((s) => [words[s.what] || s.what, s.plan ? s.plan + (s.instead_of ? ` (as fast as ${s.instead_of} and more accurate)` : "") : "–", s.plan && s.worth !== undefined ? digits(s.worth) : "–", s.plan ? saving(s) : "–", s.plan ? percent(s.chance) : "–", el("span", { class: "together" }, digits(s.seconds) + " s"), s.result || "–"]);
  const ends = steps.filter((s) => s.what === "end" && s.result);
  const first = steps.find((s) => s.what === "fp32");
  return [el("p", {}, `${first ? `fp32 has ${first.result}. ` : ""}All measurements, in their order. “Saves” is the share of the time that a plan was expected to save compared with the fastest plan that had passed by then, or with fp32 before any had, ± its standard deviation. Next came the plan of the largest worth: the mean logarithm of how many times as fast it may be, beyond the 3% that are the noise of benchmarks, times its chance to pass.`),
    table(["measurement", "plan", "worth", "saves", "chance to pass", "took", "result"], rows, [2, 3, 4, 5]),
    ends.map((s) => el("p", {}, `The search ended${s.plan ? ` with ${s.plan}` : ""}: ${s.result}.`))];
}

function limitsSection() {
  const named = (list) => el("ol", {}, list.map((one) => el("li", {}, micro(one.text), " ", el("span", { class: "screen" }, opLink(one.op, "Look at it")))));
  const parts = [el("p", {}, data.summary.heading)];
  if (data.summary.limits.length) parts.push(named(data.summary.limits));
  const kept = data.summary.kept || []; // reports of earlier releases have one list
  if (kept.length) parts.push(el("p", {}, data.summary.kept_heading), named(kept));
  const decided = data.summary.decisions || [];
  if (decided.length) parts.push(el("p", {}, "Decisions inside the model: ", decided.join(" ")));
  const ruled = new Map();
  data.ops.filter((op) => op.type === FP32 && !(op.deciding || []).some((i) => data.reasons[i].rule === "decision")).forEach((op) =>
    new Set((op.deciding || []).map((i) => data.reasons[i].rule)).forEach((rule) => ruled.set(rule, (ruled.get(rule) || 0) + 1)));
  if (ruled.size)
    parts.push(el("p", {}, "Rules keep some ops in fp32 before anything is measured: ", [...ruled].map(([rule, n], i) => `${i ? ", " : ""}${count(n, "op")} by ${rule}`).join(""), "."));
  if (data.alone) {
    const most = Math.max(...Object.values(data.alone).flatMap((o) => [o.weights, o.activations]).filter(isNumber)) || 1;
    const bar = (type, part, value) => [el("span", {}, chip(type), " " + part), el("div", { class: "fill " + part, style: { width: (100 * (value || 0)) / most + "%" } }), el("span", {}, percent(value))];
    parts.push(el("h3", {}, "Weights alone, activations alone"),
      el("p", { class: "soft" }, "The error of the output if only the weights, or only the values between ops, had the format."),
      el("div", { class: "bars" }, Object.entries(data.alone).map(([type, one]) => [bar(type, "weights", one.weights), bar(type, "activations", one.activations)])));
  }
  return parts;
}

// Ops whose operands are adjusted, so that they can be low; a proof stands once for its ops.
function repairsSection() {
  const repairs = data.repairs || [];
  if (!repairs.length) return null;
  const power = (e) => ["2", el("sup", {}, String(e))];
  const done = (one) => [
    one.at, " ", one.lowest || one.highest ? ["times ", power(one.lowest), one.lowest === one.highest ? "" : [" to ", power(one.highest)], one.channels > 1 ? ` by channel (${one.channels})` : ""] : null,
    one.adds ? `${one.lowest || one.highest ? ", and " : ""}plus ${count(one.channels, "number")}` : null];
  const proofs = new Map();
  for (const one of repairs.slice(0, MOST_ROWS)) {
    const text = one.reasons.map((i) => micro(data.reasons[i].text)).join("; ") || "no reason is known";
    proofs.set(text, [...(proofs.get(text) || []), one]);
  }
  return [el("p", {}, `The numbers that ${count(repairs.length, "op")} read are adjusted, so that these and the ops around them need not stay in fp32. Factors are powers of two: in fp32 they change no digit, but where it is said.`),
    el("ul", {}, [...proofs].map(([text, ops]) => el("li", {}, text, el("ul", {}, ops.map((one) =>
      el("li", {}, opLink(one.op), " ", chip(data.ops[one.op].type), ": ", one.operands.map((o, i) => [i ? "; " : "", done(o)]))))))),
    rest(repairs.length)];
}

// A list of elements ends somewhere; the grids do not.
const MOST_ROWS = 100;
const rest = (n) => (n > MOST_ROWS ? el("p", { class: "soft" }, `and ${count(n - MOST_ROWS, "other")}, which the data of the report have`) : null);

const known = (name) => (opByName.has(name) ? opLink(opByName.get(name)) : name);

function blameSection() {
  const blame = data.blame;
  if (!blame) return null;
  const verdict = blame.verdict + ".";
  const first = blame.first_wrong;
  const moved = (n) => `, with ${count(n, "op")} that only ${n === 1 ? "moves" : "move"} its result`;
  const culprit = (one) => el("li", {}, known(one.node), " ", chip(one.format), one.moved.length ? moved(one.moved.length) : null,
    `: by itself in reduced precision it makes an error of ${percent(one.error_alone)} of the output. ${one.reasons.join("; ")}. `, one.source ? el("code", {}, one.source) : null);
  return [el("p", {}, el("strong", {}, blame.low), ": ", verdict),
    blame.culprits.length ? el("p", { class: "soft" }, "These are the fewest ops found whose return to fp32 restores it, confirmed by runs.") : null,
    el("ol", {}, blame.culprits.slice(0, MOST_ROWS).map(culprit)), rest(blame.culprits.length),
    blame.instead.length ? el("p", {}, "Harmful only together. In its place any of these would do: ", blame.instead.map((name, i) => [i ? ", " : "", known(name)]), ".") : null,
    first ? el("p", {}, "The first op with a wrong result is ", known(first.node), `: ${first.why}.`, first.absorbed_at ? [" Its NaN or Inf is absorbed at ", known(first.absorbed_at), "."] : null, first.source ? [" ", el("code", {}, first.source)] : null) : null,
    blame.keep ? [el("p", {}, "To keep these ops in fp32, give convert or tune:"), el("pre", { tabindex: 0, role: "region", "aria-label": "Option that keeps the ops in fp32" }, blame.keep)] : null,
    (blame.warnings || []).map((text) => el("p", { class: "warn" }, "Warning: ", text))];
}

function diffSection() {
  const diff = data.diff;
  if (!diff) return null;
  const sentence = (text) => el("li", {}, text);
  const name = (r) => (r.after || r.before).node;
  const types = (r) => [...new Set([r.before, r.after].filter(Boolean).map((s) => s.format))];
  const why = (r) => { const one = r.after || r.before; return one.why && r.changes.some((c) => ["type", "lost its reason", "new"].includes(c)) ? micro(one.why) : ""; };
  const was = (r) => (r.before && r.after && r.before.node !== r.after.node ? ` (was ${r.before.node})` : "");
  const parts = [el("p", {}, `Compared with ${diff.before}:`), el("ul", {}, diff.summary.map(sentence))];
  if (!diff.ops.length) return parts;
  const chosen = el("div", { "aria-live": "polite" });
  const open = (r) => {
    if (r.after && opByName.has(r.after.node)) { showOp(opByName.get(r.after.node)); return; }
    chosen.replaceChildren(el("p", {}, `${name(r)}${was(r)}: ${r.changes.join(", ")}. ${why(r)}`));
  };
  const grid = gridTable({
    label: "Changes", rows: diff.ops, open,
    columns: [
      { key: "name", name: "op", width: "minmax(7rem, 3fr)", of: name, show: (r) => named(name(r)), title: (r) => name(r) + was(r) },
      { key: "what", name: "what changed", width: "minmax(6rem, 1.5fr)", of: (r) => r.changes.join(", "), show: (r) => r.changes.join(", ") },
      { key: "op", name: "computes", width: "minmax(5rem, 1fr)", wide: true, of: (r) => (r.after || r.before).op, show: (r) => (r.after || r.before).op },
      { key: "type", name: "format", width: "minmax(7rem, 1.2fr)", of: (r) => types(r).join(" "), show: (r) => types(r).map((t, i) => [i ? " → " : "", chip(t)]) },
      { key: "why", name: "why", width: "minmax(8rem, 4fr)", wide: true, of: why, show: why, title: why },
    ],
  });
  return [...parts, grid.box, chosen];
}

function timeSection() {
  const models = [FP32, "tuned"].filter((m) => spentIn[m].size && (m === FP32 || data.kernels.tuned || !data.kernels.fp32));
  if (!models.length) return null;
  let by = data.ops.some((op) => op.scope) ? "scope" : "class", path = [], same = true;
  const total = (m) => ms(sum((data.kernels[m] || []).map((k) => k.ms)));
  const timed = asked.timed || [];
  const profiled = !data.kernels.fp32 ? "Widths are the times that plans were chosen by; casts are not among them." : [
    `Widths are times of kernels, from a few runs of a profile on the inputs of one call${timed.length ? ` (${feeds(timed[0])})` : ""}. A kernel's time stands at its main op, the one with the most operations, though the engine may have fused others into it. Colours are the types of the chosen plan, in the picture of fp32, too. `,
    found && found.baseline ? [`They add up to ${models.map((m) => `${total(m)} (${m})`).join(" and ")}. In the benchmarks a call took ${ms(found.baseline.latency_ms)} (fp32) and ${ms(found.tuned.latency_ms)} (tuned)`, timed.length > 1 ? ` for ${timed.length} inputs one after another` : "", ": that counts the time between kernels, too, and all waits for other processes."] : ""];
  const pictures = el("div"), crumbs = el("p", { "aria-live": "polite" });
  const walkTo = (tree) => path.reduce((at, name) => (at && at.inner.get(name)) || at, tree);
  function draw(focus) {
    const trees = Object.fromEntries(models.map((m) => [m, timeTree(m, by)]));
    const places = Object.fromEntries(models.map((m) => [m, walkTo(trees[m])]));
    const whole = Math.max(...models.map((m) => places[m].ms));
    const walk = (node) => {
      if (node.op !== undefined) { showOp(node.op); return; }
      const names = [];
      for (let at = node; at.above; at = at.above) names.unshift(at.name);
      path = names.join("\n") === path.join("\n") ? path.slice(0, -1) : names;
      draw(true);
    };
    crumbs.replaceChildren(el("button", { class: "plain", onclick: () => { path = []; draw(); } }, "all"),
      ...path.flatMap((name, i) => [" › ", el("button", { class: "plain", onclick: () => { path = path.slice(0, i + 1); draw(); } }, safe(name))]));
    pictures.replaceChildren(...models.flatMap((m) => [
      el("h3", {}, `${m === "tuned" ? "tuned" : FP32}: ${ms(places[m].ms)}${path.length ? ` of ${ms(trees[m].ms)}` : ""}`), icicle(trees[m], places[m], same ? whole : places[m].ms, walk)]));
    if (focus) { const first = pictures.querySelector(".icicle button"); if (first) first.focus({ preventScroll: true }); }
  }
  const choose = ["scope", "class"].map((kind) => el("button", { "aria-pressed": String(kind === by), onclick: (event) => {
    by = kind; path = []; choose.forEach((b) => b.setAttribute("aria-pressed", String(b === event.currentTarget))); draw();
  } }, "by " + kind));
  const scale = el("button", { "aria-pressed": "true", onclick: () => { same = !same; scale.setAttribute("aria-pressed", String(same)); draw(); } }, "one scale");
  draw();
  const types = [...new Set(data.ops.map((op) => op.type).filter(Boolean))];
  return [el("p", { class: "soft" }, profiled), el("p", { class: "soft screen" }, `Choose a part to walk into it, choose it again to walk out; an op shows its page. A scope is the part of the model that an op is in, by its name: a layer, a block.`),
    el("div", { class: "controls" }, choose, models.length > 1 ? scale : null), el("p", {}, types.map((t) => [chip(t), " "]), el("span", { class: "chip t-added" }, "casts and reorders of the engine")), crumbs, pictures];
}

function choicesSection() {
  if (!data.units.length) return null;
  const rows = data.units.map((unit) => ({ unit, other: trade(unit) })).filter((row) => row.other && row.unit.ops.length);
  const name = (row) => data.ops[row.unit.ops[0]].name + (row.unit.ops.length > 1 ? ` + ${row.unit.ops.length - 1}` : "");
  const grid = gridTable({
    label: "Choices", rows, sorted: "net", open: (row) => showOp(row.unit.ops[0]),
    columns: [
      { key: "name", name: "ops of one kernel", width: "minmax(7rem, 3fr)", of: name, show: (r) => named(name(r)), title: (r) => r.unit.ops.map((i) => safe(data.ops[i].name)).join(" ") },
      { key: "type", name: "chosen", width: "minmax(4.6rem, 1fr)", of: (r) => r.unit.type, show: (r) => chip(r.unit.type) },
      { key: "low", name: "beside fp32", width: "minmax(5rem, 1fr)", wide: true, of: (r) => r.other.low, show: (r) => chip(r.other.low) },
      { key: "saved", name: "kernel saves", width: "minmax(4.5rem, 1fr)", number: true, wide: true, of: (r) => r.other.saved, show: (r) => ms(r.other.saved) },
      { key: "casts", name: "casts", width: "minmax(8.2rem, 1fr)", number: true, wide: true, of: (r) => r.other.casts, show: (r) => castText(r.other.casts) },
      { key: "net", name: "in all", width: "minmax(4.5rem, 1fr)", number: true, of: (r) => r.other.net, show: (r) => ms(r.other.net) },
      { key: "rise", name: "adds error", width: "minmax(4.2rem, 1fr)", number: true, of: (r) => r.other.rise, show: (r) => percent(r.other.rise) },
      { key: "by", name: "decided by", width: "minmax(4rem, 1fr)", wide: true, of: (r) => r.unit.by, show: (r) => r.unit.by },
    ],
  });
  return [el("p", { class: "soft" }, "Each row compares a reduced format with fp32 for the ops of one kernel, all others as they were chosen: the time that it saves, what its casts cost, and how much it adds to the error of the output. Times are those that the plan was chosen by; the profile of the result may differ. For ops that stay in fp32 it is the format that would gain most. The last column says what decided: “whole plan” stands for one that gives all ops their formats at once, as the engine’s hint does, “neighbours” for an op whose casts would cost more than it saves by itself."), grid.box];
}

function valuesSection() {
  const seen = data.values.map((value, index) => ({ value, index })).filter((one) => one.value.facts);
  if (!seen.length) return null;
  let format = shownFormat, text = "";
  const picture = el("div", { "aria-live": "polite" });
  let shown = null;
  const open = (row) => {
    shown = row;
    const facts = row.value.facts, bad = misfits(facts, format);
    const maker = typeof row.value.from === "number" ? [" It comes from ", opLink(row.value.from), "."] : ` It is ${row.value.from === "input" ? "an input" : "a constant"} of the model.`;
    picture.replaceChildren(el("figure", {}, el("h3", {}, row.value.name), histogram(row.value, format), el("figcaption", {},
      `${count(facts.count, "number")}, ${shape(row.value.shape)}, from ${digits(facts.lowest)} to ${digits(facts.highest)}, the smallest but zero ${digits(facts.smallest_nonzero)}; ${count(facts.zeros, "zero")}${facts.nans + facts.infs ? `, ${facts.nans} NaN, ${facts.infs} Inf` : ""}. In ${format}: `,
      el("span", { class: bad.over ? "bad" : null }, `${percent(bad.over)} overflow`), ", ", el("span", { class: bad.lost ? "warn" : null }, `${percent(bad.lost)} become zero`), format === "int8" ? "." : `, ${percent(bad.subnormal)} lose digits below the normal range.`, ` Magnitudes in powers of two; heights are logarithmic.`, maker)));
  };
  // Of weights each channel has a scale of its own in int8, which the range of all says nothing of.
  const told = (one) => format !== "int8" || one.value.from !== "constant";
  const rows = () => seen.filter(told).filter((one) => !text || one.value.name.toLowerCase().includes(text)).map((one) => ({ ...one, bad: misfits(one.value.facts, format) }));
  const grid = gridTable({
    label: "Values", rows: rows(), sorted: "over", open,
    columns: [
      { key: "name", name: "value", width: "minmax(7rem, 3fr)", of: (r) => r.value.name, show: (r) => named(r.value.name), title: (r) => r.value.name },
      { key: "shape", name: "shape", width: "minmax(5rem, 1fr)", wide: true, of: (r) => r.value.facts.count, show: (r) => shape(r.value.shape) },
      { key: "small", name: "smallest", width: "minmax(4.5rem, 1fr)", number: true, wide: true, of: (r) => r.value.facts.smallest_nonzero, show: (r) => digits(r.value.facts.smallest_nonzero) },
      { key: "large", name: "largest", width: "minmax(4.5rem, 1fr)", number: true, of: (r) => r.value.facts.largest, show: (r) => digits(r.value.facts.largest) },
      { key: "over", name: "overflow", width: "minmax(4.2rem, 1fr)", number: true, of: (r) => r.bad.over + r.bad.lost * 1e-3, show: (r) => el("span", { class: r.bad.over ? "bad" : null }, percent(r.bad.over)) },
      { key: "lost", name: "to zero", width: "minmax(4.2rem, 1fr)", number: true, of: (r) => r.bad.lost, show: (r) => el("span", { class: r.bad.lost ? "warn" : null }, percent(r.bad.lost)) },
    ],
  });
  const again = () => { grid.show(rows()); if (shown && told(shown)) open(shown); };
  const select = el("select", { onchange: (event) => { format = shownFormat = event.target.value; again(); } }, RANGED.map((f) => el("option", { value: f, selected: f === format }, f)));
  const search = el("input", { type: "search", placeholder: "part of a name", oninput: later(() => { text = search.value.toLowerCase(); again(); }) });
  const worst = rows().sort((a, b) => b.bad.over - a.bad.over || b.bad.lost - a.bad.lost)[0];
  if (worst) open(worst);
  return [el("p", { class: "soft" }, "What calibration data showed of each value, against the range of a format. In a float format numbers above the range become infinite, those far below it zero. In int8 one scale is taken to cover what was observed of the value, and numbers below half of its step become zero; weights, which have a scale for each channel, are left out."),
    el("div", { class: "controls" }, el("label", {}, "Format ", select), el("label", {}, "Search values ", search)), grid.box, picture];
}

function opsSection() {
  let text = "", type = "", kind = "";
  const why = data.ops.map((op) => reasonsOf(op));
  const folded = data.ops.map((op, i) => [op.name, op.op, op.scope || "", op.line === undefined ? "" : data.lines[op.line], why[i]].join("\n").toLowerCase());
  const alone = data.ops.map((_, i) => {
    const unit = unitOf.get(i), parts = unit && (unit.alone[unit.type] || Object.values(unit.alone)[0]);
    return parts ? Math.hypot(parts.weights || 0, parts.activations || 0) : null;
  });
  const spent = data.kernels.tuned || !spentIn.fp32.size ? spentIn.tuned : spentIn.fp32;
  const all = data.ops.map((_, i) => i);
  const status = el("p", { class: "soft", role: "status" }, count(all.length, "op"));
  const grid = gridTable({
    label: "Ops", rows: all, open: (i) => showOp(i),
    columns: [
      { key: "name", name: "op", width: "minmax(7rem, 3fr)", of: (i) => data.ops[i].name, show: (i) => named(data.ops[i].name), title: (i) => data.ops[i].name },
      { key: "op", name: "computes", width: "minmax(5rem, 1fr)", wide: true, of: (i) => data.ops[i].op, show: (i) => data.ops[i].op },
      { key: "type", name: "format", width: "minmax(5rem, 1fr)", of: (i) => data.ops[i].type, show: (i) => chip(data.ops[i].type) },
      { key: "ran", name: "ran in", width: "minmax(4rem, 1fr)", wide: true, of: (i) => data.ops[i].ran, show: (i) => el("span", { class: ranElsewhere(data.ops[i]) ? "warn" : null }, data.ops[i].ran || "") },
      { key: "ms", name: "time", width: "minmax(4.2rem, 1fr)", number: true, of: (i) => spent.get(i), show: (i) => (spent.has(i) ? ms(spent.get(i)) : "") },
      { key: "alone", name: "error alone", width: "minmax(4.5rem, 1fr)", number: true, wide: true, of: (i) => alone[i], show: (i) => (alone[i] === null ? "" : percent(alone[i])) },
      { key: "why", name: "why", width: "minmax(8rem, 4fr)", wide: true, of: (i) => why[i], show: (i) => why[i], title: (i) => why[i] },
    ],
  });
  const filter = () => {
    const rows = all.filter((i) => (!text || folded[i].includes(text)) && (!type || data.ops[i].type === type) && (!kind || data.ops[i].class === kind));
    status.textContent = rows.length === all.length ? count(all.length, "op") : `${rows.length} of ${count(all.length, "op")}`;
    grid.show(rows);
  };
  const options = (list) => [el("option", { value: "" }, "all"), ...[...new Set(list)].filter(Boolean).sort().map((v) => el("option", { value: v }, v))];
  const search = el("input", { type: "search", placeholder: "name, scope, source line or reason", oninput: later(() => { text = search.value.toLowerCase(); filter(); }) });
  return [
    Object.values(data.ops).some((op) => (op.ran || "").startsWith("uint8")) ? el("p", { class: "soft" }, "Values in int8 are stored with or without a sign: kernels named uint8 run ops in int8. An op in fp32 that the engine fused into such a kernel runs there, too.") : null,
    data.kernels.tuned ? el("p", { class: "soft" }, "A kernel's time stands at its main op; ops that are fused into it have none.") : null,
    el("div", { class: "controls" }, el("label", {}, "Search ops ", search),
      el("label", {}, "Format ", el("select", { onchange: (e) => { type = e.target.value; filter(); } }, options(data.ops.map((o) => o.type)))),
      el("label", {}, "Class ", el("select", { onchange: (e) => { kind = e.target.value; filter(); } }, options(data.ops.map((o) => o.class))))),
    status, grid.box, detail];
}

function graphSection() {
  if (!data.ops.length || !data.ops[0].inputs) return null;
  const scopes = new Set([""]);
  data.ops.forEach((op) => { const parts = (op.scope || "").split("/"); parts.forEach((_, i) => scopes.add(parts.slice(0, i + 1).join("/"))); });
  const known = [...scopes].sort();
  const picture = el("div"), title = el("p", { "aria-live": "polite" });
  const list = el("input", { list: "scopes", type: "search", placeholder: "a scope", onchange: () => scopes.has(list.value) && go(list.value, -1) });
  const go = (scope, here, quiet) => {
    const parts = scope ? scope.split("/") : [];
    title.replaceChildren(el("button", { class: "plain", onclick: () => go("", -1) }, "the model"),
      ...parts.flatMap((name, i) => [" › ", el("button", { class: "plain", onclick: () => go(parts.slice(0, i + 1).join("/"), -1) }, safe(name))]));
    picture.replaceChildren(scopeGraph(scope, here, (box) => (box.scope === null ? (go(scope, box.ops[0], true), showOp(box.ops[0])) : go(box.scope, -1))));
    if (!quiet) document.getElementById("graph").scrollIntoView();
  };
  openScope = (scope, here) => go(scope, here);
  const first = data.summary.limits[0];
  // At first the scope with the most boxes: its own ops, and the scopes in it.
  const boxes = new Map(known.map((s) => [s, 0]));
  const more = (s) => boxes.set(s, (boxes.get(s) || 0) + 1);
  data.ops.forEach((op) => more(op.scope || ""));
  known.filter(Boolean).forEach((s) => more(s.split("/").slice(0, -1).join("/")));
  const scope = known.reduce((a, b) => (boxes.get(b) > boxes.get(a) ? b : a), "");
  go(scope, first ? first.op : -1, true);
  return [el("p", { class: "soft" }, "One scope at a time, from its inputs at the top; a scope is a part of the model, such as a layer, and a rounded box one within it. A box has the colour of the format that most of its ops have, and a strip with the shares of all. A thick red line is a change of format."),
    el("div", { class: "controls" }, el("label", {}, "Scope ", list), el("datalist", { id: "scopes" }, known.slice(0, 2000).map((s) => el("option", { value: s })))), title, picture];
}

function tuningSection() {
  const phases = Object.entries((found && found.phases_s) || {}).filter(([, s]) => s >= 0.05);
  if (!phases.length) return null;
  const most = Math.max(...phases.map(([, s]) => s));
  return [el("p", {}, `${digits(found.seconds)} s in all.`), el("div", { class: "bars" }, phases.map(([name, s]) =>
    [el("span", {}, name), el("div", { class: "fill", style: { width: (100 * s) / most + "%" } }), el("span", {}, digits(s) + " s")]))];
}

// The model's inputs or outputs, by name, type and shape; nothing where the graph is not known.
function portsOf(kind) {
  const ports = data.values.filter((v) => (kind === "input" ? v.from === "input" : v.output));
  return ports.length ? el("p", {}, `${kind === "input" ? "Inputs" : "Outputs"}: `, ports.slice(0, MOST_ROWS).map((v, i) => [i ? "; " : "", el("code", {}, v.name), ` ${v.dtype}, ${shape(v.shape)}`]), ".") : null;
}

function runSection() {
  if (!data.how_to_run.length) return null;
  return [el("pre", { tabindex: 0, role: "region", "aria-label": "Code that runs the model" }, data.how_to_run.map((line) => el("span", {}, line))), portsOf("input"), portsOf("output")];
}

function notesSection() {
  const notes = [...((found && found.warnings) || []).map((w) => ["warning: ", w]), ...data.unknown.map((u) => ["not known: ", u])];
  return notes.length ? [el("ul", {}, notes.map(([kind, text]) => el("li", {}, el("strong", {}, kind), text)))] : null;
}

header();
const main = document.getElementById("report"), nav = document.getElementById("contents");
main.replaceChildren();
// Paper unfolds nothing: all that is folded away is open while the page prints.
let folded = [];
addEventListener("beforeprint", () => { folded = [...document.querySelectorAll("details:not([open])")]; folded.forEach((one) => { one.open = true; }); });
addEventListener("afterprint", () => folded.forEach((one) => { one.open = false; }));
for (const [id, title, make] of SECTIONS) {
  const parts = make();
  if (!parts) continue;
  main.append(el("section", { id, "aria-labelledby": id + "-title" }, el("h2", { id: id + "-title" }, title), parts));
  nav.append(el("a", { href: "#" + id }, title));
}
main.append(el("p", { class: "soft" }, `Made by finecast for ${safe(data.model.name)} (${data.model.digest}), plan ${data.plan.digest} of ${safe(data.plan.policy)}.`));
