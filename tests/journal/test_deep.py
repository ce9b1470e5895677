"""The deep check accepts the version that sampled an answer and rejects the next one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from dora.core.ids import GroupId, TrajectoryId, evaluation_id
from dora.errors import ConfigError
from dora.journal.deep import (
    EVALUATION,
    NO_GROUP,
    Attribution,
    KeptTrajectory,
    Stretch,
    altered_rows,
    deep_check,
    encode_kept,
    read_kept,
    render_deep,
)
from dora.journal.rows import Fork
from dora.journal.tokens import StoredAnswer, StoredPrompt, TokenStore

VOCABULARY = 11
Rounding = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]


def logprobs(version: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """A policy whose logits change with its version; each token depends on the previous one."""
    before = np.array([0, *tokens[:-1]])
    logits = np.sin(np.arange(VOCABULARY)[None, :] * (1.0 + 0.01 * version) + before[:, None])
    chosen = logits[np.arange(len(tokens)), list(tokens)]
    return (chosen - np.log(np.exp(logits).sum(1))).astype(np.float32)


def score(
    folder: Path, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
) -> list[npt.NDArray[np.float32]]:
    version = int(folder.name[1:])
    return [logprobs(version, s)[n:] for s, n in zip(sequences, prompt_lengths, strict=True)]


def kept(
    trajectory: int, *, version: int, sampled_by: int, noise: float = 1e-5, num_tokens: int = 20
) -> KeptTrajectory:
    random = np.random.default_rng(trajectory)
    prompt = tuple(int(t) for t in random.integers(0, VOCABULARY, 4))
    tokens = tuple(int(t) for t in random.integers(0, VOCABULARY, num_tokens))
    behavior = logprobs(sampled_by, (*prompt, *tokens))[4:] + random.normal(0, noise, num_tokens)
    return KeptTrajectory(
        step=version,
        group=GroupId(trajectory // 2),
        trajectory=TrajectoryId(trajectory),
        version=version,
        reward=1.0,
        truncated="",
        prompt="?",
        text="!",
        prompt_tokens=prompt,
        tokens=tokens,
        logprobs=tuple(float(x) for x in behavior),
    )


def folder_of(version: int) -> Path | None:
    return Path(f"v{version}") if version <= 3 else None


def test_trajectories_of_their_own_version_agree_with_it_and_not_with_the_next() -> None:
    report = deep_check([kept(t, version=t % 3, sampled_by=t % 3) for t in range(12)], score=score, versions=folder_of)
    assert report.ok
    assert [(c.version, c.num_trajectories, c.num_tokens) for c in report.checks] == [(v, 4, 80) for v in range(3)]
    assert [[n.version for n in c.neighbors] for c in report.checks] == [[1], [0, 2], [1, 3]]
    for check in report.checks:
        for neighbor in check.neighbors:
            assert check.difference < 1e-4 < neighbor.difference
            assert check.k3 < neighbor.k3


@pytest.mark.parametrize("sampled_by", [0, 2])
def test_trajectories_sampled_by_a_neighbor_are_flagged_and_only_they(sampled_by: int) -> None:
    wrong = [kept(t, version=1, sampled_by=sampled_by) for t in range(4)]
    right = [kept(t, version=0, sampled_by=0) for t in range(4, 8)]
    report = deep_check([*wrong, *right], score=score, versions=folder_of, dtypes=("bfloat16",))
    assert not report.ok
    assert [c.attribution for c in report.checks] == [Attribution.CONFIRMED, Attribution.REFUTED]
    assert re.findall(r"version (\d+): .*VIOLATION", render_deep(report)) == ["1"]


def continued(trajectory: int, *, at: range, by: int) -> KeptTrajectory:
    """An answer of version 1, some of whose tokens another one sampled."""
    own, other = (kept(trajectory, version=1, sampled_by=v, num_tokens=200) for v in (1, by))
    behavior = [(other if i in at else own).logprobs[i] for i in range(200)]
    return msgspec.structs.replace(own, logprobs=tuple(behavior))


@pytest.mark.parametrize("by", [0, 2])
@pytest.mark.parametrize(
    "at", [range(160, 200), range(30), range(70, 110)], ids=["its end", "its beginning", "between"]
)
def test_one_answer_among_many_that_a_neighbor_continued_is_named_with_its_tokens(at: range, by: int) -> None:
    others = [kept(t, version=1, sampled_by=1, num_tokens=200) for t in range(1, 20)]
    report = deep_check([continued(0, at=at, by=by), *others], score=score, versions=folder_of)
    [check] = report.checks
    assert check.attribution is Attribution.REFUTED
    assert check.difference < check.tolerance < min(n.difference for n in check.neighbors)  # medians do not show it
    [found] = [stretch for n in check.neighbors if n.version == by for stretch in n.foreign]
    assert found.trajectory == 0
    assert abs(found.start - at.start) <= 2
    assert abs(found.end - at.stop) <= 2
    assert f"trajectory 0: tokens {found.start} to {found.end - 1} are of version {by}" in render_deep(report)


def test_a_stretch_is_counted_in_all_tokens_of_the_answer_observations_included() -> None:
    answer = continued(0, at=range(100, 150), by=2)
    observed = msgspec.structs.replace(answer, observed=((10, 40), (110, 120)))
    [check] = deep_check([observed], score=score, versions=folder_of).checks
    assert check.num_tokens == 160
    assert [n.foreign for n in check.neighbors] == [(), (Stretch(TrajectoryId(0), 100, 150),)]


def test_a_version_whose_weights_did_not_change_proves_nothing_and_accuses_nobody() -> None:
    report = deep_check(
        [kept(t, version=1, sampled_by=1) for t in range(4)], score=score, versions=lambda _: Path("v1")
    )
    assert not report.ok
    assert report.violations == ()
    assert "NOT TOLD APART: rounding" in render_deep(report)
    assert "NOTHING WAS PROVED" in render_deep(report)


def test_versions_of_too_few_tokens_prove_nothing_and_the_others_do() -> None:
    few = kept(0, version=0, sampled_by=0, num_tokens=6)
    report = deep_check([few, kept(1, version=1, sampled_by=1)], score=score, versions=folder_of)
    assert [c.attribution for c in report.checks] == [Attribution.NOT_TOLD, Attribution.CONFIRMED]
    assert report.ok
    assert "NOT TOLD APART: too few tokens" in render_deep(report)


def heavy_tails(random: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
    return random.standard_t(2, size=size)


def unknown_scales(random: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
    return random.laplace(size=size) * np.exp(1.5 * random.normal(size=size))


def scales_of_passages(random: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
    return random.laplace(size=size) * np.exp(np.repeat(random.normal(size=size // 100), 100))


def neighbors(random: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
    """Neighbors err together."""
    steps = 0.45 * random.normal(size=size)
    return np.array([*itertools.accumulate(steps, lambda last, step: 0.9 * last + step)])


def like_each_other(random: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
    return random.laplace(size=size)


def rounded(
    seed: int, rounding: Rounding, *, num_tokens: int, change: float | None
) -> tuple[list[KeptTrajectory], Callable[..., list[npt.NDArray[np.float32]]]]:
    """Four answers of version 0, and a scorer; both round by more where tokens are less probable.

    `change`: what the next version changes, in units of the rounding; None: nothing, but it rounds anew.
    """
    random = np.random.default_rng(seed)
    size = 4 * num_tokens
    recorded = -np.exp(1.5 * random.normal(size=size) - 2)
    own = 1e-3 * rounding(random, size) * -recorded
    other = 1e-3 * rounding(random, size) if change is None else own + 1e-3 * change * neighbors(random, size)
    answers = [
        msgspec.structs.replace(
            kept(t, version=0, sampled_by=0, num_tokens=num_tokens),
            logprobs=tuple(recorded[t * num_tokens :][:num_tokens].tolist()),
        )
        for t in range(4)
    ]

    def scored(folder: Path, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]):
        found = recorded + (other * (1.0 if change is not None else -recorded) if folder.name == "v1" else own)
        return [np.float32(part) for part in np.split(found, 4)]

    return answers, scored


@pytest.mark.parametrize("rounding", [heavy_tails, unknown_scales, scales_of_passages, neighbors])
@pytest.mark.parametrize("change", [0.1, 1.0, 10.0])
def test_rounding_that_is_not_as_assumed_accuses_nobody(rounding: Rounding, change: float) -> None:
    answers, scored = rounded(7, rounding, num_tokens=5_000, change=change)
    report = deep_check(answers, score=scored, versions=folder_of, dtypes=("bfloat16",))
    assert report.violations == ()
    assert report.ok or change < 1.0


@pytest.mark.parametrize("num_tokens", [10, 100, 400])
def test_a_neighbor_that_only_rounds_anew_is_not_told_apart(num_tokens: int) -> None:
    """The evidence is a random walk then."""
    verdicts = set()
    for seed in range(100):
        answers, scored = rounded(seed, like_each_other, num_tokens=num_tokens, change=None)
        [check] = deep_check(answers, score=scored, versions=folder_of, dtypes=("bfloat16",)).checks
        verdicts.add(check.attribution)
    assert verdicts == {Attribution.NOT_TOLD}


def test_an_engine_that_rounds_much_is_not_accused_where_the_update_changed_more() -> None:
    trajectories = [kept(t, version=1, sampled_by=1, noise=8e-3, num_tokens=200) for t in range(4)]
    report = deep_check(trajectories, score=score, versions=folder_of, dtypes=("bfloat16",))
    assert report.violations == ()


@pytest.mark.parametrize("bad", ["v1", "v0"])
@pytest.mark.parametrize("where", [slice(None), slice(-1, None)], ids=["all", "the last"])
def test_log_probs_that_are_not_finite_accuse_only_the_version_that_has_them(bad: str, where: slice) -> None:
    def scored(folder: Path, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]):
        found = score(folder, sequences, prompt_lengths)
        if folder.name == bad:
            found[0][where] = np.nan
        return found

    answer = kept(0, version=0, sampled_by=0, num_tokens=30)
    [check] = deep_check([answer], score=scored, versions=folder_of).checks
    is_wrong = bad == "v0" and where == slice(None)
    assert check.attribution is (Attribution.REFUTED if is_wrong else Attribution.CONFIRMED)


def test_an_answer_without_a_sampled_token_is_left_out() -> None:
    observed = msgspec.structs.replace(kept(0, version=0, sampled_by=0), observed=((0, 20),))
    [check] = deep_check([observed, kept(1, version=0, sampled_by=0)], score=score, versions=folder_of).checks
    assert check.num_trajectories == 1


def test_versions_that_are_no_longer_stored_are_listed_as_not_checked() -> None:
    """Of 0 to 3, the last has a neighbor; 4 has one, but is not stored itself, and 6 has none."""
    trajectories = [kept(t, version=v, sampled_by=v) for t, v in enumerate((2, 2, 3, 3, 4, 6))]
    report = deep_check(trajectories, score=score, versions=lambda v: Path(f"v{v}") if v <= 3 or v == 6 else None)
    assert report.ok
    assert ([c.version for c in report.checks], report.skipped) == ([2, 3], (4, 6))
    assert "not checked" in render_deep(report)


@pytest.mark.parametrize(
    ("trajectories", "why"),
    [
        pytest.param([kept(0, version=5, sampled_by=5)], "keep more versions", id="no version is stored"),
        pytest.param([], "no trajectory with tokens was kept", id="nothing was kept"),
    ],
)
def test_a_check_that_compared_nothing_is_not_ok_and_says_why(trajectories: list[KeptTrajectory], why: str) -> None:
    report = deep_check(trajectories, score=score, versions=folder_of)
    assert not report.ok
    assert report.violations == ()
    assert f"NOTHING WAS COMPARED: {why}" in render_deep(report)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_adjacent_versions_are_distinguished_in_every_data_type(dtypes: tuple[str, ...]) -> None:
    trajectories = [kept(t, version=1, sampled_by=2) for t in range(4)]
    assert deep_check(trajectories, score=score, versions=folder_of, dtypes=dtypes).violations


def test_log_probs_may_differ_by_the_tolerance_of_the_coarser_data_type() -> None:
    trajectories = [kept(t, version=1, sampled_by=1, noise=1e-3) for t in range(4)]
    verdicts = {
        dtypes: deep_check(trajectories, score=score, versions=folder_of, dtypes=dtypes).ok
        for dtypes in [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
    }
    assert list(verdicts.values()) == [False, True, True]


def test_kept_trajectories_are_read_back_and_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    lines = [encode_kept(kept(t, version=0, sampled_by=0)) for t in range(3)]
    path.write_bytes(b"".join(lines)[:-1])
    assert list(read_kept(path)) == [kept(t, version=0, sampled_by=0) for t in range(2)]


def test_a_line_that_is_not_a_trajectory_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes(encode_kept(kept(0, version=0, sampled_by=0)) + b"{}\n")
    with pytest.raises(ConfigError, match=r"trajectories\.jsonl, line 2: "):
        list(read_kept(path))


def forked(trajectory: int, *, version: int, sampled_by: int) -> KeptTrajectory:
    """The second half of the answer was sampled after two tokens of the prompt and an observation."""
    whole = kept(trajectory, version=version, sampled_by=sampled_by)
    second = logprobs(sampled_by, (*whole.prompt_tokens[:2], *whole.tokens[10:]))[2:]
    behavior = [*whole.logprobs[:10], 0.0, 0.0, *(float(x) for x in second[2:])]
    fork = Fork(start=10, parent=0, keep=2)
    return msgspec.structs.replace(whole, logprobs=tuple(behavior), observed=((10, 12),), forks=(fork,))


def test_each_row_of_a_trajectory_that_forked_is_recomputed() -> None:
    trajectories = [forked(t, version=1, sampled_by=1) for t in range(4)]
    scored: list[tuple[list[int], int]] = []

    def noting(folder: Path, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]):
        scored[:] = [([*s], n) for s, n in zip(sequences, prompt_lengths, strict=True)]
        return score(folder, sequences, prompt_lengths)

    report = deep_check(trajectories, score=noting, versions=folder_of)
    assert report.ok
    assert [(c.num_trajectories, c.num_tokens) for c in report.checks] == [(4, 4 * 18)]
    assert scored == [
        row
        for t in trajectories
        for row in (([*t.prompt_tokens, *t.tokens[:10]], 4), ([*t.prompt_tokens[:2], *t.tokens[10:]], 2))
    ]


@pytest.mark.parametrize(
    "forks",
    [
        (Fork(start=10, parent=0, keep=15),),
        (Fork(start=10, parent=1, keep=2),),
        (Fork(start=21, parent=0, keep=2),),
        (Fork(start=10, parent=0, keep=2), Fork(start=9, parent=0, keep=2)),
    ],
    ids=["more than its parent", "no such row", "beyond the answer", "a token in two rows"],
)
def test_forks_that_are_none_are_an_error_with_file_and_line(tmp_path: Path, forks: tuple[Fork, ...]) -> None:
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes(encode_kept(msgspec.structs.replace(forked(0, version=0, sampled_by=0), forks=forks)))
    with pytest.raises(ConfigError, match=r"trajectories\.jsonl, line 1: trajectory 0: Fork"):
        list(read_kept(path))


# -- what was recorded ------------------------------------------------------------------------------------------------


def stored_as(rows: Sequence[KeptTrajectory]) -> TokenStore:
    """The token store of a run that kept these."""
    store = TokenStore()
    for row in rows:
        store.prompts[row.group] = StoredPrompt(np.asarray(row.prompt_tokens, np.int32), b"")
        tokens = np.asarray(row.tokens, np.int32)
        store.answers[row.trajectory] = StoredAnswer(tokens, np.float32(row.logprobs), np.ones(len(tokens), np.uint8))
    return store


ALTERED: dict[str, dict[str, object]] = {
    "another token": {"tokens": (3, *range(19))},
    "another log-prob": {"logprobs": (-9.0,) * 20},
    "another prompt": {"prompt_tokens": (1, 2, 3, 4)},
    "another version": {"version": 1},
    "another group": {"group": GroupId(1)},
    "a fork": {"forks": (Fork(start=10, parent=0, keep=2),)},
}


@pytest.mark.parametrize("change", ALTERED.values(), ids=ALTERED.keys())
def test_a_line_that_is_not_what_was_recorded_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    rows = [kept(t, version=0, sampled_by=0) for t in (0, 2, 4)]
    path = tmp_path / "trajectories.jsonl"

    def altered(*lines: KeptTrajectory) -> list[str]:
        path.write_bytes(b"".join(map(encode_kept, lines)))
        tags = dict.fromkeys((row.group for row in rows), 0)
        return list(altered_rows(path, stored_as(rows), tags=tags, group_size=2, evaluated=()))

    assert altered(*rows) == []
    [found] = altered(msgspec.structs.replace(rows[0], **change), *rows[1:])
    assert "line 1: trajectory 0 is not what" in found
    [found] = altered(*rows, rows[1])
    assert "line 4: trajectory 2 is there a second time" in found


@pytest.mark.parametrize(("outcome", "problems"), [("discarded: over-sampled", 0), ("trained", 1)])
def test_an_answer_of_a_dropped_group_may_have_got_more_tokens_after_it_was_kept(
    tmp_path: Path, outcome: str, problems: int
) -> None:
    """Its request was running as its group was dropped, and stopped later."""
    whole, path = kept(0, version=0, sampled_by=0), tmp_path / "trajectories.jsonl"
    early = {"outcome": outcome, "tokens": whole.tokens[:8], "logprobs": whole.logprobs[:8]}
    for change, more in ((early, 0), (early | {"tokens": (whole.tokens[0] + 1, *whole.tokens[1:8])}, 1 - problems)):
        path.write_bytes(encode_kept(msgspec.structs.replace(whole, **change)))
        found = [*altered_rows(path, stored_as([whole]), tags={whole.group: 0}, group_size=2, evaluated=())]
        assert len(found) == problems + more


OF_EVALUATION: dict[str, dict[str, object]] = {
    "another version": {"version": 2},
    "another log-prob": {"logprobs": (-9.0,) * 20},
    "another prompt": {"prompt_tokens": (1, 2)},
    "a group": {"group": GroupId(0)},
    "said to be trained": {"outcome": "trained"},
}


@pytest.mark.parametrize("change", OF_EVALUATION.values(), ids=OF_EVALUATION.keys())
def test_an_altered_line_of_an_evaluation_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    own = {"outcome": EVALUATION, "group": NO_GROUP, "trajectory": evaluation_id(1, 1, num_samples=3)}
    row = msgspec.structs.replace(kept(7, version=1, sampled_by=1), **own)
    path = tmp_path / "trajectories.jsonl"
    for line, problems in ((row, 0), (msgspec.structs.replace(row, **change), 1)):
        path.write_bytes(encode_kept(line))
        assert len([*altered_rows(path, stored_as([row]), tags={}, group_size=2, evaluated=(4, 4, 4))]) == problems


def test_a_trained_answer_that_is_said_to_be_of_an_evaluation_is_named(tmp_path: Path) -> None:
    row, path = kept(0, version=0, sampled_by=0), tmp_path / "trajectories.jsonl"
    path.write_bytes(encode_kept(msgspec.structs.replace(row, outcome=EVALUATION, version=3)))
    assert [*altered_rows(path, stored_as([row]), tags={row.group: 0}, group_size=2, evaluated=(4,))]


def test_what_is_altered_is_shown_and_not_ok() -> None:
    report = deep_check([kept(t, version=0, sampled_by=0) for t in range(4)], score=score, versions=folder_of)
    assert report.ok
    report = replace(report, altered=("v000001/model.safetensors does not match its checksum in the journal",))
    assert not report.ok
    assert "VIOLATION damage: v000001/model.safetensors does not match" in render_deep(report)
