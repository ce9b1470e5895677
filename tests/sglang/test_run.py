"""A whole run on three real servers that the run starts itself: launch/configs/sglang-cpu.toml, as a user calls it.

One instance is drained in its middle and called back, so that answers migrate even where packing moves none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from dora.cli.audit import recompute
from dora.config.load import load
from dora.core import commands as cmd
from dora.core import events as ev
from dora.journal.audit import audit
from dora.journal.audit_report import AuditReport
from dora.journal.deep import VersionCheck, encode_kept, read_kept
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import Run, events_of, orders_of, run_to_end
from tests.sglang.conftest import LAUNCH

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = LAUNCH.parent / "configs" / "sglang-cpu.toml"
DRAINED = 2
#: Median k3 of the log-probs that the server returned against the trainer's own, fp32 on both sides.
LARGEST_K3 = 1e-6
#: k3 under the next version is at least so much larger, for this share of the versions.
CONTRAST = 10.0
SHARE = 0.9


@dataclass(frozen=True)
class Ended:
    folder: RunFolder
    told: str
    code: int
    audit: AuditReport


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    if os.environ.get("DORA_SGLANG") != "1":
        pytest.skip("the real server is asked for by DORA_SGLANG=1")
    runs = tmp_path_factory.mktemp("runs")
    arguments = [str(CONFIG), "--set", f"run.folder={runs}", "--set", "status.port=0"]
    with Run(*arguments, cwd=CONFIG.parents[2], patience_s=600.0) as run:
        folder = run.folder
        run.until_trained(3)
        ask(run, folder, "drain")
        run.until_status(lambda s: s["steps_trained"] >= 6, what="three steps with two servers")
        ask(run, folder, "add")
        code = run.end(timeout_s=600.0)
    return Ended(folder, run.told(), code, audit(folder))


def ask(run: Run, folder: RunFolder, verb: str) -> None:
    token = ["--token-file", str(folder.root / "status-token")]
    result = run_to_end("instances", *token, run.url, verb, str(DRAINED))
    assert result.returncode == 0, result


def test_it_ends_well_and_the_audit_is_clean(ended: Ended) -> None:
    assert ended.code == 0, ended.told
    assert ended.audit.violations == ()
    assert ended.audit.steps == 16


def test_reward_rises(ended: Ended) -> None:
    lines = [msgspec.json.decode(line) for line in ended.folder.metrics.read_bytes().splitlines()]
    rewards = [line["reward_mean"] for line in lines if line["kind"] == "step"]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.1


def test_three_versions_are_alive_at_some_moment(ended: Ended) -> None:
    assert ended.audit.max_live_versions == 3


def test_answers_migrate_between_servers(ended: Ended) -> None:
    assert ended.audit.migrations >= 1
    assert {int(event.instance) for event in events_of(ended.folder, ev.InstanceUp)} == {0, 1, 2}


def test_the_spans_that_servers_report_are_the_tags(ended: Ended) -> None:
    """Every trajectory: one contiguous run of spans over all its tokens, each of the version that it was sent for."""
    version_of = {(o.trajectory, o.attempt): o.version for o in orders_of(ended.folder, cmd.Generate)}
    answers = [*events_of(ended.folder, ev.GenerationFinished), *events_of(ended.folder, ev.GenerationStopped)]
    assert answers
    for answer in answers:
        assert {span[0] for span in answer.spans} <= {version_of[answer.trajectory, answer.attempt]}
        assert not answer.spans or answer.spans[-1][2] == answer.num_tokens


def test_server_and_trainer_agree_under_the_version_and_not_under_the_next(ended: Ended) -> None:
    checks = recompute(ended.folder, load(ended.folder.config, environ={})).checks
    assert len(checks) >= 8
    assert agreeing(checks) >= SHARE * len(checks), checks


def test_that_check_fails_for_answers_of_another_version(ended: Ended, tmp_path: Path) -> None:
    """Every version judged by its successor's weights."""
    lying = RunFolder(tmp_path)
    lying.versions.symlink_to(ended.folder.versions)
    kept = [msgspec.structs.replace(one, version=one.version + 1) for one in read_kept(ended.folder.trajectories)]
    lying.trajectories.write_bytes(b"".join(map(encode_kept, kept)))
    checks = recompute(lying, load(ended.folder.config, environ={})).checks
    assert checks
    assert agreeing(checks) < SHARE * len(checks)


def agreeing(checks: tuple[VersionCheck, ...]) -> int:
    return sum(check.k3 < LARGEST_K3 and check.k3_next >= CONTRAST * check.k3 for check in checks)
