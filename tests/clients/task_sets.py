"""What a run with a task set of verifiers does, with the package itself: the guide's example, kills, and learning."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import psutil

from dora.core import events as ev
from dora.journal.deep import read_kept
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import Run, assert_audit_clean, events_of, run_to_end, settings, until_gone

ROOT: Final = Path(__file__).parents[2]
GUIDE: Final = ROOT / "docs" / "AGENTS.md"
JOB: Final = "launch/configs/verifiers-cpu.toml"
#: The learned share of right answers that is expected at least; chance is 0.14.
LEARNED: Final = 0.5


def guide(python: Path, folder: Path) -> None:
    """The guide's task set and job, as they are written there but for the model and the number of steps."""
    section = GUIDE.read_text().partition("\n## Task sets of verifiers\n")[2].partition("\n## ")[0]
    module, job = (re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("python", "toml"))  # type: ignore[index]
    (folder / "sums.py").write_text(module)
    (folder / "job.toml").write_text(job)
    values: dict[str, Any] = {
        **{"run__folder": folder / "runs", "run__steps": 2, "status__port": 0, "model__path": "seed-tools"},
        **{"rollout__groups_per_step": 2, "rollout__group_size": 2, "rollout__max_new_tokens": 64},
        **{"environment__python": python, "rollout__filter_zero_variance": False, "eval__sets__0__prompts": 2},
    }
    done = run_to_end("run", "job.toml", *settings(**values), cwd=folder, timeout_s=900.0)
    assert done.returncode == 0, done.stderr
    run = _finished(folder / "runs")
    assert all(not event.failed for event in events_of(run, ev.CallFinished))
    terms = {name for kept in read_kept(run.trajectories) for name, _ in kept.terms}
    assert terms == {"right", "brief"}, terms


def kills(python: Path, folder: Path) -> None:
    """The server is killed among its rollouts, then a host: what was under way fails, once, and the run goes on."""
    values = _values(python, folder, steps=4) | {"rollout__groups_per_step": 4, "eval__sets": "[]"}
    with Run(JOB, *settings(**values), cwd=ROOT) as run:
        for step, name in ((1, "verifiers_peer"), (2, "host")):
            run.until_trained(step)
            run.until_status(lambda s: s["environment"]["calling"] > 0, what="episodes under way")
            children = run.children()
            [killed] = [child for child in children if _is(child, name)]
            killed.kill()
            until_gone([child for child in children if _is(child, "host") or _is(child, "verifiers_peer")])
        children = run.children()
        assert run.end(timeout_s=900.0) == 0, run.told()
    until_gone(children)
    assert_audit_clean(run.folder)
    causes = Counter(event.failed.partition(":")[0] for event in events_of(run.folder, ev.CallFinished) if event.failed)
    assert {*causes} == {"host"}, causes
    reasons = {event.failed for event in events_of(run.folder, ev.CallFinished) if event.failed}
    assert any("the server of verifiers ended with signal 9" in reason for reason in reasons), reasons
    ended = [event.trajectory for event in events_of(run.folder, ev.CallFinished) if event.ended]
    assert len(ended) == len({*ended}), "an episode ended twice"


def learns(python: Path, folder: Path) -> None:
    """The job with a tool, shortened; its log-probs are computed again."""
    values = _values(python, folder, steps=16) | {"eval__sets__0__prompts": 64, "trainer__learning_rate": 2e-3}
    del values["rollout__filter_zero_variance"]
    done = run_to_end("run", JOB, *settings(**values), cwd=ROOT, timeout_s=3_000.0)
    assert done.returncode == 0, done.stderr
    run = _finished(folder)
    deep = run_to_end("audit", str(run.root), "--deep", timeout_s=600.0)
    assert deep.returncode == 0, deep.stdout
    [last] = re.findall(r"held-out reward \(heldout\): .* ([\d.]+) at version 16", done.stdout)
    assert float(last) > LEARNED, done.stdout


def _values(python: Path, folder: Path, *, steps: int) -> dict[str, Any]:
    own = {"run__folder": folder, "run__steps": steps, "status__port": 0, "environment__python": python}
    return {**own, "rollout__filter_zero_variance": False}


def _is(process: psutil.Process, name: str) -> bool:
    """Return whether a process runs such a module of environments, and is no guard of it."""
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return f"dora.environments.{name}" in command and "dora.tasks.guard" not in command


def _finished(runs: Path) -> RunFolder:
    [root] = runs.iterdir()
    folder = RunFolder(root)
    assert_audit_clean(folder)
    return folder
