"use strict";
// A table of any length, of which only the rows in sight are elements; and the page of one op.

// Options: label, columns [{key, name, width, number, wide, of(row), show(row)}], rows, open(row).
// The body is one stop of the Tab key: arrows move the chosen row, Enter opens it.
function gridTable(options) {
  const { columns, open } = options;
  const rem = parseFloat(getComputedStyle(document.documentElement).fontSize) || 16;
  const id = "grid" + gridTable.made++;
  let rows = options.rows, sorted = options.sorted || null, down = true, chosen = -1;
  const narrow = matchMedia("(max-width: 640px)");
  const height = () => (narrow.matches ? 3.6 : 2.1) * rem; // on a phone names have a line of their own
  const body = el("div", { class: "body", role: "rowgroup", tabindex: 0, "aria-label": options.label + ": arrow keys choose a row, Enter opens it" });
  const filler = el("div", { role: "presentation", class: "filler" });
  body.append(filler);
  const head = el("div", { class: "head", role: "row", "aria-rowindex": 1 });
  const box = el("div", { class: "grid-table", role: "grid", "aria-label": options.label, "aria-colcount": columns.length }, el("div", { role: "rowgroup" }, head), body);
  const whole = columns.some((c) => c.wide) ? el("div", {}, box, el("p", { class: "soft narrow" }, "Choose a row to see what has no column here.")) : box;
  // Paper does not scroll: there the columns share its width.
  const template = (paper) => columns.filter((c, i) => !((c.wide || !i) && narrow.matches)).map((c) => (paper ? c.width.replace(/\([^,]+,/, "(0,") : c.width)).join(" ");
  const cells = columns.map((column) => {
    const button = el("button", { onclick: () => sortBy(column) }, column.name);
    return el("div", { role: "columnheader", class: (column.number ? "n" : "") + (column.wide ? " wide" : "") }, button);
  });
  head.append(...cells);

  function sortBy(column, keep) {
    down = keep ? down : sorted === column.key ? !down : Boolean(column.number);
    sorted = column.key;
    const sign = down ? -1 : 1;
    const last = (v) => v === null || v === undefined || v === "";
    rows = [...rows].sort((a, b) => {
      const [x, y] = [column.of(a), column.of(b)];
      if (last(x) || last(y)) return last(x) - last(y);
      return sign * (x < y ? -1 : x > y ? 1 : 0);
    });
    columns.forEach((c, i) => cells[i].setAttribute("aria-sort", c === column ? (down ? "descending" : "ascending") : "none"));
    chosen = -1;
    draw(true);
  }
  let drawn = "";
  function draw(anew, everything) {
    const most = everything ? 200 : Infinity;
    const total = Math.min(rows.length, most);
    filler.style.height = total * height() + "px";
    body.style.height = everything ? total * height() + "px" : Math.min(22 * rem, Math.max(rows.length, 1) * height() + 2) + "px";
    const from = everything ? 0 : Math.max(Math.floor(body.scrollTop / height()) - 5, 0);
    const to = everything ? total : Math.min(from + Math.ceil((body.clientHeight || 22 * rem) / height()) + 10, rows.length);
    const state = `${from} ${to} ${chosen} ${narrow.matches}`;
    if (!anew && state === drawn) return;
    drawn = state;
    head.style.setProperty("grid-template-columns", template(everything));
    const made = [];
    for (let i = from; i < to; i++) {
      const row = rows[i];
      made.push(el("div", {
        class: "row" + (i === chosen ? " chosen" : ""), role: "row", id: `${id}-${i}`, "aria-rowindex": i + 2, "aria-selected": i === chosen ? "true" : "false",
        style: { top: i * height() + "px", "grid-template-columns": template(everything) }, onclick: () => { choose(i); open(row); },
      }, columns.map((c) => el("div", { role: "gridcell", class: (c.number ? "n" : "") + (c.wide ? " wide" : ""), title: c.title ? c.title(row) : null }, c.show(row)))));
    }
    body.replaceChildren(filler, ...made);
    box.setAttribute("aria-rowcount", rows.length + 1);
    if (chosen >= from && chosen < to) body.setAttribute("aria-activedescendant", `${id}-${chosen}`);
    else body.removeAttribute("aria-activedescendant");
  }
  function choose(i) {
    chosen = Math.max(0, Math.min(i, rows.length - 1));
    const top = chosen * height();
    if (top < body.scrollTop) body.scrollTop = top;
    if (top + height() > body.scrollTop + body.clientHeight) body.scrollTop = top + height() - body.clientHeight;
    draw(true);
  }
  body.addEventListener("scroll", () => requestAnimationFrame(() => draw()));
  body.addEventListener("keydown", (event) => {
    const page = Math.max(Math.floor(body.clientHeight / height()) - 1, 1);
    const to = { ArrowDown: chosen + 1, ArrowUp: chosen - 1, PageDown: chosen + page, PageUp: chosen - page, Home: 0, End: rows.length - 1 }[event.key];
    if (to !== undefined && rows.length) { event.preventDefault(); choose(to); }
    else if (event.key === "Enter" && chosen >= 0) { event.preventDefault(); open(rows[chosen]); }
  });
  narrow.addEventListener("change", () => draw(true));
  addEventListener("beforeprint", () => draw(true, true));
  addEventListener("afterprint", () => draw(true));
  const first = columns.find((c) => c.key === sorted);
  if (first) { down = Boolean(first.number); sortBy(first, true); } else draw(true);
  return { box: whole, show(list) { rows = list; body.scrollTop = 0; const c = columns.find((one) => one.key === sorted); chosen = -1; if (c) sortBy(c, true); else draw(true); } };
}
gridTable.made = 0;

// Waits until typing pauses, so that 10,000 rows are not filtered at each key.
function later(act) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(act, 120); };
}

function opLink(index, text) {
  return el("button", { class: "plain", onclick: () => showOp(index) }, text ?? data.ops[index].name);
}

// The page of one op: all that is known of it.
const detail = el("div", { class: "detail", hidden: true, tabindex: -1, role: "region", "aria-label": "The chosen op" });
let openScope = null, cameFrom = null;
function closeDetail() {
  detail.hidden = true;
  if (cameFrom && cameFrom.isConnected) { cameFrom.scrollIntoView({ block: "center" }); cameFrom.focus({ preventScroll: true }); }
}
detail.addEventListener("keydown", (event) => { if (event.key === "Escape") closeDetail(); });
function showOp(index) {
  if (!detail.contains(document.activeElement)) cameFrom = document.activeElement;
  const op = data.ops[index], unit = unitOf.get(index), other = unit && trade(unit);
  const rows = [
    ["computes", `${op.op}${op.native ? `, ${op.native}` : ""} (${op.class})`],
    ["format", el("span", {}, chip(op.type) || "keeps its own type", op.ran && op.ran !== op.type ? [" ran in ", chip(op.ran)] : null)],
    ["why", reasonsOf(op) || "no reason is known"],
    ["time of its kernel, profiled", kernelTimes(index)],
    ["source", op.line === undefined ? null : el("code", {}, data.lines[op.line])],
    ["scope", op.scope ? el("button", { class: "plain", onclick: () => openScope && openScope(op.scope, index) }, op.scope) : null],
    ["its kernel", unit && unit.ops.length > 1 ? unit.ops.filter((i) => i !== index).slice(0, 12).map((i) => [opLink(i), " "]) : null],
    ["in " + ((other && other.low) || "a lower format"), other ? `${isNumber(other.saved) ? `as the plan was chosen by: kernel ${ms(unit.ms[FP32])} in fp32, ${ms(unit.ms[other.low])} in ${other.low}; casts: ${castText(other.casts)}; in all ${ms(other.net)} saved. ` : ""}Output error ${percent(other.before)} in fp32, ${percent(other.after)} in ${other.low}, all other ops as planned.` : null],
    ["decided by", unit && unit.by],
    ["reads, in types of the given model", (op.inputs || []).map((v) => valueLine(v))],
    ["gives", (op.outputs || []).map((v) => valueLine(v, true))],
  ];
  const verdicts = (op.reasons || []).map((i) => data.reasons[i]);
  detail.replaceChildren(...[
    el("h3", {}, op.name, " ", el("button", { onclick: closeDetail }, "Back")),
    el("table", {}, el("tbody", {}, rows.filter(([, v]) => v && v.length !== 0).map(([k, v]) => el("tr", {}, el("th", { scope: "row" }, k), el("td", {}, v))))),
    verdicts.length ? el("details", {}, el("summary", {}, "What every rule said"), el("table", {},
      el("thead", {}, el("tr", {}, ["rule", "permits", "verdict"].map((h) => el("th", { scope: "col" }, h)))),
      el("tbody", {}, verdicts.map((r) => el("tr", {}, el("td", {}, r.rule), el("td", {}, r.permits.length > 4 ? "any" : r.permits.join(" ")), el("td", {}, micro(r.text))))))) : "",
    ...(op.outputs || []).filter((v) => data.values[v].facts).slice(0, 1).map((v) => el("figure", {}, histogram(data.values[v], shownFormat), el("figcaption", {}, `Magnitudes of ${safe(data.values[v].name)} on the calibration data, in powers of two; heights are logarithmic.`))),
  ].filter(Boolean));
  detail.hidden = false;
  detail.scrollIntoView({ block: "nearest" });
  detail.focus({ preventScroll: true });
}
// The profiled times of an op's kernel in both models; of an op that is fused, its main op.
function kernelTimes(index) {
  const found = [FP32, "tuned"].filter((m) => data.kernels[m]).map((m) => {
    const main = mainOf[m].get(index);
    if (main === undefined) return `${m}: no kernel of its own`;
    return [`${m}: `, main === index ? ms(spentIn[m].get(index)) : ["part of the kernel of ", opLink(main), ` (${ms(spentIn[m].get(main))})`]];
  });
  return found.length ? found.map((one, i) => [i ? "; " : "", one]) : "not profiled";
}
function valueLine(index, out) {
  const value = data.values[index];
  const around = out ? usersOf[index].slice(0, 8).map((i) => [" to ", opLink(i)])
    : typeof value.from === "number" ? [" from ", opLink(value.from)] : ` (${value.from})`;
  return el("div", {}, el("code", {}, value.name), ` ${value.dtype}, ${shape(value.shape)}`, around, value.output ? " (output of the model)" : "");
}
