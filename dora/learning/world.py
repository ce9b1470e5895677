"""A simulated job in which a real policy answers and learns: time is virtual, learning is not.

The world is the simulator's own, with the same decision core. Only the answers change: a group is sampled when it is
admitted, under the weights of its tag, and its real lengths times `scale` decide how long the servers take. Real
rewards decide what is filtered. Each wave that the core forms is trained when it is ordered, and so makes the next
version. Nothing depends on a clock: a workload, a configuration and a seed always give the same weights.

Answers are sampled in blocks of BLOCK consecutive groups, as the batch of a sample moves log-probs by rounding. So a
block is sampled again, with the same seeds, for each further version under which a group of it is admitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import ClassVar, Final, NamedTuple

import msgspec
from torch import Tensor

from dora.controller.batches import build_wave, spread
from dora.controller.trajectories import TrajectoryRecord
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId, TrajectoryId, VersionId
from dora.learning.learner import Learner
from dora.learning.sampler import RealAnswer, Sampler
from dora.sim.answers import SimulatedGroup
from dora.sim.workload import Workload
from dora.sim.world import World
from dora.tasks.prompts import Prompt
from dora.tasks.sources import derive_seed

#: Groups that are sampled together.
BLOCK: Final = 8


class Job(NamedTuple):
    """What a policy samples for."""

    prompt_at: Callable[[int], Prompt]  #: the prompt of a group
    temperature: float
    seed: int
    group_size: int


class RealAnswers:
    """The groups of a job, sampled when they are admitted."""

    def __init__(self, job: Job, sampler: Sampler, *, scale: float, prompt_tokens: int) -> None:
        """`scale`: simulated tokens per real one. `prompt_tokens`: simulated tokens of every prompt."""
        self._job, self._sampler = job, sampler
        self._scale = scale
        self._nothing = SimulatedGroup(prompt_tokens, [], [])
        self._loaded: int | None = None  # version of the sampler's weights
        self._blocks: dict[tuple[int, int], list[list[RealAnswer]]] = {}  # by block and version
        self._groups: dict[int, SimulatedGroup] = {}
        self.records: dict[TrajectoryId, TrajectoryRecord] = {}  #: of admitted groups

    def group(self, number: int) -> SimulatedGroup:
        """Return the answers of a group; before its admission, its prompt alone."""
        return self._groups.get(number, self._nothing)

    def admit(self, number: int, version: int, weights: Mapping[str, Tensor]) -> None:
        """Sample a group under these weights."""
        block, place = divmod(number, BLOCK)
        if (block, version) not in self._blocks:
            if version != self._loaded:
                self._sampler.load(weights)
                self._loaded = version
            self._blocks[block, version] = self._sample(block)
        answers = self._blocks[block, version][place]
        self._groups[number] = SimulatedGroup(
            self._nothing.prompt_tokens,
            [self.simulated(len(answer.tokens)) for answer in answers],
            [answer.reward for answer in answers],
        )
        for sibling, answer in enumerate(answers):
            self.records[TrajectoryId(number * self._job.group_size + sibling)] = _record(answer)

    def reload(self) -> None:
        """Load weights before the next sample: the sampler has had others."""
        self._loaded = None

    def simulated(self, num_tokens: int) -> int:
        """Return the simulated length of an answer."""
        return max(1, round(num_tokens * self._scale))

    def forget_before(self, number: int) -> None:
        """Drop groups below `number`, which are not requested again."""
        size = self._job.group_size
        for group in [group for group in self._groups if group < number]:
            del self._groups[group]
            for sibling in range(group * size, (group + 1) * size):
                del self.records[TrajectoryId(sibling)]
        for block, version in [key for key in self._blocks if (key[0] + 1) * BLOCK <= number]:
            del self._blocks[block, version]

    def _sample(self, block: int) -> list[list[RealAnswer]]:
        job, numbers = self._job, range(block * BLOCK, (block + 1) * BLOCK)
        requests = [
            (job.prompt_at(number), derive_seed(job.seed, "sample", number, sibling))
            for number in numbers
            for sibling in range(job.group_size)
        ]
        answers = self._sampler.answer(requests, temperature=job.temperature)
        return [answers[start : start + job.group_size] for start in range(0, len(answers), job.group_size)]


def _record(answer: RealAnswer) -> TrajectoryRecord:
    record = TrajectoryRecord(answer.prompt)
    record.tokens.extend(answer.tokens)
    record.logprobs.extend(answer.logprobs)
    record.reward = answer.reward
    record.truncated = "length" if answer.truncated else ""
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
        on_version: Callable[[int, float, Mapping[str, Tensor]], None],
    ) -> None:
        """`on_version` receives each version, its time in virtual seconds, and its weights."""
        super().__init__(workload, seed=seed, answers=answers)
        self.real = answers
        self._learner = learner
        self._on_version = on_version
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """A digest of all waves so far, and of when each version was published."""
        return self._digest.hexdigest()

    def _on_admit_group(self, order: cmd.AdmitGroup) -> None:
        super()._on_admit_group(order)
        self.real.admit(order.group, order.version, self._learner.versions[order.version])

    def _on_train_micro_batch(self, order: cmd.TrainMicroBatch) -> None:
        super()._on_train_micro_batch(order)
        groups = {group.id: group for group in self.state.feed.groups(order.step)}
        parts = build_wave(order, records=self.real.records, groups=groups, group_size=self.settings.group_size)
        (wave,) = spread(parts, num_ranks=1)
        self._digest.update(msgspec.msgpack.encode([order.step, order.index, wave.trajectories.tolist()]))
        self._digest.update(wave.tokens.tobytes() + wave.behavior_logprobs.tobytes())
        self._learner.train(wave)

    def _publish(self, version: VersionId) -> ev.Event:
        event = super()._publish(version)
        self._digest.update(msgspec.msgpack.encode([version, self.now]))
        self._on_version(version, self.now, self._learner.versions[version])
        needed = [*self._tags.values(), *(i.version for i in self.instances if i.version is not None), version]
        self._learner.versions.forget_before(min(needed))
        return event

    handlers: ClassVar = {
        **World.handlers,
        cmd.AdmitGroup: _on_admit_group,
        cmd.TrainMicroBatch: _on_train_micro_batch,
    }
