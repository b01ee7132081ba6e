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
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(safe(child)));
  }
  return made;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const digits = (x, n = 3) => (isNumber(x) ? Number(x.toPrecision(n)).toString() : "–");
const ms = (x) =>
  !isNumber(x) ? "–" : Math.abs(x) >= 1 ? digits(x) + " ms" : digits(1000 * x) + " µs";
const percent = (x) => (isNumber(x) ? digits(100 * x) + "%" : "–");
const megabytes = (x) => (isNumber(x) ? (x / 1e6).toFixed(2) + " MB" : "–");
const times = (x) => (isNumber(x) ? "×" + x.toFixed(2) : "–");
const count = (n, noun) => n.toLocaleString("en") + " " + noun + (n === 1 ? "" : "s");
const shape = (dims) => (dims === null ? "?" : dims.map((d) => (d === null ? "?" : d)).join("×") || "one number");
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

function reasonsOf(op) {
  return (op.deciding || []).map((i) => data.reasons[i].text).filter(Boolean).join("; ");
}

// Milliseconds of each op in a model: its share of its kernel, else as plans were chosen by.
function opTimes(model) {
  const spent = new Map();
  const kernels = data.kernels[model];
  if (kernels) {
    for (const kernel of kernels)
      for (const op of kernel.ops) spent.set(op, (spent.get(op) || 0) + kernel.ms / kernel.ops.length);
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

// The share of a value's numbers that a format cannot hold. `first` is the exponent of the
// smallest binade, and `binades[k]` numbers are from 2**(first + k) up to twice that.
function misfits(facts, format) {
  const range = data.formats[format];
  const found = { over: facts.infs, lost: 0, subnormal: 0 };
  facts.binades.forEach((n, k) => {
    const low = 2 ** (facts.first + k);
    if (low > range.largest) found.over += n;
    else if (2 * low <= range.smallest / 2) found.lost += n;
    else if (2 * low <= range.smallest_normal) found.subnormal += n;
  });
  // The binade of the largest number is only in part out of range: some of it is, at least one.
  if (isNumber(facts.largest) && facts.largest > range.largest && found.over === facts.infs) found.over += 1;
  const total = facts.count || 1;
  return { over: found.over / total, lost: found.lost / total, subnormal: found.subnormal / total };
}
