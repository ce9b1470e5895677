// Cards with curves over steps, drawn by uPlot.

import { theme } from "./colors.js";
import { byId, element } from "./dom.js";
import { count, number, percent, short } from "./format.js";
import { words } from "./words.js";
import uPlot from "./uPlot.js";

const HEIGHT = 150, MAX_CAUSES = 5, MAX_STALENESS = 12, MAX_POINTS = 512, RECENT = 5;

/** One card: heading, latest value, and a chart once there are two points. */
export class Card {
  constructor(title, note, { format = number, axis = "step", range = undefined, stacked = false } = {}) {
    Object.assign(this, { format, axis, range, stacked, chart: null, labels: "", data: null });
    this.value = element("p", { class: "value" }, "–");
    this.plot = element("div");
    this.node = element("div", { class: "card" }, element("h3", { title: note }, title), this.value, this.plot);
    new ResizeObserver(() => this.resize()).observe(this.node);
  }

  /** `series`: [label, values] ...; `latest`: nodes or texts. */
  show(x, series, latest) {
    const isMeasured = series.some(([, values]) => values.some((y) => y !== null));
    this.value.replaceChildren(...(isMeasured ? latest : ["–", unit("nothing measured yet")]));
    this.plot.hidden = !isMeasured;
    if (!isMeasured) return;
    this.x = x;
    this.series = series;
    const labels = JSON.stringify(series.map(([label]) => label));
    this.data = [x, ...this.heights()];
    if (x.length < 2 || !series.length) return;
    if (this.chart && labels === this.labels) this.chart.setData(this.data);
    else this.build(labels);
  }

  /** What is drawn: sums from below if stacked, the largest first. */
  heights() {
    const values = this.series.map(([, own]) => own);
    if (!this.stacked) return values;
    let below = this.x.map(() => 0);
    return values.map((own) => (below = own.map((y, i) => below[i] + (y ?? 0)))).reverse();
  }

  build(labels = this.labels) {
    this.chart?.destroy();
    this.labels = labels;
    const colors = theme(), shown = this.stacked ? [...this.series].reverse() : this.series, total = shown.length;
    const line = ([label], i) => {
      const stroke = colors.series[(this.stacked ? total - 1 - i : i) % colors.series.length];
      const value = (_, y, k, index) => this.tell(y, k, index);
      return { label, stroke, width: this.stacked ? 0 : 1.6, fill: this.stacked ? stroke : undefined, points: { show: this.x.length < 12 && !this.stacked, size: 5 }, value, spanGaps: true };
    };
    const grid = { stroke: colors.faint, width: 1 }, font = '11px system-ui, "Liberation Sans", sans-serif';
    const axis = { stroke: colors.quiet, grid, ticks: { show: false }, font };
    this.chart = new uPlot({
      width: this.node.clientWidth || 280, height: HEIGHT, series: [{ label: this.axis, value: (_, x) => String(x ?? this.x[this.x.length - 1]) }, ...shown.map(line)],
      axes: [{ ...axis, size: 24, gap: 2, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] },
        { ...axis, size: 46, gap: 4, space: 34, values: (_, ticks) => ticks.map((y) => this.format(y)) }],
      scales: { x: { time: false }, y: { range: this.range } }, cursor: { drag: { x: true, y: false }, y: false },
      padding: [8, () => this.half(), 0, 0],
    }, this.data, this.plot);
  }

  /** Half the width of the largest number on the x axis, which may be at its end. */
  half() {
    return 4 + 4 * count(this.x[this.x.length - 1]).length;
  }

  /** The value of one series, under the cursor or the latest. */
  tell(y, k, index) {
    const own = this.series[this.stacked ? this.series.length - k : k - 1][1];
    return this.format(own[index ?? own.length - 1]);
  }

  resize() {
    const width = this.node.clientWidth;
    if (this.chart && width && width !== this.chart.width) this.chart.setSize({ width, height: HEIGHT });
  }
}

const unit = (text) => element("small", {}, ` ${text}`);
const last = (values) => values.findLast((y) => y !== null && y !== undefined) ?? null;

/** The mean of the latest values: the value of a single step with few groups says little. */
function recent(values) {
  const known = values.filter((y) => y !== null).slice(-RECENT);
  return known.length ? known.reduce((sum, y) => sum + y, 0) / known.length : null;
}

/** Groups by their rewards. */
const GROUPS = [["mixed", (x) => x.mixed], ["all wrong", (x) => x.all_wrong], ["all right", (x) => x.all_right], ["all the same", (x) => x.all_same]];

/** Every second row, every fourth ... and the last one: a card is some 300 pixels wide. */
function thinned(rows) {
  let stride = 1;
  while (rows.length / stride > MAX_POINTS) stride *= 2;
  return rows.filter((_, i) => i % stride === 0 || i === rows.length - 1);
}

/** All cards. They keep one row per step. */
export class Cards {
  constructor() {
    this.rows = [];
    this.evaluations = [];
    this.cards = {
      heldOut: new Card("Held-out reward", "Mean reward on prompts that are never trained, by policy version", { axis: "version" }),
      reward: new Card("Reward in training", `Mean reward of all graded answers, and of those that were trained`),
      groups: new Card("Groups by their rewards", "Shares of the groups graded since the previous step, including those that are not trained. A group whose rewards are all equal has no advantage to learn from", { format: percent, stacked: true, range: [0, 1] }),
      length: new Card("Length of trained answers", "Number of tokens of the answers that were trained: mean, 90th percentile and maximum", { format: short }),
      turns: new Card("Turns of an episode", "Turns of the episodes that were trained: mean and maximum"),
      calls: new Card("Calls of an episode", "Calls of the environment by the episodes that were trained: mean and maximum"),
      entropy: new Card("Entropy of the policy", "Mean entropy of the next token at the sampling temperature, in nats"),
      mismatch: new Card("Mismatch by staleness", "k3 estimate of the divergence between the policy that sampled the tokens and the policy that is trained, in nats"),
      experts: new Card("Load of experts", "Tokens of the most used expert of a layer over the mean of that layer's experts: mean and maximum over layers"),
      speed: new Card("Tokens per second", "Response tokens sampled and trained per second", { format: short }),
      time: new Card("Trainer time by cause", "Share of the time of all trainer ranks in each step", { format: percent, stacked: true, range: [0, 1] }),
    };
    this.staleness = element("div", { class: "bars" });
    this.mean = element("p", { class: "value" }, "–");
    const bars = element("div", { class: "card" }, element("h3", { title: "Groups committed, by how many versions old they were" }, "Staleness of committed groups"), this.mean, this.staleness);
    byId("cards").replaceChildren(...Object.values(this.cards).map((card) => card.node), bars);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Object.values(this.cards).forEach((card) => card.chart && card.build()));
  }

  /** Add rows of metrics.jsonl. */
  add(rows) {
    for (const x of rows) {
      if (x.kind === "step") this.rows.push(x);
      else if (x.kind === "evaluation") this.evaluations.push(x);
    }
    if (rows.length) this.draw();
  }

  draw() {
    const rows = thinned(this.rows), steps = rows.map((x) => x.step + 1), cards = this.cards;
    const of = (get) => rows.map((x) => get(x) ?? null);
    const trainer = (name) => of((x) => x.trainer?.[name]);
    const latest = (get) => recent(this.rows.map((x) => get(x) ?? null)); // of all rows: what is drawn is thinned
    this.drawHeldOut();
    const all = of((x) => x.reward_all_mean), trained = of((x) => x.reward_mean);
    cards.reward.show(steps, [["all answers", all], ["trained", trained]], [number(latest((x) => x.reward_all_mean)), unit("of all,"), ` ${number(latest((x) => x.reward_mean))}`, unit(`trained (last ${RECENT} steps)`)]);
    const graded = rows.filter((x) => typeof x.mixed === "number"), shares = GROUPS.map(([name, get]) => [name, graded.map((x) => get(x) ?? 0)]);
    cards.groups.show(graded.map((x) => x.step + 1), shares.filter(([, values]) => values.some((y) => y > 0)), [percent(latest((x) => x.mixed)), unit(`mixed (last ${RECENT} steps)`)]);
    const length = of((x) => x.response_len_mean), p90 = of((x) => x.response_len_p90), longest = of((x) => x.response_len_max), cut = last(trainer("all/truncated_frac"));
    cards.length.show(steps, [["mean", length], ["p90", p90], ["max", longest]], [number(last(length)), unit(`tokens, at most ${short(last(longest) ?? 0)}${cut === null ? "" : `; ${percent(cut)} cut off`}`)]);
    this.drawEpisodes(rows.filter((x) => x.episodes));
    const entropy = trainer("all/entropy");
    cards.entropy.show(steps, [["entropy", entropy]], [number(last(entropy)), unit("nats")]);
    this.drawMismatch(steps, trainer);
    this.drawExperts(steps, trainer);
    const sampled = of((x) => x.tokens_per_s), rate = of((x) => (x.duration_s > 0 ? x.num_tokens / x.duration_s : null));
    cards.speed.show(steps, [["sampled", sampled], ["trained", rate]], [short(last(sampled) ?? 0), unit("sampled,"), ` ${short(last(rate) ?? 0)}`, unit("trained")]);
    this.drawTime(steps, rows);
  }

  drawHeldOut() {
    const names = [...new Set(this.evaluations.map((e) => e.name))], versions = [...new Set(this.evaluations.map((e) => e.version))].sort((a, b) => a - b);
    const at = new Map(this.evaluations.map((e) => [`${e.version} ${e.name}`, e.mean]));
    const series = names.map((name) => [name, versions.map((version) => at.get(`${version} ${name}`) ?? null)]);
    const first = this.evaluations.find((e) => e.mean !== null), best = this.evaluations.findLast((e) => e.name === first?.name && e.mean !== null);
    const isShare = this.evaluations.length > 0 && this.evaluations.every((e) => e.is_accuracy);
    const text = (e) => (isShare ? percent(e.mean) : number(e.mean));
    this.cards.heldOut.format = isShare ? percent : number;
    const latest = best && [text(best), unit(`${isShare ? "right " : ""}at v${best.version}${first === best ? "" : `, from ${text(first)} at v${first.version}`}`)];
    this.cards.heldOut.show(versions, series, latest);
  }

  /** Only runs with an environment have rows with episodes. */
  drawEpisodes(rows) {
    const { turns, calls } = this.cards, steps = rows.map((x) => x.step + 1);
    for (const card of [turns, calls]) card.node.hidden = !rows.length;
    const of = (get) => rows.map(({ episodes: p }) => get(p));
    const show = (card, mean, most) => card.show(steps, [["mean", mean], ["max", most]], [number(last(mean)), unit(`on average, at most ${count(last(most) ?? 0)}`)]);
    show(turns, of((p) => p.turns_mean), of((p) => p.turns_max));
    show(calls, of((p) => p.calls_mean), of((p) => p.calls_max));
  }

  drawMismatch(steps, trainer) {
    const found = [];
    for (let staleness = 0; staleness < MAX_STALENESS; staleness++) {
      const values = trainer(`lag=${staleness}/mismatch_k3`);
      if (values.some((y) => y !== null)) found.push([`staleness ${staleness}`, values]);
    }
    const all = last(trainer("all/mismatch_k3"));
    this.cards.mismatch.show(steps, found, [number(all), unit("nats over all tokens")]);
  }

  /** Only models of experts have rows with loads. */
  drawExperts(steps, trainer) {
    const card = this.cards.experts, mean = trainer("expert_load_mean"), most = trainer("expert_load_max");
    card.node.hidden = last(mean) === null;
    const unused = last(trainer("experts_unused_frac")), changed = last(trainer("routing_changed_frac"));
    const replayed = changed === null ? "" : `; ${percent(changed)} of the replayed choices are not the trainer's own`;
    card.show(steps, [["mean", mean], ["max", most]], [number(last(mean)), unit(`times the mean, ${percent(unused ?? 0)} unused${replayed}`)]);
  }

  drawTime(steps, rows) {
    const totals = new Map(), shares = rows.map((x) => ({ ...x.rank_s, start: 0 })); // starting is no part of a step
    for (const spent of shares) for (const [activity, seconds] of Object.entries(spent)) totals.set(activity, (totals.get(activity) ?? 0) + seconds);
    const order = [...totals].filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]).map(([activity]) => activity), named = order.slice(0, MAX_CAUSES), others = order.slice(MAX_CAUSES);
    const sums = shares.map((spent) => Object.values(spent).reduce((sum, seconds) => sum + seconds, 0) || 1);
    const share = (activities) => shares.map((spent, i) => activities.reduce((sum, activity) => sum + (spent[activity] ?? 0), 0) / sums[i]);
    const series = [...named.map((activity) => [words(activity), share([activity])]), ...(others.length ? [["everything else", share(others)]] : [])];
    const whole = [...totals.values()].reduce((sum, seconds) => sum + seconds, 0);
    const first = order[0];
    this.cards.time.show(steps, series, first ? [percent(totals.get(first) / whole), unit(words(first))] : ["–"]);
  }

  /** Show the staleness of groups, and the present rate of tokens. */
  status(s) {
    const total = s.staleness.reduce((sum, n) => sum + n, 0), most = Math.max(1, ...s.staleness);
    this.mean.replaceChildren(s.staleness_mean === null ? "–" : s.staleness_mean.toFixed(2), unit(`mean; at most K = ${s.max_staleness}`));
    this.staleness.replaceChildren(...s.staleness.flatMap((n, staleness) => {
      const bar = element("div");
      bar.style.width = `${(100 * n) / most}%`;
      return [element("span", {}, staleness > s.max_staleness ? `${staleness} (over K)` : String(staleness)), element("div", {}, bar), element("span", {}, total ? `${short(n)} (${percent(n / total)})` : "0")];
    }));
  }
}
