"""The rules that a run folder must satisfy at the end, whatever crashed before, checked by an independent reader.

This module uses nothing of the application's journal, core or controller, so that a mistake there cannot hide itself:
it reads the formats with struct and msgspec, and recomputes answers from the policies of their tags, and chains and
policies from tokens and journal.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from tests.crash.policy import ARRAYS, BASE, EOS, POLICY, answered, token, trained


class Broken(AssertionError):
    """A rule does not hold."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise Broken(what)


# -- formats ----------------------------------------------------------------------------------------------------------


def frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(end of the frame, record) for every record in the whole frames at the beginning of a file."""
    at = 0
    while at + 12 <= len(data):
        length, length_crc, payload_crc = struct.unpack_from("<III", data, at)
        payload = data[at + 12 : at + 12 + length]
        if crc32(data[at : at + 4]) != length_crc or len(payload) < length or crc32(payload) != payload_crc:
            return
        at += 12 + length
        start = 0
        while start < length:
            (size,) = struct.unpack_from("<I", payload, start)
            yield at, payload[start + 4 : start + 4 + size]
            start += 4 + size


def records(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """(end of the frame, journal record) for every record."""
    for end, record in frames(data):
        yield end, msgspec.msgpack.decode(record)


@dataclass
class Answer:
    """Tokens, log-probs, loss mask, and (start, parent row, number of its tokens) of each row but the first."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    forks: list[tuple[int, int, int]] = field(default_factory=list)

    def turns(self) -> list[tuple[int, int, int]]:
        """(start, end, end of the observation that follows it) of each turn."""
        ends = [i for i in range(1, len(self.mask)) if not self.mask[i] and self.mask[i - 1]]
        starts = [0, *(i for i in range(1, len(self.mask)) if self.mask[i] and not self.mask[i - 1])]
        rests = [*starts[1:], len(self.mask)]
        return list(zip(starts, [*ends, len(self.mask)], rests, strict=False))


@dataclass
class Stored:
    """The token store, read as a sequence of writes to positions."""

    prompts: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)


def read_tokens(data: bytes) -> Stored:
    found = Stored()
    latest: dict[int, tuple[int, int]] = {}
    for _, record in frames(data):
        kind, number, epoch, attempt, start, count = struct.unpack_from("<BqIIII", record)
        at = struct.calcsize("<BqIIII")
        tokens = list(struct.unpack_from(f"<{count}i", record, at)) if kind < 4 else []
        if kind == 0:
            found.prompts[number] = tokens
            for sibling in range(number * start, (number + 1) * start):
                found.answers.pop(sibling, None)
            continue
        if kind == 4:  # experts
            continue
        require(kind in (1, 2, 3), f"token record of kind {kind}")
        if (epoch, attempt) < latest.get(number, (0, 0)):
            continue
        latest[number] = (epoch, attempt)
        logprobs = list(struct.unpack_from(f"<{count}f", record, at + 4 * count))
        mask = [1] * count if kind == 1 else [*record[at + 8 * count : at + 9 * count]]
        fork = [(start, *struct.unpack_from("<II", record, at + 9 * count))] if kind == 3 else []
        known = found.answers.setdefault(number, Answer())
        require(start <= len(known.tokens), f"trajectory {number} has a gap at {len(known.tokens)}")
        found.answers[number] = Answer(
            known.tokens[:start] + tokens,
            known.logprobs[:start] + logprobs,
            known.mask[:start] + mask,
            [earlier for earlier in known.forks if earlier[0] < start] + fork,
        )
    return found


# -- what was decided -------------------------------------------------------------------------------------------------


@dataclass
class Told:
    """The journal, as the checker reads it."""

    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    rollout_only: bool = False
    admitted: dict[int, int] = field(default_factory=dict)  # version by group
    committed: dict[int, int] = field(default_factory=dict)  # step by group
    dropped: dict[int, str] = field(default_factory=dict)  # reason by group
    rewards: dict[int, float | None] = field(default_factory=dict)  # by trajectory
    turn_rewards: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    observed: Counter[int] = field(default_factory=Counter)  # observations by trajectory
    truncated: dict[int, int] = field(default_factory=dict)  # by finished trajectory: the budget that ended it
    calling: dict[int, int] = field(default_factory=dict)  # attempt of the call under way
    lengths: dict[int, int] = field(default_factory=dict)  # of finished answers
    waves: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    chains: dict[int, str] = field(default_factory=dict)  # of trained steps
    versions: dict[int, dict[str, Any]] = field(default_factory=dict)
    saved: list[dict[str, Any]] = field(default_factory=list)
    evaluated: Counter[int] = field(default_factory=Counter)
    taken_over: int = 0  # servers, with a version
    finished: bool = False


def read_journal(data: bytes) -> Told:
    told = Told()
    for _, record in records(data):
        match record["type"]:
            case "Header":
                told.settings = record["settings"]
                told.steps = told.settings["steps"]
                told.rollout_only = record["rollout_only"]
            case "Handled":
                _take_event(told, record["event"])
                for command in record["commands"]:
                    _take_command(told, command)
    return told


def _take_event(told: Told, event: dict[str, Any]) -> None:
    match event["type"]:
        case "TrajectoryGraded":
            given = sum(told.turn_rewards[event["trajectory"]])
            told.rewards.setdefault(event["trajectory"], None if event["reward"] is None else given + event["reward"])
        case "GenerationFinished":
            told.lengths[event["trajectory"]] = event["num_tokens"]
            told.truncated[event["trajectory"]] = int(event["length_capped"])
        case "CallFinished" if told.calling.get(event["trajectory"]) == event["attempt"]:
            _take_call(told, event)
        case "StepTrained":
            known = told.chains.setdefault(event["step"], event["chain"])
            require(known == event["chain"], f"step {event['step']} has two chains")
        case "VersionPublished":
            known = told.versions.setdefault(event["version"], event)
            require(known["files"] == event["files"], f"version {event['version']} has two contents")
            require(known["chain"] == event["chain"], f"version {event['version']} has two histories")
            require(not event["differs"], f"version {event['version']} was made again with other bytes")
        case "InstanceUp" if event.get("version") is not None:
            files = told.versions.get(event["version"], {}).get("files")
            require(files is not None, f"a server is taken over with version {event['version']}, which is not known")
            told.taken_over += 1
            listed = "".join(f"{files[name]}  {name}\n" for name in sorted(files))
            require(
                event["digest"] == hashlib.sha256(listed.encode()).hexdigest()[:8],
                f"a server is taken over with other bytes of version {event['version']}",
            )
        case "CheckpointSaved":
            told.saved.append(event)
        case "ControllerRestarted":
            for trajectory in told.calling.keys() - {*event["replayable"]}:
                told.rewards.setdefault(trajectory, None)
            told.calling.clear()
            if event["steps"] > told.steps:
                told.steps = event["steps"]
                told.finished = False


def _take_call(told: Told, event: dict[str, Any]) -> None:
    trajectory = event["trajectory"]
    del told.calling[trajectory]
    told.turn_rewards[trajectory].append(event["reward"])
    told.observed[trajectory] += not event["failed"] and not event["ended"]
    if event["failed"]:
        told.rewards.setdefault(trajectory, None)
    elif event["ended"]:
        told.lengths[trajectory] = event["num_tokens"]
        told.truncated[trajectory] = ("", "tokens", "turns", "time").index(event["truncated"])
        if event["graded"]:
            told.rewards.setdefault(trajectory, sum(told.turn_rewards[trajectory]))


def _take_command(told: Told, order: dict[str, Any]) -> None:
    match order["type"]:
        case "AdmitGroup":
            require(order["group"] == len(told.admitted), f"group {order['group']} is admitted out of order")
            told.admitted[order["group"]] = order["version"]
        case "CommitGroup":
            require(order["group"] not in told.committed, f"group {order['group']} is committed twice")
            require(order["version"] == told.admitted[order["group"]], f"group {order['group']} has another version")
            told.committed[order["group"]] = order["step"]
        case "DropGroup":
            require(order["group"] not in told.dropped, f"group {order['group']} is dropped twice")
            require(order["reason"], f"group {order['group']} is dropped without a reason")
            told.dropped[order["group"]] = order["reason"]
        case "TrainMicroBatch":
            known = told.waves.setdefault((order["step"], order["index"]), order)
            require(known == order, f"wave {order['step']}/{order['index']} is not what it was")
        case "CallEnvironment":
            told.calling[order["trajectory"]] = order["attempt"]
        case "ReportEvaluation":
            told.evaluated[order["version"]] += 1
        case "FinishRun":
            told.finished = True
        case "FailRun":
            raise Broken(f"the run failed: {order['reason']}")


# -- the rules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Facts that the checker cannot read from the folder."""

    base_chain: str
    settings: bytes  # of the lineage


@dataclass(frozen=True)
class Lost:
    """What a run said to be lost."""

    steps: set[int] = field(default_factory=set)  # without a row
    scores: set[int] = field(default_factory=set)  # versions whose evaluation has none
    versions: set[int] = field(default_factory=set)  # not in the run folder


NOTHING = Lost()


def lost_in(said: str) -> Lost:
    """Read what a run told its user."""
    return Lost(
        {step - 1 for step in _numbers(re.findall(r"lost the rows of steps ([-\d, ]+)", said))},  # words count from 1
        _numbers(re.findall(r"of evaluations of versions ([-\d, ]+)", said)),
        _numbers(re.findall(r"lacks versions ([-\d, ]+),", said)),
    )


def _numbers(texts: list[str]) -> set[int]:
    spans = [part.strip().split("-") for text in texts for part in text.split(",") if part.strip()]
    return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}


class Checker:
    """One run folder."""

    def __init__(self, folder: Path, expected: Expected, *, damaged: str = "", lost: Lost | None = NOTHING) -> None:
        """`damaged`: name of a version or checkpoint that a test has damaged; it may stay so if nothing needs it.
        `lost`: what the user was told to be lost; None if the user was told nothing.
        """
        self.lost = lost
        self.folder = folder
        self.damaged = damaged
        self.expected = expected
        self.told = read_journal((folder / "journal.msgpack").read_bytes())
        self.stored = read_tokens((folder / "tokens.bin").read_bytes())
        self.size = self.told.settings["group_size"]
        self.policies = {0: BASE}

    def check(self) -> str:
        """Check every rule; return the policy of the last version."""
        self._ledger()
        self._lineage()
        self._answers()
        self._versions()
        self._checkpoints()
        self._metrics()
        if self.told.rollout_only:
            self._rollouts()
        return self.policies[max(self.policies)]

    def _ledger(self) -> None:
        told = self.told
        require(told.finished, "the run did not finish")
        rules = told.settings["rules"]
        for group, version in told.admitted.items():
            is_trained = group in told.committed and told.committed[group] in told.chains
            require(is_trained != (group in told.dropped), f"group {group} is neither trained nor dropped, or both")
            if group in told.committed:
                staleness = told.committed[group] - version
                require(0 <= staleness <= rules["max_staleness"], f"group {group} is {staleness} steps stale")
        by_step: dict[int, list[int]] = defaultdict(list)
        for (step, _), wave in sorted(told.waves.items()):
            by_step[step] += [t for rank in wave["ranks"] for t in rank]
        for step in range(told.steps):
            require(step in told.chains, f"step {step} was not trained")
            siblings = [
                group * self.size + sibling
                for group, at in told.committed.items()
                if at == step
                for sibling in range(self.size)
            ]
            due = sorted(t for t in siblings if told.rewards[t] is not None)
            require(sorted(by_step[step]) == due, f"step {step} trains {sorted(by_step[step])}, not {due}")
            indices = sorted(index for at, index in told.waves if at == step)
            require(indices == list(range(len(indices))), f"waves of step {step}: {indices}")
            last = [told.waves[step, index]["last"] for index in indices]
            require(last == [False] * (len(last) - 1) + [True], f"step {step} ends in {last}")

    def _lineage(self) -> None:
        chain, policy = self.expected.base_chain, BASE
        for step in range(self.told.steps):
            digest = hashlib.blake2b(chain.encode() + self.expected.settings, digest_size=16)
            waves = b""
            index = 0
            while (step, index) in self.told.waves:
                for rank in self.told.waves[step, index]["ranks"]:
                    waves += self._digest(digest, rank, wave=self.told.waves[step, index])
                index += 1
            chain = digest.hexdigest()
            require(chain == self.told.chains[step], f"step {step} has chain {self.told.chains[step]}, not {chain}")
            policy = trained(policy, waves)
            if not self.told.rollout_only:
                self.policies[step + 1] = policy

    def _digest(self, digest: Any, rank: list[int], *, wave: dict[str, Any]) -> bytes:
        """Add one rank's micro-batch to a chain; return the bytes that its training depends on."""
        answers = [self.stored.answers[t] for t in rank]
        prompts = [self.stored.prompts[t // self.size] for t in rank]
        rewards = [[self.told.rewards[t - t % self.size + i] for i in range(self.size)] for t in rank]
        numbers = [[math.nan if r is None else r for r in row] for row in rewards]
        values: dict[str, Any] = {
            "tokens": np.array([x for p, a in zip(prompts, answers, strict=True) for x in [*p, *a.tokens]], "<i4"),
            "loss_mask": np.array(
                [x for p, a in zip(prompts, answers, strict=True) for x in [0] * len(p) + a.mask], "u1"
            ),
            "behavior_logprobs": np.array(
                [x for p, a in zip(prompts, answers, strict=True) for x in [0.0] * len(p) + a.logprobs], "<f4"
            ),
            "lengths": np.array([len(p) + len(a.tokens) for p, a in zip(prompts, answers, strict=True)], "<i4"),
            "trajectories": np.array(rank, "<i8"),
            "groups": np.array([t // self.size for t in rank], "<i8"),
            "versions": np.array([self.told.admitted[t // self.size] for t in rank], "<i4"),
            "rewards": np.array([row[t % self.size] for t, row in zip(rank, numbers, strict=True)], "<f4"),
            "group_rewards": np.array(numbers, "<f4").reshape(len(rank), self.size),
            "truncated": np.array([self.told.truncated[t] for t in rank], "u1"),
            "sources": np.zeros(len(rank), "u1"),
            "rewards_to_go": self._to_go(rank),
            "experts": np.zeros((0, 0, 0), "u1"),
            "routed": np.zeros(0, "u1"),
        }
        for name in ("step", "index", "last"):
            digest.update(f"{name} {int(wave[name])} ".encode())
        for name, array in values.items():
            digest.update(f"{name} {array.shape} ".encode() + array.tobytes())
        for name in ("update", "closes"):
            digest.update(f"{name} {int(wave[name])} ".encode())
        return b"".join(values[name].tobytes() for name in ARRAYS)

    def _to_go(self, rank: list[int]) -> Any:
        """[n, siblings, turns] what each sibling gets from each turn on."""
        rows = [[self._sibling_to_go(t - t % self.size + i) for i in range(self.size)] for t in rank]
        most = max((len(one) for row in rows for one in row), default=0)
        if most < 2:
            return np.zeros((0, 0, 0), "<f4")
        return np.array([[one + one[-1:] * (most - len(one)) for one in row] for row in rows], "<f4")

    def _sibling_to_go(self, trajectory: int) -> list[float]:
        reward = self.told.rewards[trajectory]
        left = [math.nan if reward is None else reward]
        for given in self.told.turn_rewards[trajectory][: self.told.observed[trajectory]]:
            left.append(left[-1] - given)
        return left

    def _answers(self) -> None:
        """Every token was sampled by the version that its answer is tagged with, in one sequence."""
        lengths = self.told.settings["eval_prompt_tokens"]
        for trajectory, answer in self.stored.answers.items():
            if trajectory >= 0:
                group = trajectory // self.size
                if group not in self.told.admitted:
                    continue  # the journal has lost its events
                version, start = self.told.admitted[group], len(self.stored.prompts[group])
            else:
                version, index = divmod(-trajectory - 1, len(lengths))
                start = lengths[index]
                if version not in self.told.versions:
                    continue
            policy = self.policies[version]
            name = f"trajectory {trajectory} of version {version}"
            for number, (begin, end, rest) in enumerate(answer.turns()):
                turn, observed = answer.tokens[begin:end], answer.tokens[end:rest]
                right = [token(policy, trajectory, start + place) for place in range(begin, end)]
                require(turn == right, f"{name} has tokens of another attempt")
                require(EOS not in turn[:-1], f"{name} goes on behind its end")
                if observed:
                    given = answered(trajectory, number, turn)
                    require(("observation", observed) == given[:2], f"{name}: turn {number} has another observation")
        for trajectory, length in self.told.lengths.items():
            found = len(self.stored.answers.get(trajectory, Answer()).tokens)
            require(found == length, f"trajectory {trajectory} has {found} tokens, the journal says {length}")

    def _versions(self) -> None:
        told = self.told
        for version, event in told.versions.items():
            chain = told.chains[version - 1] if version else self.expected.base_chain
            require(event["chain"] == chain, f"version {version} has another chain than its step")
        if told.rollout_only:
            return
        require(sorted(told.versions) == list(range(told.steps + 1)), f"versions {sorted(told.versions)}")
        durable = self.folder / "versions"
        require((durable / f"v{told.steps:06d}").is_dir(), "the last version is not in the run folder")
        if self.lost is not None:
            promised = range(told.steps + 1)[-self._kept_versions() :]
            missing = {v for v in promised if not (durable / f"v{v:06d}").is_dir()} - self.lost.versions
            require(not missing, f"versions {missing} are not in the run folder, and nobody said so")
        for path in durable.glob("v*"):
            if path.name == self.damaged and path.name != f"v{told.steps:06d}":
                continue
            version = int(path.name[1:])
            found = (path / POLICY).read_text()
            require(found == self.policies[version], f"{path} holds another policy than its history gives")
            manifest = json.loads((path / "manifest.json").read_text())
            require(manifest["chain"] == told.versions[version]["chain"], f"{path} has another chain")
            require(manifest["files"] == told.versions[version]["files"], f"{path} has other files")

    def _kept_versions(self) -> int:
        """The number of versions to be kept in the run folder; 0: all."""
        kept: int = tomllib.loads((self.folder / "config.toml").read_text())["weights"]["keep"]
        return kept

    def _checkpoints(self) -> None:
        for event in self.told.saved:
            chain = self.told.chains[event["step"] - 1] if event["step"] else self.expected.base_chain
            require(event["chain"] == chain, f"checkpoint {event['step']} has another chain than its step")
        for path in (self.folder / "checkpoints").glob("step-*"):
            if path.name == self.damaged:
                continue
            step = int(path.name.split("-")[1])
            found = (path / "rank-0.safetensors").read_text()
            require(found == self.policies[step], f"{path} holds another policy than its history gives")

    def _metrics(self) -> None:
        seen: Counter[tuple[Any, ...]] = Counter()
        path = self.folder / "metrics.jsonl"
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
                key = (
                    ("step", row["step"]) if row["kind"] == "step" else ("evaluation", row["version"], row.get("name"))
                )
            except (ValueError, LookupError, TypeError):
                require(self.lost is None, f"a damaged row has stayed: {line[:40]!r}")
                continue
            seen[key] += 1
        if self.lost is not None:
            steps, scored = ({key[1] for key in seen if key[0] == kind} for kind in ("step", "evaluation"))
            missing = {*self.told.chains} - steps - self.lost.steps
            require(not missing, f"steps {missing} have no row, and nobody said so")
            missing = {*self.told.evaluated} - scored - self.lost.scores
            require(not missing, f"evaluations {missing} have no row, and nobody said so")
        twice = [key for key, count in seen.items() if count > 1]
        require(not twice, f"metrics tell twice of {twice}")
        again = [version for version, count in self.told.evaluated.items() if count > 1]
        require(not again, f"evaluated twice: {again}")
        if self.told.settings["eval_prompt_tokens"]:
            require(self.told.steps in self.told.evaluated, "the last version was not evaluated")

    def _rollouts(self) -> None:
        found = Counter[int]()
        for path in (self.folder / "rollouts").glob("step-*.rollout"):
            for _, record in frames(path.read_bytes()):
                found.update(_trajectories(record))
        due = Counter(t for wave in self.told.waves.values() for rank in wave["ranks"] for t in rank)
        require(found == due, f"the rollouts hold {sorted(found)}, trained were {sorted(due)}")


def _trajectories(record: bytes) -> list[int]:
    """The ids in an encoded micro-batch: a msgpack head, then the arrays, each preceded by its length."""
    from dora.transport.codec import decode
    from dora.transport.messages import MicroBatch

    (count,) = struct.unpack_from("<I", record)
    sizes = struct.unpack_from(f"<{count}I", record, 4)
    parts, start = [], 4 * (count + 1)
    for size in sizes:
        parts.append(record[start : start + size])
        start += size
    batch: Any = decode(parts, MicroBatch)
    return [int(t) for t in batch.trajectories]


def check_order(journal: bytes, seen: list[tuple[str, int]]) -> None:
    """Everything that left the controller was in the journal on the disk before: (what, bytes on the disk then)."""
    known: dict[str, int] = {}
    calls: Counter[int] = Counter()  # that have ended, by trajectory
    for end, record in records(journal):
        if record["type"] != "Handled":
            continue
        event = record["event"]
        if event["type"] == "VersionPublished":
            known.setdefault(f"push {event['version']}", end)
        calls[event.get("trajectory", 0)] += event["type"] == "CallFinished"
        for order in record["commands"]:
            if order["type"] == "TrainMicroBatch":
                known.setdefault(f"wave {order['step']}/{order['index']}", end)
            if order["type"] == "CallEnvironment":
                known.setdefault(f"call {order['trajectory']}/{calls[order['trajectory']]}", end)
    for what, synced in seen:
        if what.startswith("push "):
            what = f"push {what.rpartition('/')[2].partition('-')[0]}"
        require(known.get(what, synced + 1) <= synced, f"{what} left before the disk had it in the journal")
