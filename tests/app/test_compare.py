"""What `dora compare` reads of folders that others may have written."""

from __future__ import annotations

import json
import math
from pathlib import Path

from dora.app.compare import MAX_POINTS, _curves, _settings
from dora.journal.run_folder import RunFolder


def metrics(folder: Path, *rows: object) -> RunFolder:
    run = RunFolder(folder)
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_curves_have_the_steps_trained_and_minutes(tmp_path: Path) -> None:
    run = metrics(
        tmp_path,
        {"kind": "evaluation", "name": "sums", "version": 0, "at": 30.0, "mean": 0.25},
        {"kind": "step", "step": 0, "at": 60.0, "reward_all_mean": 0.5, "tokens_per_s": 7.0},
        {"kind": "evaluation", "name": "sums", "version": 8, "at": 600.0, "mean": 0.5},
    )
    assert _curves(run) == {
        "Held-out reward: sums": [(0, 0.5, 0.25), (8, 10.0, 0.5)],
        "Reward in training": [(1, 1.0, 0.5)],
        "Tokens sampled per second": [(1, 1.0, 7.0)],
    }


def test_a_row_with_something_else_in_it_has_no_point(tmp_path: Path) -> None:
    run = metrics(
        tmp_path,
        {"kind": "step", "step": "0", "at": 60.0, "reward_all_mean": 0.5},
        {"kind": "step", "step": 1, "at": None, "reward_all_mean": 0.5},
        {"kind": "step", "step": 2, "at": 60.0, "reward_all_mean": [0.5]},
        {"kind": "evaluation", "version": 0, "at": 30.0, "mean": None},
        {"kind": "step", "step": 3, "at": 10**400, "reward_all_mean": 0.5},
        {"kind": "step", "step": 10**30, "at": 60.0, "reward_all_mean": 0.5},
        {"kind": "step", "step": 4, "at": math.inf, "reward_all_mean": 0.5},
        {"kind": "step", "step": 5, "at": 60.0, "reward_all_mean": math.nan},
        ["kind"],
    )
    assert _curves(run) == {}


def test_long_curves_keep_their_ends(tmp_path: Path) -> None:
    rows = [{"kind": "step", "step": i, "at": i, "reward_all_mean": i} for i in range(3 * MAX_POINTS + 1)]
    (curve,) = _curves(metrics(tmp_path, *rows)).values()
    assert len(curve) <= MAX_POINTS + 1
    assert (curve[0][0], curve[-1][0]) == (1, 3 * MAX_POINTS + 1)


def test_settings_that_alter_the_experiment_come_first() -> None:
    found = _settings([{"a": "1", "run.name": '"x"', "run.seed": "0"}, {"a": "1", "run.name": '"y"', "run.seed": "1"}])
    assert [(one.key, one.values, one.alters_experiment) for one in found] == [
        ("run.seed", ["0", "1"], True),
        ("run.name", ['"x"', '"y"'], False),
    ]


def test_a_key_that_only_one_has_is_unset_in_the_other() -> None:
    (found,) = _settings([{}, {"model.path": '"seed"'}])
    assert found.values == ["unset", '"seed"']
