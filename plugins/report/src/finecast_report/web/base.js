"use strict";
// The report's data, elements, and figures as text. Text from a model becomes a text node, never
// markup; characters that would reorder or hide text are shown escaped.

const data = JSON.parse(document.getElementById("content").textContent);
const found = data.result;
const FP32 = "fp32";

const UNSAFE =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;
const safe = (text) =>
  String(text).replace(UNSAFE, (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) made.style.setProperty(k, v);
    else made.setAttribute(name, value === true ? "" : safe(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(safe(child)));
  }
  return made;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const digits = (x, n = 3) => (!isNumber(x) ? "–" : x && Math.abs(x) < 1e-4 ? x.toExponential(n - 1) : Number(x.toPrecision(n)).toString());
const ms = (x) =>
  !isNumber(x) ? "–" : Math.abs(x) >= 1 ? digits(x) + " ms" : digits(1000 * x) + " µs";
const percent = (x) => (isNumber(x) ? digits(100 * x) + "%" : "–");
const megabytes = (x) => (isNumber(x) ? (x / 1e6).toFixed(2) + " MB" : "–");
const times = (x) => (isNumber(x) ? "x" + x.toFixed(2) : "–");
const count = (n, noun) => n.toLocaleString("en") + " " + noun + (n === 1 ? "" : "s");
const shape = (dims) => (dims === null ? "?" : dims.map((d) => (d === null ? "?" : d)).join("×") || "one number");
// A long name without its middle, so that both its start and its end tell it apart.
const short = (text, most) => {
  const whole = safe(text);
  const head = Math.floor((most - 1) / 3);
  return whole.length > most ? whole.slice(0, head) + "…" + whole.slice(head + 1 - most) : whole;
};
const named = (name) => el("span", { class: "mid" }, el("span", {}, name.slice(0, -12)), el("span", {}, name.slice(-12)));
const castText = (x) => (!isNumber(x) || !x ? ms(x) : x < 0 ? "saves " + ms(-x) : "costs " + ms(x));
const sum = (list) => list.reduce((a, b) => a + b, 0);

// A format as a small label: its name always stands beside its colour.
const KNOWN = ["fp32", "bf16", "fp16", "tf32", "int8", "int8_weights", "int4_weights"];
const paint = (type) => "t-" + (KNOWN.includes(type) ? type : "other");
const chip = (type) => (type ? el("span", { class: "chip " + paint(type) }, type) : "");

// Numbers of ops, units and values, made once.
const unitOf = new Map();
data.units.forEach((unit) => unit.ops.forEach((op) => unitOf.set(op, unit)));
const opByName = new Map(data.ops.map((op, index) => [op.name, index]));
const usersOf = data.values.map(() => []);
data.ops.forEach((op, index) => (op.inputs || []).forEach((value) => usersOf[value].push(index)));

// Whether a kernel ran in another format than was asked for; codes are int8 with or without sign.
const plain = (type) => (type || "").replace(/^u?int8.*/, "int8");
const ranElsewhere = (op) => Boolean(op.ran && op.type && plain(op.ran) !== plain(op.type));

// Plans write microseconds as "us".
const micro = (text) => text.replace(/(\d) us\b/g, "$1 µs");
// A sentence in which no line ends within the name of an option.
const sentence = (text) => micro(text).split(/(--[a-z-]+)/).map((part, i) => (i % 2 ? el("span", { class: "together" }, part) : part));
function reasonsOf(op) {
  return (op.deciding || []).map((i) => micro(data.reasons[i].text)).filter(Boolean).join("; ");
}

// The accuracy that a plan has to keep, in words.
const asked = (found && found.conditions) || {};
// Whether what did not pass meets the limit on all data, so that it lacks a certificate alone.
const uncertified = (metric) => Boolean(asked.confidence) && isNumber(asked.target_metric) && isNumber(metric)
  && (asked.higher_is_better === false ? metric <= asked.target_metric : metric >= asked.target_metric);
const accuracy = !isNumber(asked.target_metric) ? "your limit"
  : `your limit (${found.metric} ${asked.higher_is_better === false ? "≤" : "≥"} ${digits(asked.target_metric, 6)})`;

// Milliseconds of each op in a model: of a kernel the main op has all; else as plans were chosen by.
const mainOf = { fp32: new Map(), tuned: new Map() };
function opTimes(model) {
  const spent = new Map();
  const kernels = data.kernels[model];
  if (kernels) {
    for (const kernel of kernels) {
      const [main] = kernel.ops;
      if (main !== undefined) spent.set(main, (spent.get(main) || 0) + kernel.ms);
      kernel.ops.forEach((op) => mainOf[model].set(op, main));
    }
    return spent;
  }
  data.ops.forEach((op, index) => {
    const time = (op.ms || {})[model === FP32 ? FP32 : op.type];
    if (isNumber(time)) spent.set(index, time);
  });
  return spent;
}
const spentIn = { fp32: opTimes(FP32), tuned: opTimes("tuned") };

// What a unit's format gains and costs, compared with fp32; of one in fp32 its best other format.
function trade(unit) {
  const others = Object.keys(unit.error).filter((f) => f !== FP32);
  const price = (f) => (unit.ms[FP32] || 0) - (unit.ms[f] || 0) - (unit.casts_ms[f] || 0);
  const low = unit.type !== FP32 ? unit.type : others.sort((a, b) => price(b) - price(a))[0];
  if (!low) return null;
  const timed = isNumber(unit.ms[FP32]) && isNumber(unit.ms[low]);
  return {
    low,
    saved: timed ? unit.ms[FP32] - unit.ms[low] : null,
    casts: isNumber(unit.casts_ms[low]) ? unit.casts_ms[low] : null,
    net: timed ? price(low) : null,
    before: unit.error[FP32],
    after: unit.error[low],
    rise: isNumber(unit.error[FP32]) && isNumber(unit.error[low]) ? unit.error[low] - unit.error[FP32] : null,
  };
}

// The limits of a format. Those of int8 follow from the value: 255 steps cover what was observed.
function rangeOf(facts, format) {
  if (format !== "int8") {
    const range = data.formats[format]; // reports of earlier releases have the two limits not
    return { to_zero_up_to: range.smallest / 2, overflow_from: range.largest, ...range };
  }
  const step = (Math.max(facts.highest, 0) - Math.min(facts.lowest, 0)) / 255;
  return { overflow_from: Infinity, to_zero_up_to: step / 2, smallest_normal: 0, smallest: step, largest: facts.largest };
}
// The format that ranges are shown in at first: the one that most low ops of the plan have.
const RANGED = [...Object.keys(data.formats).filter((f) => f !== FP32 && f !== "tf32"), "int8"];
let shownFormat = Object.entries(data.plan.counts).sort((a, b) => b[1] - a[1]).map(([type]) => type).find((type) => RANGED.includes(type)) || "fp16";

// What becomes in a format of the numbers from 2**e up to 2**(e + 1).
function fate(e, range) {
  if (2 ** e >= range.overflow_from) return "over";
  if (2 ** (e + 1) <= range.to_zero_up_to) return "lost";
  return 2 ** (e + 1) <= range.smallest_normal ? "subnormal" : "fits";
}

// The share of a value's numbers that a format cannot hold. `first` is the exponent of the
// smallest binade, and `binades[k]` numbers are from 2**(first + k) up to twice that.
function misfits(facts, format) {
  const range = rangeOf(facts, format);
  const found = { over: facts.infs, lost: 0, subnormal: 0, fits: 0 };
  facts.binades.forEach((n, k) => { found[fate(facts.first + k, range)] += n; });
  // The binade of the largest number is only in part out of range: some of it is, at least one.
  if (isNumber(facts.largest) && facts.largest >= range.overflow_from && found.over === facts.infs) found.over += 1;
  const total = facts.count || 1;
  return { over: found.over / total, lost: found.lost / total, subnormal: found.subnormal / total };
}
