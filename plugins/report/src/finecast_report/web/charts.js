"use strict";
// Drawings: the frontier, the icicle of time, a histogram of binades, the graph of one scope.

// Drawings are as wide as the screen is likely to be, so that their text keeps its size.
const NARROW = matchMedia("(max-width: 640px)").matches;
const WIDTH = NARROW ? 360 : Math.min(Math.max(innerWidth - 48, 640), 1120);

// A round distance that cuts a span into three to seven parts.
function tick(span) {
  const rough = Math.max(span, 1e-12) / 5;
  const unit = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((k) => k * unit).reduce((a, b) =>
    Math.abs(Math.log(a / rough)) <= Math.abs(Math.log(b / rough)) ? a : b);
}
function ticks(low, high) {
  const step = tick(high - low), made = [];
  for (let k = Math.ceil(low / step - 1e-9); k <= high / step + 1e-9; k++) made.push(k * step);
  return made;
}

// Every plan that was considered, once: by error and by how much better than fp32 it is.
function plansOf() {
  // The chosen plan stands where the last race measured it. Plans that were in the first races
  // alone keep their distance from it there: figures of two races differ by some percent.
  const own = found.candidates.find((plan) => plan.plan === data.plan.digest && plan.final_benchmark) || null;
  const scaled = (plan, of) => (!isNumber(plan[of]) ? null : own && own[of] && isNumber(own.final_benchmark[of]) ? (plan[of] * own.final_benchmark[of]) / own[of] : plan[of]);
  const tried = new Map(found.trials.map((t) => [t.plan, t]));
  return found.candidates.map((plan) => {
    const trial = tried.get(plan.plan) || {};
    const passed = plan.passed ?? trial.passed ?? null, metric = plan.metric ?? trial.metric ?? null;
    return {
      name: plan.name, id: plan.plan, passed,
      metric,
      error: (plan.measured || {}).relative_error ?? plan.predicted.relative_error,
      measured: isNumber((plan.measured || {}).relative_error), // absent where it was not run
      last: Boolean(plan.final_benchmark),
      gain: plan.final_benchmark ? plan.final_benchmark.gain : scaled(plan, "gain"),
      ms: plan.final_benchmark ? plan.final_benchmark.latency_ms : scaled(plan, "latency_ms"), casts: plan.casts, changes: plan.changes,
      kind: passed === null ? "timed" : passed ? "passed" : uncertified(metric) ? "uncertified" : "failed",
      chosen: found.verdict === "improved" && plan.plan === data.plan.digest,
    };
  });
}

const WORDS = { timed: "not tried on all data", passed: "keeps the accuracy", failed: "misses the accuracy", uncertified: "is not certified" };

function frontierChart(plans) {
  const W = WIDTH, H = NARROW ? 320 : 400, L = 56, R = 16, T = 40, B = 48;
  const shown = plans.filter((p) => isNumber(p.gain) && isNumber(p.error));
  shown.unshift({ name: FP32, gain: 1, error: 0, kind: "passed", chosen: found.verdict !== "improved" });
  const base = found.baseline.latency_ms, first = (found.frontier[0] || { predicted: {} }).predicted.ms;
  // Predicted times are those of ops with a choice; the others take the same in each plan. They
  // are times of kernels, which add up to less than a call on a busy machine.
  const whole = data.kernels.fp32 ? Math.max(sum(data.kernels.fp32.map((k) => k.ms)), first) : base;
  const line = !isNumber(first) || found.objective !== "latency" ? [] : found.frontier.map((s) =>
    ({ error: s.predicted.relative_error, gain: whole / Math.max(s.predicted.ms + whole - first, 1e-9) }));
  const baselines = found.baselines.filter((a) => a.latency_ms).map((a) =>
    ({ name: a.name, gain: base / a.latency_ms, passed: a.passed }));
  const gains = [...shown, ...line, ...baselines].map((p) => p.gain).filter(isNumber);
  const right = Math.max(...[...shown, ...line].map((p) => p.error).filter(isNumber)) * 1.08 || 1;
  const step = tick(Math.max(...gains) - Math.min(...gains));
  const low = Math.floor(Math.min(...gains) / step) * step;
  const high = Math.max(Math.ceil(Math.max(...gains) / step) * step, low + step);
  const x = (error) => L + ((W - L - R) * error) / right;
  const y = (gain) => H - B - ((H - T - B) * (gain - low)) / (high - low);
  const parts = [];
  for (const g of ticks(low, high))
    parts.push(svg("line", { class: "grid", x1: L, x2: W - R, y1: y(g), y2: y(g) }),
      svg("text", { x: L - 8, y: y(g) + 4, "text-anchor": "end" }, "x" + digits(g)));
  for (const e of ticks(0, right).filter((_, i) => !NARROW || i % 2 === 0))
    parts.push(svg("line", { class: "grid", x1: x(e), x2: x(e), y1: T, y2: H - B }),
      svg("text", { x: x(e), y: H - B + 18, "text-anchor": "middle" }, percent(e)));
  parts.push(svg("text", { x: (L + W - R) / 2, y: H - 8, "text-anchor": "middle", class: "soft" }, "error of the output, relative"),
    svg("text", { x: 4, y: 18, class: "soft" }, found.objective === "latency" ? "speed, fp32 is 1" : "gain, fp32 is 1"));
  if (line.length > 1)
    parts.push(svg("polyline", { class: "step", points: line.map((p) => x(p.error) + "," + y(p.gain)).join(" ") }));
  for (const a of baselines)
    parts.push(svg("line", { class: "anchor", x1: L, x2: W - R, y1: y(a.gain), y2: y(a.gain) }),
      beside(`${a.name}: ${times(a.gain)}`, y(a.gain), shown.map((p) => [x(p.error), y(p.gain)]), L, W - R));
  for (const p of shown) {
    const told = `${p.name}: ${times(p.gain)}, error ${percent(p.error)}, ${WORDS[p.kind]}`;
    if (p.chosen) parts.push(svg("circle", { class: "ring", cx: x(p.error), cy: y(p.gain), r: 10 }));
    parts.push(svg("circle", { class: "dot " + p.kind, cx: x(p.error), cy: y(p.gain), r: 6 }, svg("title", {}, told)));
  }
  return svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "All plans by output error and speed; the table below has the same figures" }, parts);
}

// The text of a line at the height `at`: above or below it, at its right or left end, where it
// covers the fewest dots.
function beside(text, at, dots, left, right) {
  const width = 7.5 * text.length, radius = 8; // of letters of 13 px, and of a dot with its edge
  const places = [right, left + width + 4].flatMap((end) => [at - 5, at + 15].map((base) => ({ end, base })));
  const covered = ({ end, base }) =>
    dots.filter(([cx, cy]) => cx > end - width - radius && cx < end + radius && cy > base - 12 - radius && cy < base + 3 + radius).length;
  const best = places.reduce((one, other) => (covered(other) < covered(one) ? other : one));
  return svg("text", { x: best.end, y: best.base, "text-anchor": "end" }, text);
}

// The tree of ops by scope, or by class, with the milliseconds of a model.
function timeTree(model, by) {
  const root = { name: "all", ms: 0, inner: new Map(), ops: [] };
  const add = (path, time, op) => {
    let at = root;
    root.ms += time;
    for (const part of path) {
      if (!at.inner.has(part)) at.inner.set(part, { name: part, ms: 0, inner: new Map(), ops: [], above: at });
      at = at.inner.get(part);
      at.ms += time;
    }
    if (op !== undefined) at.op = op;
  };
  for (const [index, time] of spentIn[model]) {
    const op = data.ops[index];
    const scope = (op.scope || "").split("/").filter(Boolean);
    add(by === "class" ? [op.class, op.op, op.name] : [...scope, op.name], time, index);
  }
  const own = sum((data.kernels[model] || []).filter((k) => !k.ops.length).map((k) => k.ms));
  if (own) add(["casts and reorders of the engine"], own);
  return root;
}

const DEPTH = 5, LEAST = 0.004;
function icicle(tree, at, whole, walk) {
  const box = el("div", { class: "icicle", style: { height: DEPTH * 1.95 + "rem" } });
  const scale = Math.min(at.ms / whole, 1) || 1;
  const put = (node, left, width, level) => {
    const type = node.op === undefined ? null : data.ops[node.op].type;
    const share = node.ms / tree.ms;
    const shown = [width > 0.04 ? (type ? node.name.split("/").pop() : node.name) : "", width > 0.12 ? " " + percent(share) : ""];
    const text = `${node.name}: ${ms(node.ms)}, ${percent(share)}`;
    const look = type ? paint(type) : node.inner.size || node === tree ? "group" : "added";
    box.append(el("button", {
      class: look + (width > 0.04 ? "" : " thin"), title: text, "aria-label": [shown.join(""), text, type].filter(Boolean).join(", "), "data-walk": node.name,
      style: { left: 100 * left + "%", width: 100 * width + "%", top: level * 1.95 + "rem" },
      onclick: () => walk(node),
    }, shown));
    if (level + 1 >= DEPTH) return;
    let from = left, small = 0;
    for (const inner of [...node.inner.values()].sort((a, b) => b.ms - a.ms)) {
      const part = (width * inner.ms) / node.ms;
      if (part < LEAST) { small += inner.ms; continue; }
      put(inner, from, part, level + 1);
      from += part;
    }
  };
  if (at.ms > 0) put(at, 0, scale, 0);
  return box;
}

// One value's magnitudes by binade, with the ranges of formats above.
function histogram(value, format) {
  const facts = value.facts, W = WIDTH, H = 250, L = 8, R = 8, T = 92, B = 34;
  const range = rangeOf(facts, format);
  const last = facts.first + facts.binades.length;
  const low = Math.max(Math.min(facts.first, -26), -150), high = Math.max(last, 18);
  const x = (e) => L + ((W - L - R) * (e - low)) / (high - low);
  const top = Math.log10(Math.max(...facts.binades, 1) + 1);
  const parts = [];
  [...new Set(["fp16", "bf16", format])].forEach((name, row) => {
    const one = rangeOf(facts, name);
    if (!one.largest) return;
    const y = 18 + row * 24;
    const from = Math.max(Math.log2(one.smallest), low), to = Math.min(Math.log2(one.largest) + 0.01, high);
    parts.push(svg("line", { class: "range", x1: x(from), x2: x(to), y1: y + 8, y2: y + 8 }),
      svg("text", { x: x(Math.max(from, low)), y: y + 2, class: "soft" }, name));
  });
  facts.binades.forEach((n, k) => {
    if (!n) return;
    const e = facts.first + k, height = ((H - T - B) * Math.log10(n + 1)) / top;
    const kind = fate(e, range);
    parts.push(svg("rect", { class: "bar " + kind, x: x(e) + 0.5, width: Math.max(x(e + 1) - x(e) - 1, 1), y: H - B - height, height },
      svg("title", {}, `${n.toLocaleString("en")} numbers from 2^${e} to 2^${e + 1}`)));
  });
  for (let e = Math.ceil(low / 10) * 10; e <= high; e += high - low > 80 || NARROW ? 20 : 10)
    parts.push(svg("text", { x: x(e), y: H - 12, "text-anchor": "middle" }, "2^" + e));
  const bad = misfits(facts, format);
  const label = `${value.name}: magnitudes from ${digits(facts.smallest_nonzero)} to ${digits(facts.largest)};`
    + ` in ${format} ${percent(bad.over)} overflow, ${percent(bad.lost)} become zero`;
  return svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label }, parts);
}

// The ops of one scope, inner scopes as one box each: layers by distance from the inputs.
const MOST_BOXES = 120;
function scopeGraph(scope, here, open) {
  const prefix = scope ? scope + "/" : "";
  const boxOf = new Map(), boxes = new Map();
  data.ops.forEach((op, index) => {
    const own = op.scope || "";
    if (own !== scope && !own.startsWith(prefix)) return;
    const rest = own === scope ? null : own.slice(prefix.length).split("/")[0];
    const key = rest === null ? "op" + index : "in" + rest;
    if (!boxes.has(key)) boxes.set(key, { key, ops: [], scope: rest === null ? null : prefix + rest, name: rest ?? op.op });
    boxes.get(key).ops.push(index);
    boxOf.set(index, key);
  });
  if (!boxes.size) return el("p", {}, "No op is in this scope.");
  const all = [...boxes.values()];
  const shown = all.length > MOST_BOXES ? around(all, here, boxOf) : all;
  const kept = new Map(shown.map((b) => [b.key, b]));
  const edges = new Map();
  for (const box of shown)
    for (const op of box.ops)
      for (const value of data.ops[op].inputs || []) {
        const from = data.values[value].from, source = boxOf.get(from);
        if (source === undefined || source === box.key || !kept.has(source)) continue;
        const cast = data.ops[from].type && data.ops[op].type && data.ops[from].type !== data.ops[op].type;
        const key = source + ">" + box.key, old = edges.get(key);
        edges.set(key, { source, target: box.key, cast: cast || (old && old.cast) });
      }
  // Layers: one more than the last of its sources, in the order of the graph; a cycle between
  // groups is cut where it closes.
  const layer = new Map();
  for (const box of shown) {
    const above = [...edges.values()].filter((e) => e.target === box.key && layer.has(e.source));
    layer.set(box.key, above.length ? 1 + Math.max(...above.map((e) => layer.get(e.source))) : 0);
  }
  const rows = [];
  for (const box of shown) (rows[layer.get(box.key)] ||= []).push(box);
  const BW = 148, BH = 40, GX = 14, GY = 34, place = new Map();
  const wide = Math.max(...rows.filter(Boolean).map((r) => r.length)), W = Math.max(wide * (BW + GX), 340);
  rows.forEach((row, level) => {
    const weight = (box) => {
      const at = [...edges.values()].filter((e) => e.target === box.key && place.has(e.source)).map((e) => place.get(e.source).x);
      return at.length ? sum(at) / at.length : W / 2;
    };
    row.map((box) => [weight(box), box]).sort((a, b) => a[0] - b[0]).forEach(([, box], i) =>
      place.set(box.key, { x: (W - row.length * (BW + GX)) / 2 + i * (BW + GX) + GX / 2, y: 6 + level * (BH + GY) }));
  });
  const H = rows.length * (BH + GY);
  const paths = [...edges.values()].filter((e) => place.has(e.source) && place.has(e.target)).map((e) => {
    const a = place.get(e.source), b = place.get(e.target);
    const [x1, y1, x2, y2] = [a.x + BW / 2, a.y + BH, b.x + BW / 2, b.y];
    return svg("path", { class: "edge" + (e.cast ? " cast" : ""), d: `M${x1},${y1} C${x1},${y1 + 18} ${x2},${y2 - 18} ${x2},${y2}` },
      svg("title", {}, e.cast ? "the format changes here" : "a value"));
  });
  const drawn = shown.map((box) => {
    const at = place.get(box.key), counts = {};
    box.ops.map((i) => data.ops[i].type).filter(Boolean).forEach((type) => { counts[type] = (counts[type] || 0) + 1; });
    const types = Object.keys(counts).sort((a, b) => counts[b] - counts[a]);
    const one = box.scope === null ? data.ops[box.ops[0]] : null;
    const text = one ? `${one.name}, ${one.op}, ${one.type || "keeps its type"}` : `${box.name}: ${count(box.ops.length, "op")} in ${types.join(", ") || "no format"}`;
    const lines = [short(box.name, 20), short(one ? one.type || "" : types.join(" ") + " · " + count(box.ops.length, "op"), 22)];
    const act = () => open(box);
    return svg("g", { class: "node" + (box.ops.includes(here) && one ? " here" : ""), tabindex: 0, role: "button",
      onclick: act, onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } } },
      svg("title", {}, text), // which also names the button
      svg("rect", { class: paint(types[0] || FP32), x: at.x, y: at.y, width: BW, height: BH, rx: one ? 4 : 12 }),
      types.length > 1 ? strip(types, counts, at.x + 12, at.y + BH - 5, BW - 24) : [],
      svg("text", { class: "onchip", x: at.x + 8, y: at.y + 17 }, lines[0]),
      svg("text", { class: "onchip", x: at.x + 8, y: at.y + 33 }, lines[1]));
  });
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": "Ops of the scope, from its inputs at the top", style: { "min-width": Math.min(W, 1100) + "px", "max-width": W * 1.2 + "px" } }, paths, drawn);
  const cut = all.length > shown.length ? el("p", { class: "soft" }, `${shown.length} of ${all.length} boxes, those around the chosen op.`) : null;
  return el("div", {}, el("div", { class: "drawing", tabindex: 0, role: "region", "aria-label": "Drawing of the scope" }, picture), cut);
}
// The shares of the formats of a box's ops, side by side.
function strip(types, counts, x, y, width) {
  const whole = sum(types.map((type) => counts[type]));
  return types.map((type) => {
    const part = (width * counts[type]) / whole, left = x;
    x += part;
    return svg("rect", { class: paint(type), x: left, y, width: part, height: 4 });
  });
}
function around(all, here, boxOf) {
  const at = Math.max(all.findIndex((b) => b.key === boxOf.get(here)), 0);
  const from = Math.max(Math.min(at - MOST_BOXES / 2, all.length - MOST_BOXES), 0);
  return all.slice(from, from + MOST_BOXES);
}
