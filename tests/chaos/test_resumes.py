"""Whole runs that a resume once damaged or rejected, and files that a resume must not trust."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.chaos.checker import Verdict, check
from tests.chaos.recorded import CHUNK, FRAME, PROMPT, frame_at, read_chunks, split_payload
from tests.chaos.session import ROOT, Session
from tests.e2e.runs import Run, assert_one_clear_error, command, environment, run_to_end, settings

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

STEPS = 6
MORE_STEPS = 8


@dataclass
class Story:
    """The lives of one run, with the findings between them."""

    folder: Path
    codes: dict[str, int] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)
    versions: dict[str, list[str]] = field(default_factory=dict)  # durable ones
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    asked: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)

    def note(self, life: str, session: Session) -> None:
        """Record the end of a life."""
        self.codes[life] = session.end()
        self.told[life] = session.life.told()
        self.versions[life] = sorted(path.name for path in (self.folder / "versions").glob("v*"))
        self.verdicts[life] = check(self.folder)

    def require(self, life: str, *, code: int = 0) -> None:
        assert self.codes[life] == code, self.told[life]
        assert self.verdicts[life].violations == []


def resume(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Try a resume that is rejected."""
    line = [*command("run", "--resume", str(folder)), *settings(status__port=0), *more]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120, env=environment(), cwd=ROOT)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# -- killed as a checkpoint appears; finished; given more steps with a damaged checkpoint -----------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return story_of_a_kill(tmp_path_factory.mktemp("killed"))


def story_of_a_kill(base: Path) -> Story:
    changes: dict[str, object] = {"weights__keep": 2, "eval__sets": "[]", "trainer__ranks": 2}
    with Session(base, steps=STEPS, changes=changes) as session:
        run = session.start()
        assert session.folder is not None
        story = Story(session.folder)
        run.until_trained(2)
        kill_as_a_checkpoint_appears(session)
        story.note("killed", session)
        session.start()
        story.note("resumed", session)
        flip(max((session.folder / "checkpoints").glob("step-*")) / "rank-0.safetensors")
        session.steps = MORE_STEPS
        session.start(*settings(run__steps=MORE_STEPS))
        story.note("extended", session)
    return story


def kill_as_a_checkpoint_appears(session: Session) -> None:
    assert session.folder is not None
    folder = session.folder / "checkpoints"
    before = set(folder.glob("step-*"))
    assert session.wait(lambda: bool(set(folder.glob("step-*")) - before), what="a checkpoint")
    session.hit("controller")


def test_a_controller_killed_as_a_checkpoint_appears_is_gone_on_with(killed: Story) -> None:
    killed.require("killed", code=-signal.SIGKILL)
    killed.require("resumed")
    assert killed.verdicts["resumed"].trained == 4 * STEPS


def test_a_finished_run_can_be_given_more_steps(killed: Story) -> None:
    killed.require("extended")
    assert killed.verdicts["extended"].trained == 4 * MORE_STEPS
    assert f"all {MORE_STEPS} steps are trained" in killed.told["extended"]


def test_a_damaged_newest_checkpoint_costs_steps_and_not_the_run(killed: Story) -> None:
    killed.require("extended")
    told = re.findall(r"(\S+) .*; the trainer continues from step 6", killed.told["extended"].replace("dora: ", ""))
    assert [Path(path).name for path in told] == ["rank-0.safetensors"]
    assert len(list((killed.folder / "checkpoints").glob(".damaged-*"))) == 1


def test_only_the_newest_durable_versions_are_kept_also_after_a_replay(killed: Story) -> None:
    killed.require("extended")
    assert killed.versions["resumed"] == [f"v{v:06d}" for v in (STEPS - 1, STEPS)]
    assert killed.versions["extended"] == [f"v{v:06d}" for v in (MORE_STEPS - 1, MORE_STEPS)]


# -- interrupted; its files exchanged or torn; killed in the last evaluation ------------------------------------------


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return story_of_an_interrupt(tmp_path_factory.mktemp("interrupted"))


def story_of_an_interrupt(base: Path) -> Story:
    data, held_out = base / "rows.jsonl", base / "held-out.jsonl"
    write_sums(data, second=1)
    write_sums(held_out, second=3)
    sets = f'[{{prompts=9, samples=3, temperature=1.0, source={{kind="jsonl", path="{held_out}"}}}}]'
    changes: dict[str, object] = {"task__sources": f'[{{kind="jsonl", path="{data}"}}]', "eval__sets": sets}
    with Session(base, steps=STEPS, grade_s=0.08, changes=changes) as session:
        run = session.start()
        assert session.folder is not None
        story = Story(session.folder)
        run.until_trained(2)
        run.interrupt()
        story.note("interrupted", session)
        damage_and_ask(story, base / "copies", data, held_out)
        for name in ("metrics.jsonl", "trajectories.jsonl"):
            (session.folder / name).write_bytes((session.folder / name).read_bytes() + b'{"kind": "st')
        edit_learning_rate(session.folder)
        story.asked["an edited configuration"] = resume(session.folder)
        story.asked["an edited learning rate"] = resume(session.folder, "--trust-folder")
        run = session.start("--accept-changes", "--trust-folder")
        kill_in_the_last_evaluation(session, run)
        story.note("killed", session)
        session.start()
        story.note("resumed", session)
        story.asked["a deep audit"] = run_to_end("audit", str(session.folder), "--deep")
    return story


def write_sums(path: Path, *, second: int) -> None:
    rows = [{"prompt": f"a{i}b{second}=", "answer": f"{i + second:02}"} for i in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def damage_and_ask(story: Story, copies: Path, data: Path, held_out: Path) -> None:
    """Try resumes of copies, which are rejected before anything is started."""
    copy = Path(shutil.copytree(story.folder, copies / "tokens" / story.folder.name))
    cut_a_frame_out(copy / "tokens.bin")
    story.asked["tokens that are missing"] = resume(copy)
    kept = data.read_text()
    data.write_text(kept.replace("b1=", "b2="))
    story.asked["other data"] = resume(story.folder)
    data.write_text(kept)
    kept = held_out.read_text()
    held_out.write_text(kept.replace('"answer": "0', '"answer": "1'))
    story.asked["other held-out answers"] = resume(story.folder)
    held_out.write_text(kept)


def cut_a_frame_out(path: Path) -> None:
    """Remove the last frame with a prompt of the task: its group is admitted and not trained yet."""
    data, chosen, offset = path.read_bytes(), None, 0
    while (payload := frame_at(data, offset)) is not None:
        end = offset + FRAME.size + len(payload)
        heads = [CHUNK.unpack_from(record) for record in split_payload(payload, path.name)]
        if any(kind == PROMPT and number >= 0 for kind, number, *_ in heads):
            chosen = (offset, end)
        offset = end
    assert chosen is not None
    path.write_bytes(data[: chosen[0]] + data[chosen[1] :])
    assert read_chunks(path)


def edit_learning_rate(folder: Path) -> None:
    config = folder / "config.toml"
    config.write_text(re.sub(r"(?m)^learning_rate = .*", "learning_rate = 0.0004", config.read_text()))


def kill_in_the_last_evaluation(session: Session, run: Run) -> None:
    def evaluates() -> bool:
        try:
            status = run.status()
        except OSError:
            return False
        return any(v["evaluating"] and v["version"] == STEPS for v in status["versions"])

    assert session.wait(evaluates, what="the last evaluation"), run.told()
    session.hit("everything")


def test_a_run_killed_in_its_last_evaluation_evaluates_and_ends(interrupted: Story) -> None:
    interrupted.require("killed", code=-signal.SIGKILL)
    interrupted.require("resumed")
    rows = [json.loads(line) for line in (interrupted.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows if row["kind"] == "evaluation"] == [0, STEPS]


def test_other_data_is_refused(interrupted: Story) -> None:
    says = r"task.sources: the prompt of group \d+ has changed"
    assert_one_clear_error(interrupted.asked["other data"], code=1, says=says)


def test_other_held_out_answers_are_refused(interrupted: Story) -> None:
    says = r"eval\.sets: the held-out prompts or answers have changed"
    assert_one_clear_error(interrupted.asked["other held-out answers"], code=1, says=says)


def test_a_token_store_with_a_frame_missing_is_refused(interrupted: Story) -> None:
    says = r"tokens\.bin: .*(records are missing|the journal counts|has no prompt)"
    assert_one_clear_error(interrupted.asked["tokens that are missing"], code=1, says=says)


def test_an_edited_learning_rate_needs_to_be_accepted_and_is_recorded(interrupted: Story) -> None:
    says = r"config\.toml: is not signed .* would execute task\.rewards\.1\.name = tests\.chaos\.pace:score"
    assert_one_clear_error(interrupted.asked["an edited configuration"], code=2, says=says)
    says = r"trainer\.learning_rate: 2e-05 -> 0\.0004: alters the experiment; --accept-changes"
    assert_one_clear_error(interrupted.asked["an edited learning rate"], code=2, says=says)
    assert "dora: changed: trainer.learning_rate: 2e-05 -> 0.0004" in interrupted.told["killed"]
    interrupted.require("resumed")


def test_torn_last_lines_break_neither_the_next_resume_nor_a_deep_audit(interrupted: Story) -> None:
    interrupted.require("resumed")
    deep = interrupted.asked["a deep audit"]
    assert deep.returncode == 0, deep
    assert "Traceback" not in deep.stderr + deep.stdout
