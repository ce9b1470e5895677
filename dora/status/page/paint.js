// How the timeline is drawn: pixels of lanes, stacked shares of folded lanes, axis and marks. Color means version; what is not
// generating is grey.

import { color, isStriped, mix, onColor, pixel } from "./colors.js";
import { moment } from "./format.js";
import { losses, stretches } from "./lanes.js";
import { words } from "./words.js";

/** How far apart ranks and servers may note that a run was stopped. */
const AROUND_S = 1;

/** How much of the panel's color is in an activity: 1 for what generates, less for what does not. */
const IS_IDLE = /^(empty|waiting|start|unreported|end)/;

/** The color of a span; `stripes` are drawn over every second pair of columns. */
export function paintOf(activity, version, colors) {
  if (activity === "down") return { fill: colors.panel, stripes: null };
  if (activity.startsWith("push")) return { fill: colors.panel, stripes: colors.ink };
  if (activity.startsWith("empty")) return { fill: version === null ? colors.faint : mix(color(version), colors.panel, 0.16), stripes: null };
  if (IS_IDLE.test(activity)) return { fill: colors.faint, stripes: null };
  if (activity === "copying" || activity === "saving") return { fill: mix(colors.ink, colors.panel, 0.35), stripes: null };
  if (version === null || version === undefined) return { fill: mix(colors.ink, colors.panel, 0.72), stripes: null };
  return { fill: color(version), stripes: isStriped(version) ? mix(color(version), "#000000", 0.72) : null };
}

/** A function that gives the pixels of an activity, plain and striped; `behind`: how far its version is behind, if that is shown. */
function pixelMaker(colors) {
  const memory = new Map();
  return (activity, version, behind = null) => {
    const key = behind === null ? `${activity} ${version}` : `behind ${behind}`;
    if (!memory.has(key)) {
      const { fill, stripes } = behind === null ? paintOf(activity, version, colors) : { fill: behindColor(behind, colors), stripes: null };
      memory.set(key, [pixel(fill), pixel(stripes ?? fill)]);
    }
    return memory.get(key);
  };
}

/** One row of pixels a lane. Short pushes and losses are drawn last and at least two columns wide. */
export function pixelsOf(lanes, { from, to, width, colors }) {
  const image = new ImageData(width, lanes.length), cells = new Uint32Array(image.data.buffer);
  const scale = width / (to - from), pixelsFor = pixelMaker(colors);
  const isBrief = (activity) => activity === "down" || activity.startsWith("push");
  lanes.forEach((lane, row) => {
    for (const brief of lane.rows.length ? [] : [false, true]) {
      for (let i = lane.after(from); i < lane.starts.length && lane.starts[i] < to; i++) {
        if (isBrief(lane.activities[i]) !== brief) continue;
        const start = Math.max(0, Math.floor((lane.starts[i] - from) * scale));
        const end = Math.min(width, Math.max(start + (brief ? 2 : 1), Math.round((lane.ends[i] - from) * scale)));
        const [plain, striped] = pixelsFor(lane.activities[i], lane.versions[i]);
        for (let x = start; x < end; x++) cells[row * width + x] = (x & 7) < 3 ? striped : plain;
      }
    }
  });
  return image;
}

const SCRATCH = typeof OffscreenCanvas === "undefined" ? null : new OffscreenCanvas(1, 1);

/** Draw lanes below each other: pixels, then gaps, then version numbers and losses. `stopped`: when the run was stopped. */
export function drawLanes(context, lanes, box, view, colors, ratio, stopped) {
  const width = Math.max(1, Math.round(box.width * ratio)), height = box.height / lanes.length;
  const scratch = SCRATCH ?? document.createElement("canvas");
  scratch.width = width;
  scratch.height = lanes.length;
  scratch.getContext("2d").putImageData(pixelsOf(lanes, { ...view, width, colors }), 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(scratch, box.x, box.y, box.width, box.height);
  context.fillStyle = colors.panel;
  for (let i = 1; i < lanes.length; i++) context.fillRect(box.x, box.y + i * height - 1, box.width, height > 14 ? 2 : 1);
  lanes.forEach((lane, i) => {
    const y = box.y + i * height;
    if (lane.rows.length) drawShared(context, lane, { ...box, y: y + 1, height: height - 2 }, view, colors, ratio);
    drawDown(context, lane, { ...box, y, height }, view, colors, stopped);
    if (!lane.rows.length) drawNumbers(context, lane, { ...box, y, height }, view);
    drawWaiting(context, lane, { ...box, y, height }, view, colors);
  });
}

/** Draw the shares of the versions in a lane below each other. */
function drawShared(context, lane, box, view, colors, ratio) {
  drawBandNumbers(context, drawShares(context, lane.rows, box, view, colors, ratio, { isCrowded: false, down: colors.panel }), box, ratio);
}

/** Write what a rank waits for where there is room: of several causes, that of the longest span. */
function drawWaiting(context, lane, box, view, colors) {
  const scale = box.width / (view.to - view.from), waits = /^(waiting|start)/;
  context.font = `${Math.min(11, box.height - 2)}px system-ui, "Liberation Sans", sans-serif`;
  context.textBaseline = "middle";
  context.fillStyle = colors.quiet;
  let i = lane.after(view.from);
  while (i < lane.starts.length && lane.starts[i] < view.to) {
    const first = i;
    let longest = i;
    for (; i < lane.starts.length && waits.test(lane.activities[i]); i++) {
      if (lane.ends[i] - lane.starts[i] > lane.ends[longest] - lane.starts[longest]) longest = i;
    }
    if (i === first) {
      i += 1;
      continue;
    }
    const left = Math.max(0, (lane.starts[first] - view.from) * scale), right = Math.min(box.width, (lane.ends[i - 1] - view.from) * scale);
    if (right - left < 30) continue;
    const isAgain = longest > 0 && lane.activities[longest] === "start";
    const text = isAgain ? "stopped and resumed" : words(lane.activities[longest]).replace(/^waiting for (the )?/, "");
    if (context.measureText(text).width + 8 <= right - left) context.fillText(text, box.x + left + 4, box.y + box.height / 2);
  }
}

function drawDown(context, lane, box, view, colors, stopped) {
  const x = (time) => box.x + ((time - view.from) / (view.to - view.from)) * box.width;
  const isStopped = (at) => stopped.some(([from, to]) => at >= from - AROUND_S && at <= to + AROUND_S);
  context.lineWidth = 1.5;
  for (let i = lane.after(view.from); i < lane.starts.length && lane.starts[i] < view.to; i++) {
    if (lane.activities[i] !== "down") continue;
    context.strokeStyle = isStopped(lane.starts[i]) ? colors.line : colors.wrong;
    context.beginPath();
    context.moveTo(Math.max(box.x, x(lane.starts[i])), box.y + box.height / 2);
    context.lineTo(Math.min(box.x + box.width, x(lane.ends[i])), box.y + box.height / 2);
    context.stroke();
  }
  let last = -Infinity;
  context.strokeStyle = colors.wrong;
  for (const at of losses(lane)) {
    if (at < view.from || at > view.to || x(at) - last < 8 || isStopped(at)) continue;
    last = x(at);
    const size = Math.min(5, box.height / 2 - 2), left = x(at), middle = box.y + box.height / 2;
    context.lineWidth = 2.5;
    context.beginPath();
    context.moveTo(left - size, middle - size);
    context.lineTo(left + size, middle + size);
    context.moveTo(left - size, middle + size);
    context.lineTo(left + size, middle - size);
    context.stroke();
  }
}

function drawNumbers(context, lane, box, view) {
  const scale = box.width / (view.to - view.from);
  context.textBaseline = "middle";
  for (const [version, start, end] of stretches(lane, view.from, view.to)) {
    const left = box.x + Math.max(0, (start - view.from) * scale), right = box.x + Math.min(box.width, (end - view.from) * scale);
    for (const [text, size, space] of [[`v${version}`, 11, 3], [`${version}`, 11, 2], [`${version}`, 9, 0.5]]) {
      context.font = `600 ${Math.min(size, box.height - 2)}px system-ui, "Liberation Sans", sans-serif`;
      const width = context.measureText(text).width + 2 * space;
      if (width > right - left) continue;
      context.fillStyle = color(version);
      context.fillRect(left, box.y + 1, width, box.height - 3);
      context.fillStyle = onColor(color(version));
      context.fillText(text, left + space, box.y + box.height / 2);
      break;
    }
  }
}

/** The shares of a folded row from bottom to top: [activity, version, share], versions in order, then what does not generate. */
export function shares(row) {
  const rank = ([activity]) => (activity === "down" ? 4 : activity.startsWith("push") ? 3 : IS_IDLE.test(activity) ? 2 : 1);
  const total = row.entries.reduce((sum, entry) => sum + entry[2], 0) || 1;
  return [...row.entries]
    .sort((a, b) => rank(a) - rank(b) || (a[1] ?? -1) - (b[1] ?? -1) || (a[0] < b[0] ? -1 : 1))
    .map(([activity, version, seconds]) => [activity, version, seconds / total]);
}

/** The newest version of a folded row; -1 without one. */
const newestOf = (row) => row.entries.reduce((most, entry) => Math.max(most, entry[1] ?? -1), -1);

/** Whether there are too many versions in view to tell them apart. */
export function isCrowded(rows, box, view) {
  const seen = rows.filter((row) => row.end > view.from && row.at < view.to);
  return seen.length > 1 && newestOf(seen[seen.length - 1]) - newestOf(seen[0]) > box.width / 12;
}

/** The color of a version that is `behind` versions older than the newest. */
const behindColor = (behind, colors) => colors.series[Math.min(behind, colors.series.length - 1)];

/** Draw versions x time: at each time, the share of the lanes that each version has. Where there are too many versions, the
    color says how far each is behind the newest. */
export function drawFolded(context, rows, box, view, colors, ratio) {
  const crowded = isCrowded(rows, box, view);
  const labels = drawShares(context, rows, box, view, colors, ratio, { isCrowded: crowded, down: colors.wrong });
  if (crowded) drawBehind(context, rows, box, colors);
  else drawBandNumbers(context, labels, box, ratio);
}

/** Draw what is done at each time as bands, and return where the band of each version is highest. */
function drawShares(context, rows, box, view, colors, ratio, options) {
  const width = Math.max(1, Math.round(box.width * ratio)), height = Math.max(1, Math.round(box.height * ratio));
  const image = new ImageData(width, height), cells = new Uint32Array(image.data.buffer);
  const scale = width / (view.to - view.from), labels = new Map(), pixelsFor = pixelMaker(colors), down = pixel(options.down);
  let done = 0;
  for (const row of rows) {
    if (row.end <= view.from || row.at >= view.to) continue;
    const left = Math.max(done, Math.floor((row.at - view.from) * scale)), right = Math.min(width, Math.ceil((row.end - view.from) * scale));
    if (right <= left) continue;
    done = right;
    let bottom = height;
    const newest = newestOf(row), parts = shares(row);
    for (const [activity, version, share] of parts) {
      const top = bottom - share * height, isBehind = options.isCrowded && version !== null && (activity === "decoding" || activity === "prefill");
      const [plain, striped] = activity === "down" ? [down, down] : pixelsFor(activity, version, isBehind ? newest - version : null);
      for (let y = Math.max(0, Math.round(top)); y < Math.round(bottom); y++) {
        for (let x = left; x < right; x++) cells[y * width + x] = ((x + y) & 7) < 3 ? striped : plain;
      }
      if (version !== null && (activity === "decoding" || activity === "prefill")) note(labels, version, left, right, (top + bottom) / 2, bottom - top);
      bottom = top;
    }
  }
  const scratch = SCRATCH ?? document.createElement("canvas");
  scratch.width = width;
  scratch.height = height;
  scratch.getContext("2d").putImageData(image, 0, 0);
  context.drawImage(scratch, box.x, box.y, box.width, box.height);
  return labels;
}

/** Explain the colors of a crowded part. */
function drawBehind(context, rows, box, colors) {
  const most = rows.reduce((found, row) => {
    const newest = newestOf(row);
    return row.entries.reduce((far, entry) => Math.max(far, newest - (entry[1] ?? newest)), found);
  }, 0);
  const texts = Array.from({ length: Math.min(most + 1, colors.series.length) }, (_, i) => (i ? `${i} behind` : "newest version"));
  context.font = '600 11px system-ui, "Liberation Sans", sans-serif';
  context.textBaseline = "middle";
  const widths = texts.map((text) => context.measureText(text).width + 24);
  context.fillStyle = colors.panel;
  context.fillRect(box.x + 6, box.y + box.height - 26, widths.reduce((sum, width) => sum + width, 6), 20);
  let x = box.x + 12;
  texts.forEach((text, i) => {
    context.fillStyle = behindColor(i, colors);
    context.fillRect(x, box.y + box.height - 21, 10, 10);
    context.fillStyle = colors.ink;
    context.fillText(text, x + 14, box.y + box.height - 16);
    x += widths[i];
  });
}

/** Remember where the band of a version is highest, and how far it reaches. */
function note(labels, version, left, right, middle, height) {
  const old = labels.get(version);
  if (!old) labels.set(version, { left, right, middle, height, x: (left + right) / 2 });
  else {
    old.right = right;
    if (height > old.height) Object.assign(old, { middle, height, x: (left + right) / 2 });
  }
}

function drawBandNumbers(context, labels, box, ratio) {
  context.textBaseline = "middle";
  for (const [version, band] of labels) {
    const height = Math.min(16, Math.floor(band.height / ratio));
    context.font = `600 ${height < 14 ? 9 : 11}px system-ui, "Liberation Sans", sans-serif`;
    const text = `v${version}`, size = context.measureText(text).width + 6;
    if (height < 10 || (band.right - band.left) / ratio < size) continue;
    const x = box.x + Math.min(Math.max(band.x / ratio - size / 2, band.left / ratio), box.width - size), y = box.y + band.middle / ratio;
    context.fillStyle = color(version);
    context.fillRect(x, y - height / 2, size, height);
    context.fillStyle = onColor(color(version));
    context.fillText(text, x + 3, y);
  }
}

const TICKS = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** Draw the time axis below a box. */
export function drawAxis(context, box, view, colors) {
  const wanted = (view.to - view.from) / Math.max(2, box.width / 95);
  const step = TICKS.find((tick) => tick >= wanted) ?? Math.ceil(wanted / 86400) * 86400;
  context.font = '11px system-ui, "Liberation Sans", sans-serif';
  context.textBaseline = "top";
  context.textAlign = "center";
  for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) {
    const x = box.x + ((k * step - view.from) / (view.to - view.from)) * box.width;
    context.fillStyle = colors.line;
    context.fillRect(x, box.y, 1, 4);
    context.fillStyle = colors.quiet;
    const text = moment(Number((k * step).toFixed(3)), step), half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(Math.max(x, half), box.x + box.width - half), box.y + 6);
  }
  context.textAlign = "left";
}

/** Draw where answers came from another server, as triangles below a lane. */
export function drawMoves(context, moves, box, view, colors) {
  const x = (time) => box.x + ((time - view.from) / (view.to - view.from)) * box.width;
  const size = Math.min(3.5, box.height / 4), bottom = box.y + box.height - 2;
  let last = -Infinity;
  for (const { at, end } of moves) {
    const here = x((at + end) / 2);
    if (here < box.x || here > box.x + box.width || here - last < 2 * size + 1) continue;
    last = here;
    drawTriangle(context, here, bottom, size, colors);
  }
}

export function drawTriangle(context, x, bottom, size, colors) {
  context.beginPath();
  context.moveTo(x - size, bottom);
  context.lineTo(x + size, bottom);
  context.lineTo(x, bottom - 1.7 * size);
  context.closePath();
  context.fillStyle = colors.ink;
  context.strokeStyle = colors.panel;
  context.lineWidth = 1.5;
  context.stroke();
  context.fill();
}

/** Draw when versions were published, as many as there is room for. */
export function drawPublished(context, published, box, view, colors) {
  const x = (time) => box.x + ((time - view.from) / (view.to - view.from)) * box.width;
  context.font = '600 10px system-ui, "Liberation Sans", sans-serif';
  context.textBaseline = "middle";
  context.textAlign = "center";
  let text = -Infinity, tick = -Infinity;
  for (const [version, at] of published) {
    const here = x(at);
    if (at < view.from || at > view.to || here - tick < 3) continue;
    tick = here;
    context.fillStyle = colors.quiet;
    context.fillRect(here - 0.5, box.y + box.height - 5, 1, 5);
    const label = `v${version}`, half = context.measureText(label).width / 2;
    if (here - half < Math.max(box.x, text + 5) || here + half > box.x + box.width) continue;
    text = here + half;
    context.fillText(label, here, box.y + box.height / 2 - 3);
  }
  context.textAlign = "left";
}
