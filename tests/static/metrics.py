"""`python -m tests.static.metrics` writes docs/METRICS.md from the tables of the trainer, of episodes and of the drift
alarms.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dora.status import drift, episodes
from dora.trainer.metrics import LAGGED, MEASURED, PROBED, WHOLE

PAGE: Final = Path(__file__).parents[2] / "docs" / "METRICS.md"
_HEAD: Final = """# Metrics and drift alarms

Written by `python -m tests.static.metrics` from `dora/trainer/metrics.py`, `dora/status/episodes.py` and
`dora/status/drift.py`.

Each trained step is a row of kind `step` in `metrics.jsonl` of the run folder. What the trainer measured is under
`trainer`. The rest comes from the controller: `zero_variance_groups` is the number of groups whose rewards were all
equal (filtered since the last step, or trained in this one), `alarms` has the names of the drift alarms that are
raised, and `dropped` and the counters are totals since the start. What is not finite is `null`.
"""
_LAGGED: Final = """## By staleness

`lag=<l>/<name>` is over the tokens of staleness l, `all/<name>` over all tokens of the step. A staleness without tokens
is absent. μ is the policy that sampled (log-probs of the engine), π the one being trained, w = k = π/μ, and log k is
clamped to ±20. Everything is a sum over tokens until the step closes: one reduction over the ranks, and 0.5 ms more per
16,384 tokens than without percentile and extremes (1 CPU core).

At staleness 0, with one update per step, both are the same weights: `lag=0/mismatch_k3` is what engine and trainer
differ by, and all else is what the policy has moved since.
"""
_MEASURED: Final = "The following are present if the objective measures them."
_WHOLE: Final = "## Of a step"
_PROBED: Final = (
    "## Of the probe\n\nIn steps with tokens to measure (`trainer.probe_tokens`). v is the version that sampled.\n"
)
_EPISODES: Final = """## Of episodes

In runs with an environment ([AGENTS.md](AGENTS.md)). A step has them under `episodes`, over the episodes that it
trained, and so has each row of kind `evaluation`; in `/metrics` they are the gauges `dora_episode_<name>` of the last
step, with `_seconds_` for `_s_`. `environment_failed` of a step counts the episodes whose environment could not go on,
by cause, since the start; in `/metrics` it is `dora_environment_failed_total`, beside `dora_episodes_calling`, the
episodes with a call under way. `trajectories.jsonl` has `observed`, `turn_rewards` and `calls_s` of single episodes.
"""
_ALARMS: Final = """## Drift alarms

A raised alarm is a warning in `log.jsonl` and on the terminal, a line of the live view, of the page and of the summary
at the end, an entry of `alarms` in `/status`, and the gauge `dora_drift_alarm` in `/metrics`. Nothing has to be set.
"""
_CHECK: Final = """## Looking for drift before a run

`dora check --drift CONFIG.toml` runs 5 steps at learning rate 0 with the servers, pushes and trainer of the job. All
versions then have the same weights, so the mismatch must stay below the limit of `engine_mismatch` at every step and
staleness. It prints a line per step and a verdict with the likely cause, deletes its run folder, and exits with 1 if
engine and trainer disagree. The rewards of the job are not called.
"""


def render() -> str:
    """Return the text of the page."""
    measured = [_MEASURED, "", *_table(MEASURED)] if MEASURED else []
    causes = [
        "| alarm | likely cause |",
        "|---|---|",
        *(f"| `{name}` | {cause} |" for name, cause in drift.CAUSES.items()),
    ]
    rules = (drift.__doc__ or "").partition("Invariant: pure; ")[2]
    parts = [
        *(_HEAD, _LAGGED, *_table(LAGGED), "", *measured, _WHOLE, "", *_table(WHOLE), ""),
        *(_PROBED, *_table(PROBED), ""),
        *(_EPISODES, *_table(episodes.MEASURED, heading="meaning"), ""),
        *(_ALARMS, *causes, "", rules[0].upper() + rules[1:], _CHECK.rstrip()),
    ]
    return "\n".join(parts) + "\n"


def _table(rows: Mapping[str, tuple[str, str]], *, heading: str = "formula") -> list[str]:
    escaped = {name: (unit, formula.replace("|", "\\|")) for name, (unit, formula) in rows.items()}
    return [
        f"| name | unit | {heading} |",
        "|---|---|---|",
        *(f"| `{name}` | {unit} | {formula} |" for name, (unit, formula) in escaped.items()),
    ]


if __name__ == "__main__":
    PAGE.write_text(render())
