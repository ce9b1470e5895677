"""What is sent extends what was sampled, bit for bit, and each sampled token is trained once, after the tokens that it
was sampled after."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from dora.controller.effects import Sampling
from dora.controller.evaluations import Evaluations
from dora.controller.trajectories import Trajectories
from dora.core.ids import TrajectoryId
from dora.environments.episode import Episode
from dora.environments.renderer import open_renderer
from dora.journal.tokens import TokenWriter, read_tokens
from dora.tasks.prompts import Prompt
from tests.environments.recorded_engine import TOOLS, RecordedEngine
from tests.environments.tokenizers_of_families import FAMILIES, family_tokenizer

EPISODES = 38  # of each family
TURNS = 5
TRAJECTORY = TrajectoryId(0)
SAMPLING = Sampling(
    seed=0, max_new_tokens=100_000, temperature=1.0, eos_ids=(), evaluations=Evaluations([]), has_turns=True
)


class Seen:
    """What an episode must keep, noted by itself: each turn's tokens, all before them, and a log-prob for each."""

    def __init__(self) -> None:
        self.turns: list[tuple[list[int], list[int], array[float]]] = []
        self.num_sampled = 0

    def sample(self, episode: Episode, ids: list[int], *, parts: int) -> None:
        logprobs = array("f", [-(self.num_sampled + 1 + index) / 8 for index in range(len(ids))])
        self.num_sampled += len(ids)
        self.turns.append((episode.context(), ids, logprobs))
        for start in range(0, len(ids), parts):
            episode.append(ids[start : start + parts], logprobs[start : start + parts])

    def check(self, episode: Episode) -> None:
        places: dict[float, tuple[int, int]] = {}
        rows = episode.rows()
        for number, row in enumerate(rows):
            assert len(row.ids) == len(row.mask) == len(row.logprobs)
            assert row.mask[-1] == 1
            for place, (mask, logprob) in enumerate(zip(row.mask, row.logprobs, strict=True)):
                assert (mask == 1) == (logprob != 0)
                if mask:
                    assert logprob not in places
                    places[logprob] = number, place
        assert len(places) == self.num_sampled == sum(episode.mask)
        for context, ids, logprobs in self.turns:
            number, start = places[logprobs[0]]
            assert rows[number].ids[: start + len(ids)].tolist() == context + ids
            assert [places[logprob] for logprob in logprobs] == [(number, start + i) for i in range(len(ids))]


class Recorded:
    """The same episode as the controller keeps it: in memory, where requests come from, and on the disk."""

    def __init__(self, path: Path, prompt: Sequence[int]) -> None:
        self.path, self.log = path, TokenWriter(path)
        self.kept = Trajectories(self.log, group_size=1)
        self.kept.open(TRAJECTORY, Prompt(0, "made up", "", tuple(prompt), "", {}))
        self.record = self.kept.begin(TRAJECTORY, 0)

    def sent(self) -> list[int]:
        """Return the tokens of the next request."""
        return [*SAMPLING.request(TRAJECTORY, self.record, id="", label="").tokens]

    def turn(self, episode: Episode) -> None:
        start = len(self.record.tokens)
        self.kept.append(TRAJECTORY, 0, episode.tokens[start:], episode.logprobs[start:])

    def observation(self, episode: Episode) -> None:
        forks = episode.forks[len(self.record.forks) :]
        self.kept.observe(TRAJECTORY, 0, episode.tokens[len(self.record.tokens) :], fork=forks[0] if forks else None)

    def check(self, episode: Episode) -> None:
        assert self.record.rows() == episode.rows()
        self.log.close()
        answer = read_tokens(self.path).answers[TRAJECTORY]
        assert (answer.forks, answer.observed) == (tuple(episode.forks), self.record.observed)
        assert (answer.tokens.tolist(), answer.loss_mask.tobytes()) == (episode.tokens.tolist(), bytes(episode.mask))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_sent_extends_what_was_sampled(family: str, tmp_path) -> None:
    tokenizer = family_tokenizer(tmp_path, family)
    renderer = open_renderer(tokenizer, settings={"name": family})
    num_calls = num_continued = num_forks = 0
    for seed in range(EPISODES):
        engine, rng, seen = RecordedEngine(renderer, tokenizer, seed=seed), random.Random(seed), Seen()
        start = [{"role": "system", "content": engine.text()}, {"role": "user", "content": engine.text()}]
        episode = Episode(renderer, start[rng.randrange(2) :], max_tokens=100_000, tools=TOOLS)
        recorded = Recorded(tmp_path / f"tokens-{seed}", episode.prompt)
        for _ in range(TURNS):
            assert recorded.sent() == episode.context()
            sampled = engine.turn(episode.context(), episode.messages)
            seen.sample(episode, sampled.ids, parts=rng.randint(1, 50))
            turn = episode.end_turn(sampled.finish)
            if sampled.calls is not None:
                assert [(call.name, call.arguments) for call in turn.calls] == sampled.calls
                num_calls += len(sampled.calls)
            recorded.turn(episode)
            before, forks = episode.context(), len(episode.forks)
            results = [{"role": "tool", "tool_call_id": call.id, "content": engine.text()} for call in turn.calls]
            question = {"role": "user", "content": engine.text()}
            if rng.random() < 0.1:  # the conversation is summarized
                episode.rewrite([question])
            else:
                assert episode.observe(results or [question]) == len(episode.tokens)
            recorded.observation(episode)
            num_forks += len(episode.forks) - forks
            if len(episode.forks) == forks:
                assert episode.context()[: len(before)] == before
                assert len(episode.context()) > len(before)
                num_continued += 1
        seen.check(episode)
        recorded.check(episode)
        assert not episode.truncated
    assert num_calls > EPISODES
    assert num_continued > EPISODES
    assert num_forks > EPISODES / 4
