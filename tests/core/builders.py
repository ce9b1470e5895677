"""A core with short names for the events that it receives: the tests of single rules read as event lists. Invariant:
the shell could report every event (a completion carries the attempt of the latest command that it answers, unless a
test gives another), and `invariants.check` runs after each. Every method returns the commands of its event.
"""

from __future__ import annotations

from typing import TypeVar

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.commands import Command
from dora.core.core import handle
from dora.core.ids import GroupId, InstanceId, TrajectoryId
from dora.core.invariants import check
from dora.core.state import State
from dora.core.versions import digest_of
from tests.core.world import settings

C = TypeVar("C", bound=Command)

#: Tokens of every prompt, unless a test says otherwise.
PROMPT = 3


# -- commands, as tests write them down -------------------------------------------------------------------------------


def admit(group: int, *, version: int, deadline: int) -> cmd.AdmitGroup:
    return cmd.AdmitGroup(GroupId(group), version, deadline)


def generate(trajectory: int, *, on: int, version: int, attempt: int = 1, tokens: int = 0) -> cmd.Generate:
    return cmd.Generate(TrajectoryId(trajectory), attempt, InstanceId(on), version, tokens)


def stop(trajectory: int, *, on: int, attempt: int = 1) -> cmd.StopRequest:
    return cmd.StopRequest(TrajectoryId(trajectory), attempt, InstanceId(on))


def call(trajectory: int, *, attempt: int = 2) -> cmd.CallEnvironment:
    return cmd.CallEnvironment(TrajectoryId(trajectory), attempt)


def grade(trajectory: int, *, attempt: int = 2) -> cmd.GradeTrajectory:
    return cmd.GradeTrajectory(TrajectoryId(trajectory), attempt)


def push(instance: int, *, version: int, attempt: int) -> cmd.PushWeights:
    return cmd.PushWeights(InstanceId(instance), attempt, version)


def unload(instance: int, *, version: int, attempt: int, load: int) -> cmd.UnloadVersion:
    return cmd.UnloadVersion(InstanceId(instance), attempt, version, load)


def commit(group: int, *, version: int, step: int) -> cmd.CommitGroup:
    return cmd.CommitGroup(GroupId(group), version, step)


def wave(
    step: int, index: int, *ranks: list[int], last: bool = False, update: int = 0, closes: bool = False
) -> cmd.TrainMicroBatch:
    ids = tuple(tuple(TrajectoryId(t) for t in rank) for rank in ranks)
    return cmd.TrainMicroBatch(step, index, last, ids, update, closes or last)


# -- the core and its facts -------------------------------------------------------------------------------------------


class Core:
    """One State, which receives events one at a time. Time stands still unless a test advances it. Prompts arrive as
    soon as they are ordered, so FetchPrompts is left out of the returned commands.
    """

    def __init__(
        self, strategy: str = "dora", *, max_staleness: int = 1, source: int | None = None, **changes: object
    ) -> None:
        self.state = State(settings(strategy, max_staleness=max_staleness, **changes))
        self.source = source  #: prompts there are; None: endless
        self.now = 0.0
        self.orders: list[Command] = []  #: all that were ever given
        self.journal: list[tuple[ev.Event, list[Command]]] = []
        self.attempts: dict[tuple[type[Command], int], int] = {}  #: latest, per order and trajectory or instance
        self.adapters: dict[tuple[int, int], int] = {}  #: latest attempt, per instance and version
        self.incarnations: dict[int, int] = {}
        self.waves: list[cmd.TrainMicroBatch] = []  #: sent and not yet trained

    def tell(self, event: ev.Event) -> list[Command]:
        """One fact, and what is ordered because of it."""
        orders = handle(self.state, event)
        self.journal.append((event, orders))
        check(self.state)
        fetches = [order for order in orders if isinstance(order, cmd.FetchPrompts)]
        orders = [order for order in orders if not isinstance(order, cmd.FetchPrompts)]
        self.orders += orders
        for order in orders:
            if isinstance(order, cmd.Generate | cmd.GradeTrajectory | cmd.CallEnvironment):
                self.attempts[type(order), order.trajectory] = order.attempt
            elif isinstance(order, cmd.PushWeights):
                self.attempts[cmd.PushWeights, order.instance] = order.attempt
                self.adapters[order.instance, order.version] = order.attempt
            elif isinstance(order, cmd.UnloadVersion):
                self.adapters[order.instance, order.version] = order.attempt
            elif isinstance(order, cmd.TrainMicroBatch):
                self.waves.append(order)
        return orders + [order for fetch in fetches for order in self._read(fetch)]

    def _read(self, fetch: cmd.FetchPrompts) -> list[Command]:
        """Prompts of the stream, as far as it goes."""
        end = fetch.first + fetch.count if self.source is None else min(fetch.first + fetch.count, self.source)
        prompts = (PROMPT,) * max(0, end - fetch.first)
        return self.tell(ev.PromptsArrived(self.now, fetch.first, prompts, end == self.source))

    def of(self, kind: type[C]) -> list[C]:
        """All orders of this kind so far."""
        return [order for order in self.orders if isinstance(order, kind)]

    # -- instances ----------------------------------------------------------------------------------------------------

    def up(
        self, instance: int, *, slots: int = 4, kv: int = 4096, holds: int | None = None, digest: str | None = None
    ) -> list[Command]:
        """It answers, and is taken over with version `holds`, which has this digest unless another is given."""
        self.incarnations[instance] = incarnation = self.incarnations.get(instance, 0) + 1
        right = digest_of({"weights": str(holds)}) if holds is not None else ""
        digest = right if digest is None else digest
        return self.tell(ev.InstanceUp(self.now, InstanceId(instance), incarnation, slots, kv, holds, digest))

    def lost(self, instance: int, tokens: dict[int, int] | None = None) -> list[Command]:
        counts = {TrajectoryId(t): n for t, n in (tokens or {}).items()}
        return self.tell(ev.InstanceLost(self.now, InstanceId(instance), self.incarnations[instance], counts, "gone"))

    def pushed(self, instance: int, version: int, *, attempt: int | None = None) -> list[Command]:
        attempt = self.attempts[cmd.PushWeights, instance] if attempt is None else attempt
        return self.tell(ev.WeightPushFinished(self.now, InstanceId(instance), attempt, version))

    def push_failed(self, instance: int, *, attempt: int | None = None) -> list[Command]:
        attempt = self.attempts[cmd.PushWeights, instance] if attempt is None else attempt
        return self.tell(ev.WeightPushFailed(self.now, InstanceId(instance), attempt, "refused"))

    def loaded(self, instance: int, version: int) -> list[Command]:
        """The push of an adapter, beside which others may be under way, succeeds."""
        return self.pushed(instance, version, attempt=self.adapters[instance, version])

    def load_failed(self, instance: int, version: int) -> list[Command]:
        return self.push_failed(instance, attempt=self.adapters[instance, version])

    def unloaded(self, instance: int, version: int) -> list[Command]:
        return self.tell(ev.VersionUnloaded(self.now, InstanceId(instance), self.adapters[instance, version]))

    def unload_failed(self, instance: int, version: int) -> list[Command]:
        attempt = self.adapters[instance, version]
        return self.tell(ev.VersionUnloadFailed(self.now, InstanceId(instance), attempt, "refused"))

    def drain(self, instance: int, *, leave: bool = False) -> list[Command]:
        return self.tell(ev.InstanceDrainRequested(self.now, InstanceId(instance), leave))

    def recall(self, instance: int) -> list[Command]:
        return self.tell(ev.InstanceRecalled(self.now, InstanceId(instance)))

    def removed(self, instance: int) -> list[Command]:
        return self.tell(ev.InstanceRemoved(self.now, InstanceId(instance)))

    def prefill(self, instance: int) -> list[Command]:
        return self.tell(ev.PrefillReported(self.now, InstanceId(instance)))

    def pressed(self, instance: int) -> list[Command]:
        return self.tell(ev.KvPressureReported(self.now, InstanceId(instance), True))

    def relieved(self, instance: int) -> list[Command]:
        return self.tell(ev.KvPressureReported(self.now, InstanceId(instance), False))

    # -- trajectories -------------------------------------------------------------------------------------------------

    def progress(self, instance: int, tokens: dict[int, int]) -> list[Command]:
        counts = {TrajectoryId(t): n for t, n in tokens.items()}
        return self.tell(ev.ProgressReported(self.now, InstanceId(instance), counts))

    def finished(self, t: int, *, tokens: int = 1, attempt: int | None = None) -> list[Command]:
        attempt = self.attempts[cmd.Generate, t] if attempt is None else attempt
        spans = ((self.version_of(t), 0, tokens),)
        return self.tell(ev.GenerationFinished(self.now, TrajectoryId(t), attempt, tokens, False, spans))

    def called(self, t: int, *, tokens: int = 1) -> list[Command]:
        """Its turn ends with a call."""
        attempt, start = self.attempts[cmd.Generate, t], self.tokens_of(t)
        spans = ((self.version_of(t), start, tokens),)
        return self.tell(ev.CallStarted(self.now, TrajectoryId(t), attempt, tokens, spans))

    def result(
        self, t: int, *, tokens: int = 2, attempt: int | None = None, ended: bool = False, failed: str = ""
    ) -> list[Command]:
        """Its call ends."""
        attempt = self.attempts[cmd.CallEnvironment, t] if attempt is None else attempt
        return self.tell(ev.CallFinished(self.now, TrajectoryId(t), attempt, tokens, ended, failed))

    def stopped(self, t: int, *, tokens: int, attempt: int | None = None) -> list[Command]:
        attempt = self.attempts[cmd.Generate, t] if attempt is None else attempt
        return self.tell(
            ev.GenerationStopped(self.now, TrajectoryId(t), attempt, tokens, ((self.version_of(t), 0, tokens),))
        )

    def failed(self, t: int, *, tokens: int = 0, final: bool = False) -> list[Command]:
        attempt = self.attempts[cmd.Generate, t]
        return self.tell(ev.GenerationFailed(self.now, TrajectoryId(t), attempt, tokens, False, "refused", final))

    def broken(self, t: int, *, tokens: int = 0) -> list[Command]:
        """The connection broke: the server may be gone."""
        attempt = self.attempts[cmd.Generate, t]
        return self.tell(ev.GenerationFailed(self.now, TrajectoryId(t), attempt, tokens, True, "connection reset"))

    def graded(self, t: int, reward: float | None, *, attempt: int | None = None) -> list[Command]:
        attempt = self.attempts[cmd.GradeTrajectory, t] if attempt is None else attempt
        return self.tell(ev.TrajectoryGraded(self.now, TrajectoryId(t), attempt, reward))

    def answer(self, group: int, *, rewards: tuple[float | None, ...] = (0.0, 1.0), tokens: int = 1) -> list[Command]:
        """All siblings finish, then all are graded: the commands of all these events."""
        ids = range(group * len(rewards), (group + 1) * len(rewards))
        orders = [order for t in ids for order in self.finished(t, tokens=tokens)]
        return orders + [order for t, reward in zip(ids, rewards, strict=True) for order in self.graded(t, reward)]

    def version_of(self, t: int) -> int:
        trajectory = self.state.trajectories.get(TrajectoryId(t))
        return trajectory.version if trajectory is not None else 0

    def tokens_of(self, t: int) -> int:
        trajectory = self.state.trajectories.get(TrajectoryId(t))
        return trajectory.num_tokens if trajectory is not None else 0

    # -- training and time --------------------------------------------------------------------------------------------

    def ready(self, step: int = 0) -> list[Command]:
        self.waves.clear()
        return self.tell(ev.TrainerReady(self.now, step))

    def publish(self, version: int) -> list[Command]:
        return self.tell(ev.VersionPublished(self.now, version, 1, {"weights": str(version)}))

    def train(self, step: int) -> list[Command]:
        """The trainer works off every wave of a closed step: the commands of all these events."""
        orders = []
        while self.waves:
            wave = self.waves.pop(0)
            orders += self.tell(ev.MicroBatchTrained(self.now, wave.step, wave.index))
        return orders + self.tell(ev.StepTrained(self.now, step))

    def tick(self, after: float = 0.0) -> list[Command]:
        self.now += after
        return self.tell(ev.Ticked(self.now))

    def restarted(
        self,
        tokens: dict[int, int] | None = None,
        *,
        replayable: tuple[int, ...] = (),
        max_episodes: int = 0,
        steps: int = 0,
        limits: ev.TimeLimits | None = None,
    ) -> list[Command]:
        self.waves.clear()
        counts = {TrajectoryId(t): n for t, n in (tokens or {}).items()}
        again = tuple(TrajectoryId(t) for t in replayable)
        return self.tell(
            ev.ControllerRestarted(
                self.now, 1, counts, steps=steps, max_episodes=max_episodes, replayable=again, limits=limits
            )
        )


def started(strategy: str = "dora", *, instances: int = 1, slots: int = 4, kv: int = 4096, **changes: object) -> Core:
    """A core with a ready trainer and version 0 pushed to `instances` servers: the first groups run."""
    core = Core(strategy, **changes)  # type: ignore[arg-type]
    core.ready()
    core.publish(0)
    for i in range(instances):
        core.up(i, slots=slots, kv=kv)
    for i in range(instances):
        core.pushed(i, 0)
    return core


def two_versions(**changes: object) -> Core:
    """Version 1 is published and would admit seven groups, while every slot holds version 0.

    N = 8, G = 2, K = 2 unless changed. Step 0 is trained; groups 8 and 9 (trajectories 16 to 19) are resident on
    instance 0, groups 10 and 11 (20 to 23) on instance 1, all due at step 2.
    """
    core = started(instances=2, slots=4, **({"max_staleness": 2, "groups_per_step": 8} | changes))  # type: ignore[arg-type]
    for group in range(8):
        core.answer(group)
    core.train(0)
    core.publish(1)
    return core


def packing(**changes: object) -> Core:
    """As above, and what is left of version 0 (16, 17 on instance 0; 22, 23 on instance 1) fits on one."""
    core = two_versions(**changes)
    for t in (18, 19, 20, 21):
        core.finished(t)
    return core


def shared(*, instances: int = 1, slots: int = 16, **changes: object) -> Core:
    """Version 1 is loaded on every server beside version 0, of which groups 4 to 7 (trajectories 8 to 15) still run; it
    has group 8 (16, 17), and the window W admits no more.

    N = 4, G = 2, K = 1.
    """
    core = published(instances=instances, slots=slots, **changes)
    for i in range(instances):
        core.loaded(i, 1)
    return core


def published(*, instances: int = 1, slots: int = 16, **changes: object) -> Core:
    """As above, before the loads of version 1 have ended."""
    core = started(instances=instances, slots=slots, adapters=True, **({"groups_per_step": 4} | changes))  # type: ignore[arg-type]
    for group in range(4):
        core.answer(group)
    core.train(0)
    assert core.publish(1) == [push(i, version=1, attempt=2) for i in range(instances)]
    return core


def unloading(**changes: object) -> Core:
    """As above, and version 0 is being unloaded, as its trajectories have ended."""
    core = shared(**changes)  # type: ignore[arg-type]
    for t in range(8, 16):
        core.finished(t)
    return core
