// The records of the timeline: what each lane did at any time, from the rows of data/timeline.

/** The spans of one lane, in order. A bucket has sums only: the activity at the end of the bucket before comes first. */
class Lane {
  constructor() {
    this.starts = [];
    this.ends = [];
    this.activities = [];
    this.versions = [];
    this.rows = []; // [{at, end, entries}] where versions share the lane: the seconds of each are its share
  }

  add(entries, at) {
    const last = this.starts.length - 1;
    const goesOn = (entry) => last >= 0 && entry[0] === this.activities[last] && entry[1] === this.versions[last];
    const i = entries.findIndex(goesOn);
    if (i > 0) entries = [entries[i], ...entries.slice(0, i), ...entries.slice(i + 1)];
    for (const [activity, version, seconds] of entries) {
      this.span(activity, version, at, at + seconds);
      at += seconds;
    }
  }

  span(activity, version, start, end) {
    const last = this.starts.length - 1;
    if (last >= 0 && activity === this.activities[last] && version === this.versions[last] && start - this.ends[last] < 0.01) {
      this.ends[last] = end;
      return;
    }
    this.starts.push(start);
    this.ends.push(end);
    this.activities.push(activity);
    this.versions.push(version);
  }

  /** Index of the first span that ends after a moment. */
  after(moment) {
    let low = 0, high = this.ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] <= moment) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

/** All that is known of one kind of lane. */
export class Lanes {
  constructor() {
    this.lanes = new Map();
    this.folded = []; // rows of a large run: lane-seconds of all lanes
    this.moves = new Map(); // lane, or -1 for all -> [{at, end, count}] of answers that came from another server
    this.published = []; // [version, when]
    this.total = 0; // lanes
    this.end = 0;
  }

  add(t) {
    this.total = Math.max(this.total, t.num_lanes);
    this.end = Math.max(this.end, t.at + t.s);
    if (t.folded) this.folded.push({ at: t.at, end: t.at + t.s, lanes: t.num_lanes, entries: t.folded });
    this.published.push(...(t.published ?? []));
    for (const [name, count] of Object.entries(t.moved ?? {})) {
      const lane = Number(name);
      if (!this.moves.has(lane)) this.moves.set(lane, []);
      this.moves.get(lane).push({ at: t.at, end: t.at + t.s, count });
    }
    for (const [name, entries] of Object.entries(t.lanes ?? {})) {
      const number = Number(name);
      if (!this.lanes.has(number)) this.lanes.set(number, new Lane());
      this.lanes.get(number).add(entries, t.at);
      if (t.shared) this.lanes.get(number).rows.push({ at: t.at, end: t.at + t.s, entries });
    }
  }

  /** Whether several versions are generated at once in a lane. */
  get isShared() {
    return [...this.lanes.values()].some((lane) => lane.rows.length);
  }

  get isFolded() {
    return this.folded.length > 0;
  }

  numbers() {
    return [...this.lanes.keys()].sort((a, b) => a - b);
  }

  /** When a lane first had a request. */
  firstWork() {
    const firsts = [...this.lanes.values()].map((lane) => lane.starts[lane.activities.findIndex((one) => one === "decoding" || one === "prefill")] ?? Infinity);
    return Math.min(this.end, ...firsts);
  }

  /** How many answers came to a lane around a moment. */
  movedAt(lane, moment) {
    return this.moves.get(lane)?.find((move) => move.at <= moment && moment < move.end)?.count ?? 0;
  }

  /** The row of a large run, or of a lane that versions share, at a moment. */
  rowAt(moment, lane = null) {
    const rows = lane === null ? this.folded : this.lanes.get(lane).rows;
    return rows.find((row) => row.at <= moment && moment < row.end);
  }
}

/** Stretches of one version of a lane, as [version, start, end], in a span of time. */
export function stretches(lane, from, to) {
  const found = [];
  for (let i = lane.after(from); i < lane.starts.length && lane.starts[i] < to; i++) {
    const version = lane.versions[i], last = found[found.length - 1];
    if (version === null || version === undefined || lane.activities[i].startsWith("push")) continue;
    if (last && last[0] === version) last[2] = lane.ends[i];
    else found.push([version, lane.starts[i], lane.ends[i]]);
  }
  return found;
}

/** When the run was stopped and started again, as [from, to], from what a rank did. */
export function stops(lane) {
  const isStart = (activity) => activity === "start" || activity === "unreported";
  return (lane?.starts ?? []).map((at, i) => [at, lane.ends[i], i]).filter(([, , i]) => i > 0 && isStart(lane.activities[i]));
}

/** When lanes were lost: they are down after they were up. */
export function losses(lane) {
  return lane.starts.filter((_, i) => i > 0 && lane.activities[i] === "down");
}
