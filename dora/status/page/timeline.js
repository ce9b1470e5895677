// The timeline: trainer ranks and servers x time. Zoom by dragging, wheel with Ctrl, buttons or keys; hover for what happens there.

import { theme } from "./colors.js";
import { byId, element } from "./dom.js";
import { percent, plural, time } from "./format.js";
import { Lanes, stops } from "./lanes.js";
import { drawAxis, drawFolded, drawLanes, drawMoves, drawPublished, drawTriangle, shares } from "./paint.js";
import { words } from "./words.js";

const MARKS = 20, AXIS = 22, FOLDED = 240, MIN_SPAN_S = 0.5, ALL_LANES = -1;

export class Timeline {
  constructor() {
    this.kinds = { rank: new Lanes(), instance: new Lanes() };
    this.steps = []; // {at, step} of trained steps
    this.now = 0;
    this.view = null; // {from, to}; null: the whole run
    this.follows = true; // the end of the view goes with the run
    this.drag = null;
    this.isNew = true; // nothing was shown yet
    this.canvas = byId("lanes");
    this.listen();
    drawLegend();
  }

  add(rows) {
    for (const t of rows) this.kinds[t.kind]?.add(t);
  }

  addSteps(rows) {
    for (const x of rows) this.steps.push({ at: x.at, step: x.step });
  }

  /** Show a run that is `now` seconds old. */
  show(now) {
    this.now = Math.max(now, this.kinds.instance.end, this.kinds.rank.end);
    if (this.view && this.follows) {
      const span = this.view.to - this.view.from;
      this.view = { from: Math.max(0, this.now - span), to: Math.max(span, this.now) };
    }
    if (this.isNew && this.now > 1 && this.steps.length) this.begin();
    this.draw();
  }

  /** Begin with as many steps as have room for the numbers of their versions, and without a long start. */
  begin() {
    this.isNew = false;
    if (this.kinds.instance.isFolded) return;
    const room = Math.floor(this.box().width / 22), first = this.steps[this.steps.length - 1 - room];
    const from = first ? first.at : 0.95 * this.kinds.instance.firstWork();
    if (from > 0.2 * this.now) this.view = { from, to: this.now };
  }

  get span() {
    return this.view ?? { from: 0, to: Math.max(1, this.now) };
  }

  // -- layout ---------------------------------------------------------------------------------------------------------

  /** The parts from top to bottom: {kind, y, height, numbers}; `numbers` is null if its lanes are folded. */
  parts() {
    const parts = [];
    let y = MARKS;
    for (const [kind, lanes] of Object.entries(this.kinds)) {
      const numbers = lanes.numbers(), many = this.kinds.instance.total;
      const one = many <= 8 ? 24 : many <= 16 ? 19 : many <= 32 ? 15 : 12, size = lanes.isShared ? 1.5 * one : one;
      if (!lanes.total) continue;
      const height = lanes.isFolded ? (kind === "rank" ? 70 : FOLDED) : numbers.length * size;
      parts.push({ kind, y, height, numbers: lanes.isFolded ? null : numbers });
      y += height + 8;
    }
    return parts;
  }

  box() {
    const width = this.canvas.clientWidth, left = width < 520 ? 58 : 84;
    return { x: left, width: Math.max(20, width - left - 4) };
  }

  // -- drawing --------------------------------------------------------------------------------------------------------

  draw() {
    const parts = this.parts(), last = parts[parts.length - 1];
    const bottom = last ? last.y + last.height : MARKS + 40, ratio = window.devicePixelRatio || 1, colors = theme();
    const width = this.canvas.clientWidth, height = bottom + AXIS, box = this.box(), view = this.span;
    if (!width) return;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    drawPublished(context, this.kinds.instance.published, { ...box, y: 0, height: MARKS }, view, colors);
    this.label(context, "published", MARKS / 2 - 3, colors);
    for (const part of parts) this.drawPart(context, part, { ...box, y: part.y, height: part.height }, view, colors, ratio);
    if (!parts.length) this.label(context, "Nothing is recorded yet.", MARKS + 20, colors, 400);
    drawAxis(context, { ...box, y: bottom }, view, colors);
    if (this.drag) this.drawSelection(context, box, bottom, colors);
    this.describe();
  }

  drawPart(context, part, box, view, colors, ratio) {
    const lanes = this.kinds[part.kind];
    if (!part.numbers) {
      drawFolded(context, lanes.folded, box, view, colors, ratio);
      drawMoves(context, lanes.moves.get(ALL_LANES) ?? [], box, view, colors);
      this.label(context, `${lanes.total.toLocaleString("en-US")}`, part.y + part.height / 2 - 7, colors);
      this.label(context, part.kind === "rank" ? "ranks" : "servers", part.y + part.height / 2 + 7, colors);
      return;
    }
    drawLanes(context, part.numbers.map((number) => lanes.lanes.get(number)), box, view, colors, ratio, stops(this.kinds.rank.lanes.get(0)));
    const size = part.height / part.numbers.length, every = Math.ceil(12 / size);
    part.numbers.forEach((number, i) => {
      drawMoves(context, lanes.moves.get(number) ?? [], { ...box, y: part.y + i * size, height: size }, view, colors);
      if (i % every === 0) this.label(context, `${this.nameOf(part.kind)} ${number}`, part.y + (i + 0.5) * size, colors);
    });
  }

  nameOf(kind) {
    const isNarrow = this.box().x < 80;
    return kind === "rank" ? (isNarrow ? "rank" : "trainer") : isNarrow ? "srv" : "server";
  }

  label(context, text, y, colors, width = this.box().x - 8) {
    context.font = '12px system-ui, "Liberation Sans", sans-serif';
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.fillStyle = colors.quiet;
    context.fillText(text, 0, y, width);
  }

  drawSelection(context, box, bottom, colors) {
    const [a, b] = [this.drag.from, this.drag.to].sort((left, right) => left - right);
    context.globalAlpha = 0.18;
    context.fillStyle = colors.ink;
    context.fillRect(a, 0, b - a, bottom);
    context.globalAlpha = 1;
  }

  describe() {
    const { from, to } = this.span, total = this.kinds.instance.total;
    const text = `Timeline of ${total} servers from ${time(from)} to ${time(to)} of the run`;
    if (this.canvas.getAttribute("aria-label") !== text) this.canvas.setAttribute("aria-label", text);
  }

  // -- zoom and hover -------------------------------------------------------------------------------------------------

  zoom(factor, at = 0.5) {
    const { from, to } = this.span, span = Math.max(MIN_SPAN_S, (to - from) * factor), middle = from + at * (to - from);
    this.set(middle - at * span, middle + (1 - at) * span);
  }

  pan(share) {
    const { from, to } = this.span;
    this.set(from + share * (to - from), to + share * (to - from));
  }

  set(from, to) {
    const span = Math.min(to - from, this.now);
    const begin = Math.min(Math.max(0, from), Math.max(0, this.now - span));
    this.view = span >= this.now ? null : { from: begin, to: begin + span };
    this.follows = !this.view || begin + span >= this.now - 1e-6;
    this.draw();
  }

  listen() {
    const canvas = this.canvas, keys = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.set(0, this.now),
      ArrowLeft: () => this.pan(-0.25), ArrowRight: () => this.pan(0.25), Home: () => this.pan(-1e9), End: () => this.pan(1e9),
    };
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    const buttons = { "zoom-in": "+", "zoom-out": "-", earlier: "ArrowLeft", later: "ArrowRight", whole: "0" };
    for (const [id, key] of Object.entries(buttons)) byId(id).addEventListener("click", keys[key]);
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = this.box();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.min(1, Math.max(0, (event.offsetX - box.x) / box.width)));
    }, { passive: false });
    canvas.addEventListener("dblclick", () => this.set(0, this.now));
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", () => this.release());
    for (const name of ["pointerleave", "pointercancel"]) canvas.addEventListener(name, () => this.leave());
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      drawLegend();
      this.draw();
    });
  }

  press(event) {
    if (event.button !== 0) return;
    this.drag = { from: event.offsetX, to: event.offsetX };
    if (event.pointerType === "mouse") this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (this.drag) {
      this.drag.to = event.offsetX;
      this.draw();
    }
    this.hover(event.offsetX, event.offsetY);
  }

  release() {
    const drag = this.drag, box = this.box(), { from, to } = this.span;
    this.drag = null;
    if (!drag || Math.abs(drag.to - drag.from) < 6) return this.draw();
    const at = (x) => from + (Math.min(Math.max(x, box.x), box.x + box.width) - box.x) / box.width * (to - from);
    const [start, end] = [at(drag.from), at(drag.to)].sort((a, b) => a - b);
    this.set(start, Math.max(start + MIN_SPAN_S, end));
  }

  leave() {
    byId("tip").hidden = true;
    if (this.drag) {
      this.drag = null;
      this.draw();
    }
  }

  hover(x, y) {
    const box = this.box(), { from, to } = this.span, tip = byId("tip");
    const at = from + (x - box.x) / box.width * (to - from);
    const part = this.parts().find((candidate) => y >= candidate.y && y < candidate.y + candidate.height);
    const lines = part && x >= box.x ? this.linesAt(part, at, y) : [];
    tip.hidden = !lines.length;
    if (!lines.length) return;
    tip.replaceChildren(...lines.map((line) => element("div", {}, line)));
    tip.style.left = `${Math.max(0, Math.min(x + 14, this.canvas.clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y + 18}px`;
  }

  /** The lines of text to show about a place. */
  linesAt(part, at, y) {
    const lanes = this.kinds[part.kind], parted = (row) => shares(row).sort((a, b) => b[2] - a[2]).slice(0, 6).map(([activity, version, share]) => `${percent(share)} ${words(activity)}${version === null ? "" : `, v${version}`}`);
    if (!part.numbers) {
      const row = lanes.rowAt(at);
      if (!row) return [];
      const moved = lanes.movedAt(ALL_LANES, at);
      return [`At ${time(at)}, of ${row.lanes.toLocaleString("en-US")} ${part.kind === "rank" ? "ranks" : "servers"}:`,
        ...parted(row),
        ...(moved ? [`${plural(moved, "answer")} moved between servers`] : [])];
    }
    const number = part.numbers[Math.min(part.numbers.length - 1, Math.floor((y - part.y) / (part.height / part.numbers.length)))];
    const lane = lanes.lanes.get(number), i = lane.after(at);
    if (i >= lane.starts.length || lane.starts[i] > at) return [];
    const moved = lanes.movedAt(number, at), row = lanes.rowAt(at, number);
    if (row) return [`Server ${number} at ${time(at)}`, ...parted(row), ...(moved ? [`${plural(moved, "answer")} moved here from other servers`] : [])];
    const version = lane.versions[i], step = part.kind === "rank" ? this.stepAt(at) : null;
    return [
      `${part.kind === "rank" ? "Trainer rank" : "Server"} ${number} at ${time(at)}`,
      `${words(lane.activities[i])}${version === null ? "" : `, v${version}`}${step === null ? "" : `, step ${step + 1}`}`,
      `for ${time(lane.ends[i] - lane.starts[i])}, from ${time(lane.starts[i])}`,
      ...(moved ? [`${plural(moved, "answer")} moved here from other servers`] : []),
    ];
  }

  /** The step that was trained or waited for. */
  stepAt(at) {
    const found = this.steps.find((one) => one.at >= at) ?? this.steps[this.steps.length - 1];
    return found ? found.step + (found.at < at ? 1 : 0) : null;
  }
}

function drawLegend() {
  const colors = theme(), keys = [
    ["generating, in the color of the version", (c) => ["#88ccee", "#f0d442", "#d55e00"].forEach((hex, i) => { c.fillStyle = hex; c.fillRect(8 * i, 0, 8, 13); })],
    ["idle", (c) => { c.fillStyle = colors.faint; c.fillRect(0, 0, 24, 13); c.strokeStyle = colors.line; c.strokeRect(0.5, 0.5, 23, 12); }],
    ["loading weights", (c) => { c.fillStyle = colors.ink; for (let x = 0; x < 24; x += 8) c.fillRect(x, 0, 3, 13); }],
    ["lost, then down", (c) => { c.strokeStyle = colors.wrong; c.lineWidth = 2; c.beginPath(); for (const [x, y] of [[1, 2], [9, 10], [9, 2], [1, 10]]) y === 2 ? c.moveTo(x, y) : c.lineTo(x, y); c.stroke(); c.fillStyle = colors.wrong; c.fillRect(5, 5, 19, 2); }],
    ["answers moved here", (c) => drawTriangle(c, 12, 11, 5, colors)],
    ["training", (c) => { c.globalAlpha = 0.72; c.fillStyle = colors.ink; c.fillRect(0, 0, 24, 13); }],
    ["copying or saving weights", (c) => { c.globalAlpha = 0.35; c.fillStyle = colors.ink; c.fillRect(0, 0, 24, 13); }],
  ];
  byId("legend").replaceChildren(...keys.map(([text, paint]) => {
    const canvas = element("canvas", { width: "24", height: "13", "aria-hidden": "true" });
    paint(canvas.getContext("2d"));
    return element("span", {}, canvas, text);
  }));
}
