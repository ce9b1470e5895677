"""A simulated job in which a real policy answers and learns: time is virtual, learning is not.

The world is the simulator's own, with the same decision core. Only the answers change: a group is sampled when it is
admitted, under the weights of its tag, and its real lengths times `scale` decide how long the servers take. Real
rewards decide what is filtered. Each wave that the core forms is trained when it is ordered, and so makes the next
version. Nothing depends on a clock: a workload, a configuration and a seed always give the same weights.

Where weights change under requests, the rest of an answer is sampled again when its server has the new ones, and its
length changes. Answers are sampled in blocks of BLOCK consecutive groups, as the batch of a sample moves log-probs by
rounding. So a block is sampled again, with the same seeds, for each further version under which a group of it is
admitted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from dora.controller.batches import build_wave, spread
from dora.controller.trajectories import TrajectoryRecord
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId, VersionId
from dora.errors import ConfigError
from dora.learning.learner import Learner, VersionsInMemory
from dora.learning.progress import Progress
from dora.learning.sampler import AnswerRequest, RealAnswer, Sampler
from dora.sim.answers import SimulatedGroup
from dora.sim.instance import SimulatedInstance
from dora.sim.workload import Workload
from dora.sim.world import Sink, World
from dora.tasks.prompts import Prompt
from dora.tasks.sources import derive_seed

#: Tokens, log-probs, reward and whether the budget ended it, of an answer that was sampled.
_Made = tuple[list[int], list[float], float, bool]

#: Groups that are sampled together.
BLOCK: Final = 8


class AnswerJob(NamedTuple):
    """What a policy samples for."""

    prompt_at: Callable[[int], Prompt]  #: the prompt of a group
    temperature: float
    seed: int
    group_size: int
    every: int = 1  #: one group in `every` is sampled and trained; the others borrow lengths and rewards from these
    behind: int = 0  #: weights are `behind` versions older than the tag of what they sample, which breaks C3


class RealAnswers:
    """The groups of a job, sampled when they are admitted."""

    def __init__(
        self, job: AnswerJob, sampler: Sampler, versions: VersionsInMemory, saved: Progress, *, workload: Workload
    ) -> None:
        """`workload`: `lengths.scale` is the number of simulated tokens per real one."""
        self._job, self._sampler, self._versions, self._saved = job, sampler, versions, saved
        self._scale = workload.lengths.scale
        self._unsampled = SimulatedGroup(workload.lengths.prompt_tokens, [], [])
        self._loaded: int | None = None  # version of the sampler's weights
        self._blocks: dict[tuple[int, int], list[list[RealAnswer]]] = {}  # by block and version
        self._groups: dict[int, SimulatedGroup] = {}
        self._version: dict[TrajectoryId, int] = {}  # under which the end of an answer was sampled
        self.records: dict[TrajectoryId, TrajectoryRecord] = {}  #: of admitted groups

    def group(self, number: int) -> SimulatedGroup:
        """Return the answers of a group; before its admission, its prompt alone."""
        return self._groups.get(number, self._unsampled)

    def admit(self, number: int, version: int) -> None:
        """Sample a group, or borrow the lengths and rewards of one that was sampled under the same version."""
        block, place = divmod(number // self._job.every, BLOCK)
        if (block, version) not in self._blocks:
            self._blocks[block, version] = self._answer_block(block, version)
        answers = self._blocks[block, version]
        if not self.is_trained(number):
            lender = answers[derive_seed(self._job.seed, "lender", number) % BLOCK]
            lengths, rewards = map(self._simulated, lender), (answer.reward for answer in lender)
            self._groups[number] = SimulatedGroup(self._unsampled.prompt_tokens, [*lengths], [*rewards])
            return
        size = self._job.group_size
        self._groups[number] = SimulatedGroup(self._unsampled.prompt_tokens, [0] * size, [0.0] * size)
        for sibling, answer in enumerate(answers[place]):
            self._take(TrajectoryId(number * size + sibling), answer, version)

    def is_trained(self, number: int) -> bool:
        """Return whether a group is sampled and trained."""
        return number == self._trained_of(number // self._job.every)

    def _trained_of(self, window: int) -> int:
        """Return the group of a window of `every` groups that is trained."""
        every = self._job.every
        return window * every + derive_seed(self._job.seed, "trained", window) % every

    def change_version(self, states: Sequence[tuple[TrajectoryId, int]], version: int) -> None:
        """Sample again what these answers have after their first simulated tokens, unless that has this version."""
        chosen, requests = [], []
        for id, num_tokens in states:
            if id not in self.records:
                continue  # what is borrowed stays as it is
            record = self.records[id]
            known = min(int(num_tokens / self._scale), len(record.tokens))
            if self._version[id] == version or known == len(record.tokens):
                continue
            seed = derive_seed(self._job.seed, "continue", id, version)
            tokens, logprobs = record.tokens[:known], record.logprobs[:known]
            chosen.append(id)
            requests.append(AnswerRequest(record.prompt, seed, tokens, logprobs))
        for id, answer in zip(chosen, self.answer(requests, self._sampled_under(version)), strict=True):
            self._take(id, answer, version)

    def answer(self, requests: Sequence[AnswerRequest], version: int, *, temperature: float = -1.0) -> list[RealAnswer]:
        """Return answers under a version; at the temperature of the job, unless one is given."""
        if not requests:
            return []
        heat = self._job.temperature if temperature < 0 else temperature
        asked = hashlib.blake2b(b"".join(request.prompt.digest for request in requests), digest_size=8).digest()
        answered, made = self._saved.recall(
            lambda: (asked, [*self._make(requests, version, heat)]), tuple[bytes, list[_Made]]
        )
        if answered != asked:
            raise ConfigError(f"{self._saved.folder}: has answers to other prompts, which have changed; delete it")
        return [RealAnswer(request.prompt, *one) for request, one in zip(requests, made, strict=True)]

    def _make(self, requests: Sequence[AnswerRequest], version: int, temperature: float) -> Iterator[_Made]:
        if version != self._loaded:
            self._sampler.load(self._versions[version])
            self._loaded = version
        for answer in self._sampler.answer(requests, temperature=temperature):
            yield answer.tokens, answer.logprobs, answer.reward, answer.truncated

    def forget_before(self, number: int) -> None:
        """Drop groups below `number`, which are not requested again."""
        size = self._job.group_size
        for group in [group for group in self._groups if group < number]:
            del self._groups[group]
            for sibling in range(group * size, (group + 1) * size):
                self.records.pop(TrajectoryId(sibling), None)
                self._version.pop(TrajectoryId(sibling), None)
        for block, version in [key for key in self._blocks if (key[0] + 1) * BLOCK * self._job.every <= number]:
            del self._blocks[block, version]

    def forget_versions(self, oldest: int) -> None:
        """Drop all weights that no answer of the version `oldest` or a newer one needs."""
        self._versions.forget_before(self._sampled_under(oldest))

    def _answer_block(self, block: int, version: int) -> list[list[RealAnswer]]:
        job = self._job
        requests = [
            AnswerRequest(job.prompt_at(number), derive_seed(job.seed, "sample", number, sibling))
            for number in map(self._trained_of, range(block * BLOCK, (block + 1) * BLOCK))
            for sibling in range(job.group_size)
        ]
        answers = self.answer(requests, self._sampled_under(version))
        return [answers[start : start + job.group_size] for start in range(0, len(answers), job.group_size)]

    def _sampled_under(self, version: int) -> int:
        """Return the version whose weights stand for those of a tag."""
        return max(0, version - self._job.behind)

    def _take(self, id: TrajectoryId, answer: RealAnswer, version: int) -> None:
        number, place = divmod(id, self._job.group_size)
        group = self._groups[number]
        group.lengths[place] = self._simulated(answer)
        group.rewards[place] = answer.reward
        self.records[id] = _record(answer)
        self._version[id] = version

    def _simulated(self, answer: RealAnswer) -> int:
        """Return the number of simulated tokens of an answer."""
        return max(1, round(len(answer.tokens) * self._scale))


def _record(answer: RealAnswer) -> TrajectoryRecord:
    record = TrajectoryRecord(answer.prompt)
    record.tokens.extend(answer.tokens)
    record.logprobs.extend(answer.logprobs)
    record.reward = None if math.isnan(answer.reward) else answer.reward
    record.truncated = "tokens" if answer.truncated else ""
    return record


class LearningWorld(World):
    """One simulated job whose policy learns."""

    def __init__(
        self,
        workload: Workload,
        answers: RealAnswers,
        learner: Learner,
        *,
        seed: int,
        on_version: Callable[[int, float], None],
        sink: Sink | None = None,
    ) -> None:
        """`on_version` receives each version and its time in virtual seconds."""
        super().__init__(workload, seed=seed, sink=sink, answers=answers)
        self._real = answers
        self._learner = learner
        self._on_version = on_version
        self.answer_tokens: dict[int, list[int]] = {}  #: by step: lengths of the trained answers, in real tokens
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """A digest of all waves so far, and of when each version was published."""
        return self._digest.hexdigest()

    def _on_admit_group(self, order: cmd.AdmitGroup) -> None:
        super()._on_admit_group(order)
        self._real.admit(order.group, order.version)

    def _on_generate(self, order: cmd.Generate) -> None:
        """Send a request; where weights change under requests, its answer may continue under a newer version."""
        self._real.change_version([(order.trajectory, order.num_tokens)], order.version)
        old = self._interrupted.get(order.trajectory)
        if old is not None:
            old.total = max(old.offset, self._length(order.trajectory))
        super()._on_generate(order)

    def _update(self, instance: SimulatedInstance, version: VersionId) -> None:
        super()._update(instance, version)
        states = [(id, instance.tokens(request)) for id, request in instance.requests.items()]
        self._real.change_version(states, version)
        for id, num_tokens in states:
            instance.change_total(instance.requests[id], max(num_tokens, self._length(id)))

    def _length(self, id: TrajectoryId) -> int:
        number, place = divmod(id, self.settings.group_size)
        return self.answers.group(number).lengths[place]

    def _on_train_micro_batch(self, order: cmd.TrainMicroBatch) -> None:
        super()._on_train_micro_batch(order)
        groups = {group.id: group for group in self.state.feed.groups(order.step)}
        records = self._real.records
        ranks = tuple(tuple(id for id in ids if id in records) for ids in order.ranks)
        parts = build_wave(
            replace(order, ranks=ranks), records=records, groups=groups, group_size=self.settings.group_size
        )
        (wave,) = spread(parts, num_ranks=1)
        lengths = self.answer_tokens.setdefault(order.step, [])
        lengths += [len(records[TrajectoryId(id)].tokens) for id in wave.trajectories.tolist()]
        self._digest.update(msgspec.msgpack.encode([order.step, order.index, wave.trajectories.tolist()]))
        self._digest.update(wave.tokens.tobytes() + wave.behavior_logprobs.tobytes())
        self._learner.train(wave)

    def _publish(self, version: VersionId) -> ev.Event:
        event = super()._publish(version)
        self._digest.update(msgspec.msgpack.encode([version, self.now]))
        self._on_version(version, self.now)
        held = (instance.version for instance in self.instances if instance.version is not None)
        pushed = (order.version for order, _ in self._pushes.values())
        self._real.forget_versions(min([*self._tags.values(), *held, *pushed, version]))
        return event

    handlers: ClassVar = {
        **World.handlers,
        cmd.AdmitGroup: _on_admit_group,
        cmd.Generate: _on_generate,
        cmd.TrainMicroBatch: _on_train_micro_batch,
    }
