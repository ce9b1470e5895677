"""Partial rollout and over-sampling as typed on a command line: requests take new weights, surplus is discarded."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.phases import GroupPhase
from dora.journal.audit import audit
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import events_of, orders_of, run_to_end, small

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

STEPS = 2


def run(parent: Path, strategy: str, **changes: object) -> tuple[RunFolder, str]:
    """A finished run, and what it printed."""
    result = run_to_end("run", *small(parent, rollout__strategy=strategy, run__steps=STEPS, **changes))
    assert result.returncode == 0, result.stderr
    (folder,) = parent.iterdir()
    return RunFolder(folder), result.stdout


def test_partial_goes_on_under_new_weights_and_tells_how_many_answers_mix_versions(
    tmp_path: Path, slow_model: Path
) -> None:
    folder, printed = run(
        tmp_path,
        "partial",
        model__path=slow_model,
        rollout__max_staleness=1,
        rollout__groups_per_step=2,
        rollout__group_size=2,
        engine__slots=2,
    )
    assert len(orders_of(folder, cmd.CommitGroup)) == STEPS * 2
    mixed = [e for e in events_of(folder, ev.GenerationFinished) if len({v for v, _, _ in e.spans}) > 1]
    assert mixed, "no update met an answer in its middle"
    report = audit(folder)
    assert report.ok, report.violations
    assert report.broken_by_design["C1"].split()[0] != "0"
    assert "C1 is broken by design: " in printed
    assert "audit of C2: clean" in printed


def test_oversample_discards_what_the_step_does_not_take(tmp_path: Path) -> None:
    folder, printed = run(tmp_path, "oversample", rollout__oversample=2)
    dropped = orders_of(folder, cmd.DropGroup)
    assert {o.outcome for o in dropped} == {GroupPhase.DISCARDED}
    assert len(orders_of(folder, cmd.CommitGroup)) == STEPS * 4
    report = audit(folder)
    assert report.ok, report.violations
    assert report.groups["discarded"] == len(dropped) > 0
    assert report.groups["admitted"] == STEPS * 4 + len(dropped)
    assert f"C2 is broken by design: {len(dropped)} groups discarded" in printed
