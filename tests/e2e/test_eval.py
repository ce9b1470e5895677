"""`dora eval`: the score of a model without training it, which equals the score that a run gives its own versions."""

from __future__ import annotations

import re
import shutil
import statistics
from pathlib import Path

import pytest

import dora
from dora.app.held_out import HeldOut, read_results
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import VersionId, evaluation_id
from dora.journal.codec import Epoch, Handled
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import read_tokens
from tests.e2e.runs import (
    Run,
    assert_audit_clean,
    assert_one_clear_error,
    orders_of,
    run_to_end,
    settings,
    small,
)

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

SUMS = 'source={kind="arithmetic",options={min_terms=2,max_terms=12}}'
SETS = f'[{{name="greedy",prompts=12,{SUMS}}},{{name="sampled",prompts=6,samples=4,temperature=1.0,{SUMS}}}]'
#: Number of answers of an evaluation of SETS.
ANSWERS = 12 + 6 * 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of two steps that evaluated each of its three versions; its learning rate makes them differ."""
    home = tmp_path_factory.mktemp("runs")
    result = run_to_end("run", *small(home, trainer__learning_rate=1e-3, eval__every=1, eval__sets=SETS))
    assert result.returncode == 0, result.stderr
    (folder,) = home.iterdir()
    return RunFolder(folder)


def evaluation(home: Path) -> RunFolder:
    (folder,) = home.glob("*-eval-*")
    return RunFolder(folder)


def tokens_of(folder: RunFolder, version: int) -> list[tuple[int, ...]]:
    """The answers of a version's evaluation, in order."""
    answers = read_tokens(folder.tokens).answers
    ids = [evaluation_id(VersionId(version), i, num_samples=ANSWERS) for i in range(ANSWERS)]
    return [tuple(answers[id].tokens) for id in ids]


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_gets_the_score_that_its_run_gave_it(trained: RunFolder, tmp_path: Path, version: int) -> None:
    """The same answers, token by token, sampled ones too: the seed of an answer depends on its prompt alone."""
    name = f"{trained.root}@1" if version == 1 else str(trained.root)  # the newest
    result = run_to_end("eval", "--model", name, *settings(run__folder=tmp_path))
    assert result.returncode == 0, result.stderr
    folder = evaluation(tmp_path)
    own, found = HeldOut(trained), read_results(folder)
    assert own.versions == [0, 1, 2]
    assert [one.digest for one in found.sets] == [facts.digest for facts in own.sets]
    assert [one.rewards for one in found.sets] == [own.rewards(VersionId(version), facts) for facts in own.sets]
    assert tokens_of(folder, 0) == tokens_of(trained, version)
    assert tokens_of(folder, 0) != tokens_of(trained, 0), "no training: the test would prove nothing"
    assert_audit_clean(folder)
    assert not orders_of(folder, cmd.FetchPrompts)
    assert [*folder.versions.iterdir()] == [], "the copy of the model is deleted"
    assert re.search(r"^  greedy +arithmetic +12 +\d\.\d{3}", result.stdout, re.MULTILINE), result.stdout
    assert "Finished" in run_to_end("status", str(folder.root)).stdout


def test_more_samples_begin_with_the_samples_of_fewer(trained: RunFolder, tmp_path: Path) -> None:
    result = run_to_end("eval", "--model", str(trained.root), "--samples", "6", "--prompts", "5",
                        *settings(run__folder=tmp_path))  # fmt: skip
    assert result.returncode == 0, result.stderr
    own, found = HeldOut(trained), read_results(evaluation(tmp_path))
    sampled = own.rewards(VersionId(2), own.sets[1])
    assert [one[:4] for one in found.sets[1].rewards] == sampled[:5]
    assert [one.temperature for one in found.sets] == [1.0, 1.0], "greedy answers would all be equal"
    assert {*found.sets[0].pass_at} == {1, 2, 4, 6}


def test_the_prompts_of_a_task_are_scored_by_source(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "a1b2=", "answer": "03"}\n{"prompt": "c9=", "answer": "09"}\n')
    sources = f'[{{kind="jsonl",path="{tmp_path / "sums.jsonl"}"}},{{kind="arithmetic",label="sums"}}]'
    result = run_to_end(
        "eval", "--prompts", "3", *small(tmp_path / "runs", task__sources=sources, task__rewards='[{kind="exact"}]')
    )
    assert result.returncode == 0, result.stderr
    found = read_results(evaluation(tmp_path / "runs"))
    assert [(one.name, one.prompts) for one in found.sets] == [("sums.jsonl", 2), ("sums", 3)]


def test_an_evaluation_that_was_killed_continues_without_asking_again(slow_model: Path, tmp_path: Path) -> None:
    sets = f'[{{name="slow",prompts=16,{SUMS}}}]'
    arguments = small(
        tmp_path, run__steps=0, model__path=slow_model, eval__sets=sets, engine__slots=4, rollout__max_new_tokens=64
    )
    with Run(*arguments, "--set", "run.name=x-eval") as run:
        folder = run.folder
        run.until_status(lambda s: 4 <= (s["evaluation"] or {"graded": 0})["graded"] < 14, what="some graded")
        run.process.kill()
        run.end()
    result = run_to_end("eval", "--resume", str(folder.root))
    assert result.returncode == 0, result.stderr
    graded: set[int] = set()
    asked_again: list[int] = []
    epoch = -1
    for record in Journal(folder.journal).records():
        if isinstance(record, Epoch):
            epoch, before = record.epoch, set(graded)
        if not isinstance(record, Handled):
            continue
        if isinstance(record.event, ev.TrajectoryGraded):
            graded.add(record.event.trajectory)
        asked_again += [o.trajectory for o in record.commands if isinstance(o, cmd.Generate) and o.trajectory in before]
    assert epoch == 1
    assert len(graded) == 16
    assert not asked_again
    assert_audit_clean(folder)
    again = run_to_end("eval", "--resume", str(folder.root))
    assert again.returncode == 0
    assert again.stdout.splitlines()[-4:] == result.stdout.splitlines()[-4:], "an evaluation that has ended is shown"
    assert dora.attach(folder.root).status()["phase"] == "finished"


def test_failures_are_counted_by_cause_and_are_not_zeros(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def odd(prompt):\n    if 'b' in prompt:\n        raise ValueError('no b')\n    return 1.0\n"
    )
    (tmp_path / "data.jsonl").write_text('{"prompt": "a1b2="}\n{"prompt": "a9="}\n')
    source = f'{{kind="jsonl",path="{tmp_path / "data.jsonl"}",answer=""}}'
    rewards = f'[{{kind="function",name="{tmp_path / "rewards.py"}:odd"}}]'
    result = run_to_end("eval", *small(tmp_path / "runs", task__sources=f"[{source}]", task__rewards=rewards))
    assert result.returncode == 0, result.stderr
    (found,) = read_results(evaluation(tmp_path / "runs")).sets
    assert (found.mean, found.graded, found.rewards) == (1.0, 1, [[None], [1.0]])
    ((cause, count),) = found.failed.items()
    assert count == 1
    assert re.match(r"grading: .*no b", cause)
    assert re.search(r"1 failed: grading: .*no b", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "{run}@9"), r"--model .*@9: .* has 0 to 2"),
        (("--model", "{run}@new"), r"'new' is not the number of a version"),
        (("--resume", "{run}"), r"is a run that trains; continue it with dora run --resume"),
        (("--resume", "{run}", "--samples", "2"), r"--resume: an evaluation keeps its own configuration"),
        (("--resume", "{run}", "--data", "rows.jsonl"), r"--resume: an evaluation keeps its own configuration"),
        (("--resume", "{run}", "--reward", "math"), r"--resume: an evaluation keeps its own configuration"),
        (("--model", "{tmp}/nothing"), r"model.path: .*/nothing has no config.json"),
        (("--url", "http://127.0.0.1:9"), r"engine.urls: http://127.0.0.1:9 does not answer"),
        (("--set", "task.sources=[]", "--set", "eval.sets=[]"), r"task.sources: at least one source is needed"),
    ],
)
def test_a_mistake_is_one_line(trained: RunFolder, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    given = [argument.format(run=trained.root, tmp=tmp_path) for argument in arguments]
    result = run_to_end("eval", *given, cwd=tmp_path)
    assert_one_clear_error(result, code=2, says=says)
    assert not (tmp_path / "runs").exists()


def test_a_version_with_damaged_weights_is_not_scored(trained: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / trained.root.name)
    shutil.copytree(trained.root, copy.root)
    weights = next((copy.versions / "v000002").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    result = run_to_end("eval", "--model", str(copy.root), cwd=tmp_path)
    assert_one_clear_error(result, code=2, says=r"does not match its checksum: version 2 is damaged")


def test_the_configuration_of_a_folder_from_someone_else_is_not_executed(trained: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / trained.root.name)
    shutil.copytree(trained.root, copy.root)
    copy.config.write_text(copy.config.read_text().replace("seed = 0", "seed = 1", 1))
    result = run_to_end("eval", "--model", str(copy.root), cwd=tmp_path)
    assert_one_clear_error(result, code=2, says=r"is not signed with a key of yours; --trust-folder allows an eval")
    with_own = run_to_end("eval", "--model", str(copy.root), *small(tmp_path, eval__sets=SETS), "--trust-folder")
    assert with_own.returncode == 0, with_own.stderr


# -- comparing --------------------------------------------------------------------------------------------------------


def test_runs_and_evaluations_are_compared_prompt_by_prompt(trained: RunFolder, tmp_path: Path) -> None:
    result = run_to_end("eval", "--model", f"{trained.root}@0", *settings(run__folder=tmp_path))
    assert result.returncode == 0, result.stderr
    own = HeldOut(trained)
    means = [statistics.mean(r for one in own.rewards(VersionId(v), own.sets[0]) for r in one) for v in (0, 2)]
    told = run_to_end("compare", str(trained.root), str(evaluation(tmp_path).root), cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert f"greedy: B (v0) - A (v2) = {means[0] - means[1]:+.3f}, 95 %" in told.stdout
    assert re.search(r"^  greedy: final +0\.\d+ \(v2\) +0\.\d+ \(v0\)$", told.stdout, re.MULTILINE), told.stdout
    assert re.search(r"^  model\.path +.*seed.* +.*versions/v000000", told.stdout, re.MULTILINE), told.stdout
    assert "run.name" in told.stdout
    page = (tmp_path / "comparison.html").read_text()
    assert "Held-out reward: greedy" in page
    assert "http://" not in page.split('id="recorded"')[0], "nothing is loaded from elsewhere"


def test_scores_on_other_prompts_are_not_paired(trained: RunFolder, tmp_path: Path) -> None:
    result = run_to_end("eval", "--model", str(trained.root), "--prompts", "4", *settings(run__folder=tmp_path))
    assert result.returncode == 0, result.stderr
    told = run_to_end("compare", str(trained.root), str(evaluation(tmp_path).root), cwd=tmp_path)
    assert "'greedy' has other prompts than in the first run" in told.stdout
    assert " - A " not in told.stdout


def test_mistakes_in_a_comparison_are_one_line(trained: RunFolder, tmp_path: Path) -> None:
    run = str(trained.root)
    for given, says in (
        ((run,), "give 2 to 26 run folders"),
        ((run, run), "a folder is given twice"),
        ((run, str(tmp_path)), "is not a run folder"),
    ):
        assert_one_clear_error(run_to_end("compare", *given, cwd=tmp_path), code=2, says=says)
    assert not [*tmp_path.iterdir()]
