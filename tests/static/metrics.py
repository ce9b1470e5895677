"""`python -m tests.static.metrics` writes docs/METRICS.md from the tables of rows, trainer, episodes and drift alarms,
from what /metrics renders, and from launch/monitoring.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from dora.core.admission import Refusal
from dora.core.state import State
from dora.observe import activities, drift, observed, scores
from dora.observe.episodes import EnvironmentRow, EpisodeStats
from dora.observe.facts import ShellFacts
from dora.observe.figures import Figure, figures
from dora.observe.judges import JudgeRow
from dora.observe.snapshot import snapshot
from dora.status import metrics
from dora.trackers.rows import GROUPS
from dora.trainer.balance import BALANCE, REPLAYED
from dora.trainer.metrics import LAGGED, MEASURED, PROBED, WHOLE
from tests.core.world import settings

_ROOT: Final = Path(__file__).parents[2]
PAGE: Final = _ROOT / "docs" / "METRICS.md"
_HEAD: Final = """# Metrics, trackers, monitoring and drift alarms

Written by `python -m tests.static.metrics` from the declarations in `dora/observe`, `dora/trainer/metrics.py`,
`dora/status/metrics.py` and `launch/monitoring`.

A run writes a row per trained step and per evaluation into `metrics.jsonl` of its folder. Experiment trackers show
these rows ([Trackers](#trackers)). The status endpoint shows the current state: at `/metrics` in Prometheus's format
([Monitoring](#monitoring)), at `/status` as JSON, and at `/` as a page; `dora status` and `dora run` show it in the
terminal. The last column of a table says where a metric is shown besides the file: its name in `/metrics` or that of a
metric from which it can be computed, the panel of the dashboard in quotes, the page, the terminal.
"""
_ROWS: Final = """## Rows of kind `step`

Values that are not finite are `null`. `trainer` has the measurements of the trainer ([below](#by-staleness)), and
`episodes` the statistics of [episodes](#of-episodes). Counters are totals since the start. If a crash loses the row of
a step that is then trained again, the new row has the counters and times of the second training
([RELIABILITY.md](RELIABILITY.md)).
"""
_EVALUATIONS: Final = """## Rows of kind `evaluation`

There is one row for each held-out set. If a version was due for evaluation and was skipped, a row of kind
`evaluation_skipped` has its `version`, and the time in `at`.
"""
_TRACKERS: Final = """## Trackers

```
pip install 'dora-rl[tensorboard]'                            # or wandb, trackio
dora run job.toml --set 'tracking.trackers=["tensorboard"]'
tensorboard --logdir runs
```

Each tracker is a process beside the run that reads `metrics.jsonl`. The run sends it nothing and never waits for it,
except at its end: at most 10 seconds for all of them together. A tracker that raises, hangs,
is stopped or has no disk left changes nothing for the run. If its process ends, it is started again after 5, 20 and 60
seconds. If the record lacks rows at the end, a line says so, and this command logs the missing ones at any later time:

```
dora track runs/<run id>                    # --to wandb: for a run without trackers, or in another tracker
```

A tracker class (`FILE.py:Class`) that the folder names is executed only if you have signed the folder's configuration, or
with `--trust-folder` ([SECURITY.md](SECURITY.md#run-folders-of-others)).

`tracking/<tracker>/position.json` of the run folder says how far a record has come. No row is logged twice, not even
after a crash or a resume. `dora run --train-only` has no trackers.

| tracker | its record | its variables |
|---|---|---|
| `tensorboard` | an event file in `tracking/tensorboard` | none |
| `wandb` | the run of this id in `tracking.project`; with `WANDB_MODE=offline` folders in `tracking/wandb/wandb`, which `wandb sync` uploads | `WANDB_*` |
| `trackio` | the run of this id in `tracking.project` of the local database (`TRACKIO_DIR`), which `trackio show` displays and `trackio sync` copies to a Space | `TRACKIO_*`, `HF_*` |
| `FILE.py:Class` or `module:Class` | what your class writes: `dora/trackers/api.py` says what it needs, `dora/trackers/trackio.py` is a short example | none |

A process gets its tracker's variables, those that every process needs (`PATH`, `HOME`, proxies and certificates), and
those named in `tracking.pass_environment`; no key of DORA or of another tracker.

**Names.** A scalar is named by its path in the row: `trainer/loss`, `trainer/all/entropy`, `dropped/<reason>`,
`staleness/0`, and for an evaluation `evaluation/<set>/mean`. Trackers group scalars by what is before the first `/`. So
a scalar without one gets a group of the table below, as in `reward/reward_mean`, and what the trainer measures at each
staleness is a group of its own, as in `by_staleness/lag=0/entropy`. A raised drift alarm is `alarms/<name>` = 1. Texts
and `null` are left out. The x axis is the step or, for an evaluation, the version (in W&B the metrics `step` and
`version`; W&B's own step is the number of the row). TensorBoard stores scalars in float32. The configuration is logged
once, without secrets.

| group | scalars |
|---|---|
"""  # noqa: E501
_MONITORING: Final = """## Monitoring

`launch/monitoring` has three files: `prometheus.yml` to begin with, six alerts (`alerts.yml`, with tests in
`alerts.test.yml` for `promtool test rules`), and `dashboard.json` for Grafana (Dashboards → New → Import), which shows
one run, chosen by its address. Prometheus calls that address `instance`; the number of an inference server is therefore
its label `exported_instance`.

| alert | condition | for |
|---|---|---|
{alerts}

These metrics of `/metrics` are not in the tables above. Counters and histograms continue when a run is resumed; the
lag of the event loop, and what is measured over some seconds or minutes, begins again. After a kill, what was not on
the disk yet is missing: a counter may be a little lower than before. Prometheus takes that for a counter that began
again, so that its `rate` and `increase` over that moment are too high.

| name | type | meaning | dashboard |
|---|---|---|---|
{families}
"""
_LAGGED: Final = """## By staleness

`lag=<l>/<name>` is over the tokens of staleness l, `all/<name>` over all tokens of the step. A staleness without tokens
is absent. μ is the policy that sampled (log-probs of the engine), π the one being trained, w = k = π/μ, and log k is
clamped to ±20. Everything is a sum over tokens until the step closes, so that one reduction over the ranks suffices.
The percentile and the extremes take 0.5 ms per 16,384 tokens (1 CPU core).

At staleness 0, with one update per step, μ and π have the same weights: `lag=0/mismatch_k3` is the difference between
engine and trainer. Everything beyond it, at higher staleness, is the distance that the policy has moved since.
"""
_MEASURED: Final = "The following are present if the objective measures them."
_WHOLE: Final = "## Of a step"
_RECORDS: Final = """## Time, rewards and tokens

A row of kind `step` also has, since the previous row:

- `rank_s` and `instance_s`: seconds of all trainer ranks, and of all instances, by activity (below). Those of ranks are
  counted when they are reported, which is at the end of each micro-batch and step.
- `reward_all_mean`: over all answers of the groups graded since the previous row, including groups that are filtered
  and never trained (`reward_mean` is over the answers that were trained); `all_right`, `all_wrong`, `all_same` and
  `mixed`: the shares of these groups whose rewards are all 1, all 0, all another number, or not all equal. They add up
  to 1; only mixed groups have an advantage to learn from. These are absent if no group was graded.

Since the start, across resumes: `tokens`, the account of sampled tokens, in which `sampled = trained + the sum of
dropped + in_flight`, exactly; `dropped` is by outcome and kind of reason, and tokens of `evaluation` are counted
separately. A row of kind `evaluation` has `is_accuracy`: every reward was 0 or 1, so that `mean` is a share of right
answers.

What each rank and instance did at any time is in `spans.jsonl` of the run folder, and added up by bucket of time in
`timeline.jsonl`, for pictures; `dora/journal/spans.py` describes and reads both. Spans of a rank or instance neither
overlap nor leave holes. `/status` has the seconds since the start as `rank_s` and `instance_s`, most first.

With adapters an instance decodes answers of several versions at once. A span has the newest of these versions; the
timeline divides the time of `decoding` and `prefill` among them, in proportion to their requests. `/status` lists what
each instance has in `holdings`: the version, its phase (`loading`, `serving`, `unloading`, or `quarantined` after a
load or unload that failed), and its requests; `dora instances` and the page show the same, as `13 (9), 14 (15), 15
loading`. Its `version` and `phase` are then those of the newest.
"""
_PROBED: Final = (
    "## Of the probe\n\n"
    "These metrics exist in steps with tokens to measure (`trainer.probe_every`). v is the version that sampled.\n"
)
_BALANCE: Final = """## Of experts

These metrics exist in steps of a model with experts (mixture of experts), unless its layers are compiled and nothing is
replayed. The load of an expert is the number of tokens that are sent to it. Shared experts, to which all tokens are
sent, do not count.
"""
_REPLAYED: Final = (
    "With `objective.router_replay` ([TRAINER.md](TRAINER.md#experts-of-the-engine)), in addition; "
    "`lag=<l>/routing_changed_frac` is over choices of staleness l, so the increase from one staleness to the next is "
    "what a version has changed:"
)
_EPISODES: Final = """## Of episodes

These figures exist in runs with an environment ([AGENTS.md](AGENTS.md)). The row of a step has them under `episodes`,
over the episodes that the step trained; a row of kind `evaluation` has them, too. `/metrics` has those of the last
step. `trajectories.jsonl` has `observed`, `turn_rewards` and `calls_s` of single episodes.
"""
_ALARMS: Final = """## Drift alarms

A raised alarm is a warning in `log.jsonl` and on the terminal, a line of the live view, of the page and of the summary
at the end, an entry of `alarms` in `/status`, and the gauge `dora_drift_alarm` in `/metrics`. No setting is needed.
"""
_CHECK: Final = """## Looking for drift before a run

`dora check --drift CONFIG.toml` runs 5 steps at learning rate 0 with the servers, pushes and trainer of the job. All
versions then have the same weights, so the mismatch must stay below the limit of `engine_mismatch` at every step and
staleness. It prints a line per step and a verdict with the likely cause, deletes its run folder, and exits with 1 if
engine and trainer disagree. The rewards of the job are not called.
"""


def render() -> str:
    """Return the text of the page."""
    seen = _Shown()
    measured = [_MEASURED, "", *_table(MEASURED, seen, "trainer/all/"), ""] if MEASURED else []
    causes = [
        "| alarm | likely cause |",
        "|---|---|",
        *(f"| `{name}` | {cause} |" for name, cause in drift.CAUSES.items()),
    ]
    measured_of_episodes = {name: (f.unit, f.meaning) for name, f in figures(EpisodeStats).items()}
    rules = (drift.__doc__ or "").partition("Invariant: pure; ")[2]
    parts = [
        *(_HEAD, _ROWS, *_rows(observed.row_figures(), seen), "", _EVALUATIONS, *_rows(scores.row_figures(), seen), ""),
        *(_LAGGED, *_table(LAGGED, seen, "trainer/all/"), "", *measured),
        *(_WHOLE, "", *_table(WHOLE, seen, "trainer/"), "", _PROBED, *_table(PROBED, seen, "trainer/"), ""),
        *(_BALANCE, *_table(BALANCE, seen, "trainer/"), "", _REPLAYED, "", *_table(REPLAYED, seen, "trainer/"), ""),
        *(_EPISODES, *_table(measured_of_episodes, seen, "episodes/", heading="meaning"), ""),
        *(_RECORDS, *_meanings("rank", activities.RANK), ""),
        *(*_meanings("a rank waits", activities.WAITING), ""),
        *(*_meanings("instance", activities.INSTANCE), ""),
        *(*_meanings("an instance is empty", activities.EMPTY | _refusals()), ""),
        *(_TRACKERS + "\n".join(_groups()), "", seen.monitoring()),
        *(_ALARMS, *causes, "", rules[0].upper() + rules[1:], _CHECK.rstrip()),
    ]
    return "\n".join(parts) + "\n"


class _Shown:
    """Where metrics are shown."""

    def __init__(self) -> None:
        self.families = _families()
        board = json.loads((_ROOT / "launch/monitoring/dashboard.json").read_text())
        self._panels = [(p["title"], " ".join(t["expr"] for t in p.get("targets", ()))) for p in board["panels"]]
        files = {"page": (_ROOT / "dora/status/page").glob("[!u]*.js"), "terminal": [_ROOT / "dora/status/terminal.py"]}
        self._views = {view: "".join(path.read_text() for path in sorted(paths)) for view, paths in files.items()}
        self._told: set[str] = set()  # names in /metrics

    def panels(self, metric: str) -> list[str]:
        """Return the titles of the panels with a metric."""
        return [title for title, text in self._panels if re.search(rf"\bdora_{metric}(_bucket|_sum)?\b", text)]

    def where(self, metric: str, *, field: str = "") -> str:
        """Return where a metric is shown. `metric`: in /metrics; `field`: of a snapshot."""
        found = []
        if metric:
            assert metric in self.families, metric
            self._told.add(metric)
            found = [f"`dora_{metric}`", *(f'"{title}"' for title in self.panels(metric))]
        found += [view for view, text in self._views.items() if field and re.search(rf"\.{field}\b", text)]
        return ", ".join(found)

    def monitoring(self) -> str:
        """Return the section on monitoring: the alerts, and the metrics that no table has had."""
        alerts = re.findall(r"alert: (\w+)\n +expr: (?:>-\n)?(.*?)\n(?: +for: (\w+)\n)? +labels", _alerts(), re.DOTALL)
        rows = [f"| {name} | `{_cell(' '.join(expr.split()))}` | {wait or '0'} |" for name, expr, wait in alerts]
        families = [
            f"| `dora_{name}` | {kind} | {_cell(text)} | {', '.join(self.panels(name))} |"
            for name, (kind, text) in self.families.items()
            if name not in self._told
        ]
        return _MONITORING.format(alerts="\n".join(rows), families="\n".join(families))


def _alerts() -> str:
    return (_ROOT / "launch/monitoring/alerts.yml").read_text()


def _families() -> dict[str, tuple[str, str]]:
    """Return type and meaning of everything that /metrics may have, by its name without `dora_`."""
    present = snapshot(State(settings()), ShellFacts(run_id="", strategy=""))
    keys = [*WHOLE, *PROBED, *BALANCE, *REPLAYED, *(f"all/{name}" for name in (*LAGGED, *MEASURED))]
    whole = replace(
        present,
        environment=EnvironmentRow(calling=0, failed={}),
        judges=JudgeRow(),
        trainer_metrics=dict.fromkeys(keys, 0.0),
    )
    found = re.findall(r"# HELP dora_(\w+) (.+)\n# TYPE \w+ (\w+)", metrics.render(whole))
    return {name: (kind, text) for name, text, kind in found}


def _groups() -> list[str]:
    return [f"| `{group}` | {', '.join(f'`{name}`' for name in names)} |" for group, names in GROUPS.items()]


def _rows(rows: Mapping[str, Figure], seen: _Shown) -> Iterator[str]:
    yield "| name | unit | meaning | shown |\n|---|---|---|---|"
    for name, figure in rows.items():
        yield f"| `{name}` | {figure.unit} | {figure.meaning} | {seen.where(figure.metric, field=name)} |"


def _table(rows: Mapping[str, tuple[str, str]], seen: _Shown, path: str, *, heading: str = "formula") -> Iterator[str]:
    """`path`: of the names in a row."""
    yield f"| name | unit | {heading} | shown |\n|---|---|---|---|"
    for name, (unit, formula) in rows.items():
        if path == "episodes/":
            where = seen.where(metrics.episode_name(name), field=name)
        else:
            where = seen.where(metrics.trainer_name(path.removeprefix("trainer/") + name))
        yield f"| `{name}` | {unit} | {_cell(formula)} | {where} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _refusals() -> dict[str, str]:
    return {refusal.name.lower(): refusal.value for refusal in Refusal}


def _meanings(heading: str, rows: Mapping[str, str]) -> list[str]:
    return [f"| {heading} | meaning |", "|---|---|", *(f"| `{name}` | {meaning} |" for name, meaning in rows.items())]


if __name__ == "__main__":
    PAGE.write_text(render())
