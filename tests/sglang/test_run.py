"""A whole run on three real servers that the run starts itself: launch/configs/sglang-cpu.toml, as a user calls it.

In the middle of the run, instances are drained and recalled until answers have migrated, because packing alone may move
none.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora.app.deep import recompute
from dora.config.load import load
from dora.core import commands as cmd
from dora.core import events as ev
from dora.errors import ConfigError
from dora.journal.audit import audit
from dora.journal.audit_report import AuditReport
from dora.journal.deep import VersionCheck, encode_kept, read_kept
from dora.journal.run_folder import RunFolder
from dora.status.client import ask
from tests.e2e.runs import Run, events_of, orders_of
from tests.sglang.conftest import LAUNCH

pytestmark = [pytest.mark.sglang, pytest.mark.deep, pytest.mark.timeout(900)]

CONFIG = LAUNCH.parent / "configs" / "sglang-cpu.toml"
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
        run.until_trained(2)
        asyncio.run(provoke_a_migration(run, token=(folder.root / "status-token").read_text().strip()))
        code = run.end(timeout_s=600.0)
    return Ended(folder, run.told(), code, audit(folder))


async def provoke_a_migration(run: Run, *, token: str) -> None:
    """Drains one of two instances that share a version, and recalls it, until the requests that ran there have
    moved."""
    while run.process.poll() is None:
        try:
            status = await asyncio.to_thread(run.status)
            if status["counts"]["migrations"]:
                return
            for instance in map(str, busy_with_a_peer(status)):
                await ask(run.url, "drain", instance, token=token)
                await ask(run.url, "add", instance, token=token)
        except (ConfigError, OSError):  # it ends just now
            return


def busy_with_a_peer(status: dict[str, Any]) -> list[int]:
    """The instances whose residents could move: a peer of their version has a free slot."""
    rows = [row for row in status["instances"] if row["phase"] == "serving"]
    return [
        row["instance"]
        for row in rows
        if row["residents"]
        and any(
            peer["version"] == row["version"] and peer["residents"] < peer["slots"] for peer in rows if peer is not row
        )
    ]


def test_the_run_finishes_and_the_audit_is_clean(ended: Ended) -> None:
    assert ended.code == 0, ended.told
    assert ended.audit.violations == ()
    assert ended.audit.steps == 16


def test_reward_rises(ended: Ended) -> None:
    lines = [msgspec.json.decode(line) for line in ended.folder.metrics.read_bytes().splitlines()]
    rewards = [line["reward_mean"] for line in lines if line["kind"] == "step"]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.1


def test_several_versions_are_alive_at_some_moment(ended: Ended) -> None:
    """Three where training is fast beside the longest answers; two were seen beside other work."""
    assert 2 <= ended.audit.max_live_versions <= 3


def test_answers_migrate_between_servers(ended: Ended) -> None:
    assert ended.audit.migrations >= 1
    assert len(events_of(ended.folder, ev.InstanceUp)) == 3  # none was lost for it


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
    for name in ("versions", "journal", "tokens"):
        source, target = getattr(ended.folder, name), getattr(lying, name)
        shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
    trained = [one for one in read_kept(ended.folder.trajectories) if one.outcome == "trained"]
    kept = [msgspec.structs.replace(one, version=one.version + 1) for one in trained]
    lying.trajectories.write_bytes(b"".join(map(encode_kept, kept)))
    report = recompute(lying, load(ended.folder.config, environ={}))
    assert report.checks
    assert agreeing(report.checks) < SHARE * len(report.checks)
    assert len(report.altered) == len(kept)


def agreeing(checks: tuple[VersionCheck, ...]) -> int:
    return sum(c.k3 < LARGEST_K3 and all(n.k3 >= CONTRAST * c.k3 for n in c.neighbors) for c in checks)
