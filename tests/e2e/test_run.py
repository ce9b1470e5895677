"""One default-shaped job, seen as a user sees it: while it runs, at its end, and in what it leaves."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora.journal.run_folder import RunFolder
from dora.trainer.metrics import METRICS
from tests.e2e.runs import (
    Run,
    alive,
    assert_audit_clean,
    assert_one_clear_error,
    command,
    environment,
    get,
    run_to_end,
    settings,
)

pytestmark = pytest.mark.timeout(400)

STEPS = 8
COUNTERS = ("version_conflicts", "scheduling_aborts", "staleness_violations")


@dataclass
class Finished:
    """A run that has ended, and what was asked of it before."""

    run: Run
    folder: RunFolder
    answers: dict[str, tuple[int, str, str]] = field(default_factory=dict)  # path -> status, content type, body
    shown: str = ""  # by `dora status`
    children: list[psutil.Process] = field(default_factory=list)
    listens: set[str] = field(default_factory=set)  # addresses at which any of its processes can be reached
    code: int = -1


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """K = 2 on three engines and two ranks, with an evaluation in between."""
    arguments = settings(
        run__folder=tmp_path_factory.mktemp("runs"),
        run__steps=STEPS,
        rollout__groups_per_step=16,
        engine__instances=3,
        trainer__checkpoint_every=4,
        eval__every=4,
        eval__sets='[{name="heldout", prompts=24}, {name="sampled", prompts=4, samples=2, temperature=1.0}]',
        status__port=0,
    )
    with Run(*arguments) as run:
        seen = Finished(run, run.folder)
        run.until_trained(1)
        seen.answers = {path: get(f"{run.url}{path}") for path in ("/status", "/metrics", "/healthz", "/")}
        seen.shown = subprocess.run(
            command("status", run.url), capture_output=True, text=True, check=True, timeout=60, env=environment()
        ).stdout
        seen.children = run.children()
        for process in [psutil.Process(run.process.pid), *seen.children]:
            seen.listens |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        seen.code = run.end()
        yield seen


def rows(finished: Finished, kind: str) -> list[dict[str, Any]]:
    lines = finished.folder.metrics.read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def test_a_run_ends_with_exit_code_0_and_leaves_no_process(finished: Finished) -> None:
    assert finished.code == 0, finished.run.told()
    assert len(finished.children) >= 3 + 1 + 2 + 1  # engines, torchrun, ranks, grader
    assert alive(finished.children) == []
    assert "".join(finished.run.err) == ""


def test_nothing_of_a_run_can_be_reached_from_another_machine(finished: Finished) -> None:
    assert finished.listens == {"127.0.0.1"}


def test_a_line_is_printed_for_every_step_and_evaluation(finished: Finished) -> None:
    lines = "".join(finished.run.out).splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [
        f"step {s}/{STEPS}" for s in range(1, STEPS + 1)
    ]
    scores = [line.split(" ")[1:3] for line in lines if line.startswith("version ")]
    assert scores == [[f"{v}:", name] for v in (0, 4, 8) for name in ("heldout", "sampled")]


def test_the_summary_says_what_came_out_and_where_it_lies(finished: Finished) -> None:
    summary = "".join(finished.run.out).partition("finished: ")[2]
    for wanted in (
        f"all {STEPS} steps are trained",
        f"{STEPS} of {STEPS} steps in ",
        "held-out reward (heldout): ",
        " at version 0, ",
        f" at version {STEPS}",
        "tokens sampled, ",
        "staleness of trained groups: 0: ",
        "audit of C1, C2, C3: clean",
        f"everything is in {finished.folder.root}",
    ):
        assert wanted in summary, summary


def test_status_metrics_health_and_page_are_served_while_it_runs(finished: Finished) -> None:
    assert {path: (status, kind.split(";")[0]) for path, (status, kind, _) in finished.answers.items()} == {
        "/status": (200, "application/json"),
        "/metrics": (200, "text/plain"),
        "/healthz": (200, "text/plain"),
        "/": (200, "text/html"),
    }
    status = json.loads(finished.answers["/status"][2])
    assert status["phase"] == "running"
    assert status["run_id"] == finished.folder.run_id
    assert status["max_staleness"] == 2
    assert len(status["instances"]) == 3
    assert {name: status["counts"][name] for name in COUNTERS} == dict.fromkeys(COUNTERS, 0)
    assert finished.answers["/healthz"][2] == "running\n"
    metrics = finished.answers["/metrics"][2]
    for name in COUNTERS:
        assert f"\ndora_{name}_total 0\n" in metrics, metrics
    assert "dora_event_loop_lag_seconds" in metrics


def test_dora_status_shows_a_live_run(finished: Finished) -> None:
    assert finished.folder.run_id in finished.shown
    assert f" of {STEPS}. " in finished.shown or f" of {STEPS} is being trained" in finished.shown


def test_dora_status_shows_a_finished_run_from_a_copy_of_its_folder(finished: Finished, tmp_path: Path) -> None:
    copy = shutil.copytree(finished.folder.root, tmp_path / "copy")
    result = run_to_end("status", str(copy))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Finished in ")
    assert f"{STEPS} of {STEPS} steps" in result.stdout
    assert run_to_end("status", "--watch", str(copy)).stdout.splitlines()[-1].startswith("Finished in ")


def test_every_step_has_a_row_with_all_keys(finished: Finished) -> None:
    steps = rows(finished, "step")
    assert [row["step"] for row in steps] == list(range(STEPS))
    assert len({frozenset(row) for row in steps}) == 1
    assert all(METRICS.keys() <= row["trainer"].keys() for row in steps)
    assert {"reward_mean", "staleness", "idle_s", "rollout_idle_share", "tokens_per_s", "window", "dropped",
            "live_versions", "lag_p99_s", *COUNTERS} <= steps[0].keys()  # fmt: skip
    assert sum(row["num_groups"] for row in steps) == 16 * STEPS == sum(steps[-1]["staleness"])


def test_evaluations_are_attributed_to_their_version_and_set(finished: Finished) -> None:
    found = [(row["version"], row["name"], row["num_samples"]) for row in rows(finished, "evaluation")]
    assert found == [(v, *one) for v in (0, 4, 8) for one in (("heldout", 24), ("sampled", 8))]


def test_the_audit_is_clean(finished: Finished) -> None:
    assert_audit_clean(finished.folder)


def test_the_deep_audit_agrees_with_the_trainers_own_forward_pass(finished: Finished) -> None:
    result = run_to_end("audit", "--deep", str(finished.folder.root))
    assert result.returncode == 0, result.stdout


def test_the_deep_audit_names_versions_and_kept_trajectories_that_were_altered(
    finished: Finished, tmp_path: Path
) -> None:
    copy = RunFolder(Path(shutil.copytree(finished.folder.root, tmp_path / finished.folder.run_id)))
    weights = copy.versions / f"v{STEPS:06d}" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    first, *others = copy.trajectories.read_bytes().splitlines(keepends=True)
    copy.trajectories.write_bytes(b"".join((first, *others, first)))
    result = run_to_end("audit", "--deep", str(copy.root))
    assert result.returncode == 3, result.stdout
    assert f"VIOLATION damage: {weights} does not match its checksum in the journal" in result.stdout
    assert f"{copy.trajectories}, line {len(others) + 2}: trajectory" in result.stdout
    copy.tokens.unlink()
    result = run_to_end("audit", "--deep", str(copy.root))
    assert (result.returncode, result.stderr) == (3, "")
    assert "VIOLATION damage: tokens.bin is missing" in result.stdout


def test_trajectories_are_kept_with_text_tokens_and_logprobs(finished: Finished) -> None:
    lines = [json.loads(line) for line in finished.folder.trajectories.read_text().splitlines()]
    kept = [line for line in lines if line.get("outcome", "trained") == "trained"]
    assert len(kept) == 4 * STEPS
    for one in kept:
        assert 0 <= one["step"] - one["version"] <= 2
        assert len(one["tokens"]) == len(one["logprobs"]) > 0
        assert one["prompt"].endswith("=")


def test_an_exported_version_loads_with_transformers(finished: Finished, tmp_path: Path) -> None:
    target = tmp_path / "model"
    result = run_to_end("export", str(finished.folder.root), "--version", str(STEPS), "--to", str(target))
    assert result.returncode == 0, result.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompt = tokenizer("a3b4=", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]
    again = run_to_end("export", str(finished.folder.root), "--version", str(STEPS), "--to", str(target))
    assert again.returncode == 2
    assert "already exists" in again.stderr


def test_a_version_that_was_never_published_is_not_exported(finished: Finished) -> None:
    result = run_to_end("export", str(finished.folder.root), "--version", "99")
    assert result.returncode == 2
    assert "--version 99:" in result.stderr


def test_a_place_that_cannot_hold_an_export_is_named(finished: Finished) -> None:
    result = run_to_end("export", str(finished.folder.root), "--to", "/dev/null/model")
    assert_one_clear_error(result, code=1, says="--to /dev/null/model: cannot be written: .*Not a directory")


def test_a_finished_run_is_not_resumed(finished: Finished) -> None:
    result = run_to_end("run", "--resume", str(finished.folder.root), "--set", "status.port=0")
    assert result.returncode == 2
    assert result.stderr.startswith(f"dora: {finished.folder.root}: the run has ended: all {STEPS} steps are trained")
