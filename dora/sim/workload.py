"""A simulated workload: job, answers, fleet, trainer and faults, each a frozen struct; files are TOML.

Invariant: all seconds are virtual, and nothing depends on the machine that simulates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from dora.config.load import read_toml, set_key
from dora.core.decode_time import DecodeTime
from dora.core.orchestration import RULES, SWITCHES, Calls, Orchestration, orchestration_of
from dora.core.strategies import STRATEGIES, Pause, Rules, Settings, rules_of
from dora.errors import ConfigError
from dora.sim.answers import REGIMES, Answers, SimulatedGroup, cap_of
from dora.sim.server import SimulatedServer
from dora.sim.tools import Call, Tools

#: Devices of a server that are tried, unless the workload has others.
WIDTHS: Final = (1, 2, 4, 8)
_NEVER: Final = 1e12
#: What becomes of the adapter that is trained. `none`: all weights are trained; `merged`: servers get the sum of
#: weights and adapter; `served`: every server holds the adapters of all live versions side by side.
AdapterUse = Literal["none", "merged", "served"]
_AT_LEAST: Final = {
    "job.steps": 2,
    "job.group_size": 2,
    "job.groups_per_step": 1,
    "fleet.devices_per_instance": 1,
    "train.updates": 1,
}
#: Numbers that must be finite: simulations would not end, or count with them.
_FINITE: Final = ("fleet.server.decode.", "fleet.server.prefill_s", "fleet.weight_bytes")
_DIVISORS: Final = (
    *(
        "fleet.server.slots",
        "fleet.slow_speed",
        "fleet.push_bytes_s",
        "fleet.store_bytes_s",
        "fleet.report_s",
        "train.tokens_s_per_device",
    ),
    *("train.devices_per_rank", "train.micro_batch_tokens", "train.publish_bytes_s", "adapters.throughput"),
)


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of all parts; unknown keys are errors."""


class JobModel(_Part, frozen=True):
    """The job and its rules."""

    strategy: str = "dora"
    max_staleness: int = 3
    pause: Pause = "retract"  #: how servers pause for a push under `partial`
    oversample: float = 1.5  #: groups under way in a step of `oversample` and `partial_sync`, as a multiple of N
    steps: int = 40
    groups_per_step: int = 64
    group_size: int = 8
    filter_zero_variance: bool = False
    max_top_up: float = 10.0  #: filtered and failed groups allowed per step, in units of groups_per_step
    eval_samples: int = 0  #: number of held-out answers in each evaluation
    eval_every: int = 0  #: steps between evaluations; 0: only the first and the last version
    rules: str = "dora"  #: or those of another system: paper, psrl, areal
    without: tuple[str, ...] = ()  #: placement rules to turn off
    refill: bool = False
    calls: Calls = "release"  #: what an answer holds while it calls a tool
    max_episodes: int = 0  #: unfinished answers for which environments have room; 0: any number


class LengthModel(_Part, frozen=True):
    """Prompts and answers (docs/SIMULATION.md). With tools, `regime` and `scale` give the length of every turn."""

    regime: str = "A"  #: A, B, C, D, S or recorded
    cap: int = 0  #: token budget of an answer, tool results included; 0: the regime's own
    scale: float = 1.0  #: factor on all lengths, before the cap
    prompt_tokens: int = 200
    prompts: tuple[int, ...] = ()  #: recorded: tokens of each prompt
    answers: tuple[tuple[int, ...], ...] = ()  #: recorded: lengths of each prompt's answers
    rewards: tuple[tuple[float, ...], ...] = ()  #: recorded: rewards of each prompt's answers; nan: none could be given
    calls: tuple[tuple[tuple[Call, ...], ...], ...] = ()
    """recorded: calls of each prompt's answers; empty: none. A call before the first token begins an episode: it gives
    the end of the prompt."""


class FleetModel(_Part, frozen=True):
    """The accelerators and how they are split."""

    devices: int = 16
    rollout_devices: int = 8
    devices_per_instance: int = 1
    time_shared: bool = True  #: `sync` and `partial_sync` use all devices in both phases; False: they split them
    server: SimulatedServer = SimulatedServer()
    slow_instances: int = 0  #: number of instances that run at `slow_speed`
    slow_speed: float = 0.7
    widths: tuple[int, ...] = WIDTHS  #: devices that a server may have; `dora plan` tries them
    device_bytes: float = 80e9  #: memory of a device; see `with_width`
    fixed_step_s: float = 0.0  #: part of a decoding step's base time that more devices do not shorten; see `with_width`
    wider_step_s: float = 0.0  #: added to it on servers of more devices than described; see `with_width`
    weight_bytes: float = 1e9
    push_fixed_s: float = 1.0
    push_bytes_s: float = 8e9  #: of the link of one server
    store_bytes_s: float = 200e9  #: what the store gives to all pushes together
    relay: bool = False  #: servers pass on what they receive, so that the store sends a version once
    stop_s: float = 0.05  #: time until a stopped request has ended
    answer_s: float = 0.0  #: round-trip time of a request, in addition to decoding
    report_s: float = 10.0  #: time between two reports of token counts


class AdapterModel(_Part, frozen=True):
    """An adapter that is trained in place of the weights, and what it costs to serve adapters side by side."""

    use: AdapterUse = "none"
    throughput: float = 0.9  #: decoding with adapters side by side, as a multiple of that with merged weights
    load_s: float = 1.0  #: time from the publication of an adapter until a server has it, beside its requests


class TrainerModel(_Part, frozen=True):
    """The trainer. A step has `updates` optimizer updates, all with the same number of groups."""

    tokens_s_per_device: float = 6000.0
    updates: int = 1
    update_s: float = 0.5
    devices_per_rank: int = 1
    micro_batch_tokens: int = 32_768
    publish_bytes_s: float = 20e9


class GradingModel(_Part, frozen=True):
    """Grading: log-normal latency per answer, on `workers` serial graders; 0: as many as are needed."""

    median_s: float = 0.005
    sigma: float = 0.6
    hang_share: float = 0.0  #: share of answers whose grader hangs until it is killed
    hang_s: float = 10.0
    failure_share: float = 0.0  #: share of answers whose grading fails
    workers: int = 0


class Faults(_Part, frozen=True):
    """Failure rates, and instances that join late."""

    instance_hours: float = 0.0  #: mean time between two failures of one instance; 0: never
    down_s: float = 120.0  #: time until a failed instance is up again
    push_failure_share: float = 0.0
    late_instances: int = 0  #: number of instances that join only at `join_s`
    join_s: float = 0.0


class Workload(_Part, frozen=True):
    """Everything that a simulation depends on besides its seed."""

    job: JobModel = JobModel()
    lengths: LengthModel = LengthModel()
    tools: Tools = Tools()
    fleet: FleetModel = FleetModel()
    adapters: AdapterModel = AdapterModel()
    train: TrainerModel = TrainerModel()
    grade: GradingModel = GradingModel()
    faults: Faults = Faults()

    @property
    def rules(self) -> Rules:
        """The strategy as settings of the core."""
        job = self.job
        return rules_of(job.strategy, max_staleness=job.max_staleness, pause=job.pause, oversample=job.oversample)

    @property
    def orchestration(self) -> Orchestration:
        """The placement rules."""
        job = self.job
        return orchestration_of(job.rules, without=job.without, refill=job.refill, calls=job.calls)

    @property
    def is_shared(self) -> bool:
        """Whether all devices roll out, then all train."""
        return self.fleet.time_shared and self.job.strategy in ("sync", "partial_sync")

    @property
    def serves_adapters(self) -> bool:
        """Whether every server holds the adapters of several versions."""
        return self.adapters.use == "served"

    @property
    def server(self) -> SimulatedServer:
        """A server with the times of what it serves."""
        server = self.fleet.server
        if not self.serves_adapters:
            return server
        decode, throughput = server.decode, self.adapters.throughput
        slower = DecodeTime(
            base_s=decode.base_s / throughput,
            per_request_s=decode.per_request_s / throughput,
            per_token_s=decode.per_token_s / throughput,
        )
        return msgspec.structs.replace(server, decode=slower)

    @property
    def num_instances(self) -> int:
        """Number of servers in the fleet."""
        devices = self.fleet.devices if self.is_shared else self.fleet.rollout_devices
        return devices // self.fleet.devices_per_instance

    @property
    def train_devices(self) -> int:
        """Number of devices that train."""
        return self.fleet.devices if self.is_shared else self.fleet.devices - self.fleet.rollout_devices

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return max(1, self.train_devices // self.train.devices_per_rank)

    @property
    def rank_tokens_s(self) -> float:
        """Tokens per second that one rank trains."""
        return self.train.tokens_s_per_device * self.train_devices / self.num_ranks

    @property
    def push_s(self) -> float:
        """Duration of one push to one instance while no other is under way."""
        if self.serves_adapters:
            return self.adapters.load_s
        fleet = self.fleet
        return fleet.push_fixed_s + fleet.weight_bytes / min(fleet.push_bytes_s, fleet.store_bytes_s)

    @property
    def publish_s(self) -> float:
        """Time from the end of a step until its version can be pushed; that of an adapter is in `load_s`."""
        return 0.0 if self.serves_adapters else self.fleet.weight_bytes / self.train.publish_bytes_s

    @property
    def watchdog_s(self) -> float:
        """Time without new tokens after which an instance is lost: longer than it may take to read all that its KV has
        room for, and for a request to be answered; unlimited if it shares devices with the trainer."""
        if self.is_shared:
            return _NEVER
        server, fleet = self.server, self.fleet
        step_s = server.decode.step_s(num_requests=server.slots, num_tokens=server.kv_tokens)
        return max(120.0, 8 * fleet.report_s, 2 * (step_s + server.prefill_s(server.kv_tokens) + fleet.answer_s))

    @property
    def grading_fails(self) -> bool:
        """Whether answers may be left without a reward."""
        none_given = any(math.isnan(reward) for row in self.lengths.rewards for reward in row)
        return bool(self.grade.hang_share or self.grade.failure_share) or none_given

    @property
    def has_calls(self) -> bool:
        """Whether answers call tools."""
        return self.tools.max_turns > 1 or bool(self.lengths.calls)

    @property
    def own_prompts(self) -> bool:
        """Whether answers begin with a call."""
        return any(calls and not calls[0].at for row in self.lengths.calls for calls in row)

    @property
    def longest_call_s(self) -> float:
        """The longest time that a call can take."""
        recorded = (call.latency_s for row in self.lengths.calls for calls in row for call in calls)
        return max(recorded, default=self.tools.longest_s)

    @property
    def cap(self) -> int:
        """Token budget of one answer."""
        if self.lengths.regime == "recorded":
            return self.lengths.cap or max(max(n) for n in self.lengths.answers)
        return self.lengths.cap or cap_of(self.lengths.regime)

    def answers(self, *, seed: int) -> Answers:
        """Return the answers of one seed."""
        lengths = self.lengths
        recorded = [
            SimulatedGroup(tokens, list(row), list(rewards), calls)
            for tokens, row, rewards, calls in zip(
                *(lengths.prompts, lengths.answers, lengths.rewards, lengths.calls or ((),) * len(lengths.prompts)),
                strict=True,
            )
        ]
        return Answers(
            lengths.regime,
            seed=seed,
            group_size=self.job.group_size,
            cap=self.cap,
            prompt_tokens=lengths.prompt_tokens,
            scale=lengths.scale,
            recorded=recorded,
            tools=self.tools,
        )

    def settings(self) -> Settings:
        """Return the settings of the decision core."""
        job = self.job
        return Settings(
            rules=self.rules,
            steps=job.steps,
            groups_per_step=job.groups_per_step,
            group_size=job.group_size,
            max_new_tokens=self.cap,
            num_ranks=self.num_ranks,
            micro_batch_tokens=self.train.micro_batch_tokens,
            updates=self.train.updates,
            filter_zero_variance=job.filter_zero_variance,
            max_top_up=job.max_top_up,
            eval_prompt_tokens=(self.lengths.prompt_tokens,) * job.eval_samples,
            eval_every=job.eval_every,
            orchestration=self.orchestration,
            call_limit_s=self.longest_call_s,
            max_episodes=job.max_episodes,
            own_prompts=self.own_prompts,
            watchdog_s=self.watchdog_s,
            no_progress_s=_NEVER,
            decode_time=self.server.decode,
            prefill_s_per_token=self.fleet.server.prefill_s_per_token,
            adapters=self.serves_adapters,
        )

    def with_width(self, devices: int) -> Workload:
        """Return the same fleet with servers of so many devices, by tensor parallelism; `rollout_devices` stays.

        The weights and the KV of a request are divided, so that the time to read them, the prefill and the push shrink
        with the width; the time per request and `fixed_step_s` of a step do not. What the weights leave of the memory
        is KV, in the same share, and the slots grow with the width. All this is extrapolated, not measured:
        `wider_step_s` makes wider servers slower than that. ConfigError if the server as it is described has no memory
        for the weights.
        """
        fleet, times = self.fleet, devices / self.fleet.devices_per_instance
        if times == 1:
            return self
        server, decode = fleet.server, fleet.server.decode
        free = fleet.devices_per_instance * fleet.device_bytes - fleet.weight_bytes
        if free <= 0:
            raise ConfigError(
                f"fleet.device_bytes: {fleet.devices_per_instance} devices of {fleet.device_bytes:.4g} bytes cannot "
                f"hold fleet.weight_bytes = {fleet.weight_bytes:.4g}"
            )
        share = max(0.0, times * (free + fleet.weight_bytes) - fleet.weight_bytes) / free
        fixed_s = min(fleet.fixed_step_s, decode.base_s)
        changes: dict[str, Any] = {
            "slots": max(1, int(server.slots * times)),
            "kv_tokens": int(server.kv_tokens * share),
            "prefill_s_per_token": server.prefill_s_per_token / times,
            "prefill_s_per_token2": server.prefill_s_per_token2 / times,
            "decode": DecodeTime(
                base_s=fixed_s + (decode.base_s - fixed_s) / times + (fleet.wider_step_s if times > 1 else 0.0),
                per_request_s=decode.per_request_s,
                per_token_s=decode.per_token_s / times,
            ),
        }
        if (drafts := server.speculation) is not None:
            narrower = msgspec.structs.replace(drafts, per_draft_s=drafts.per_draft_s / times)
            changes["speculation"] = narrower
        return self.with_changes(
            fleet={
                "devices_per_instance": devices,
                "push_bytes_s": fleet.push_bytes_s * times,
                "server": msgspec.structs.replace(server, **changes),
            }
        )

    def with_changes(self, **changes: dict[str, Any]) -> Workload:
        """Return a copy with changed fields of its parts: with_changes(job={"strategy": "sync"})."""
        parts = {name: msgspec.structs.replace(getattr(self, name), **values) for name, values in changes.items()}
        return msgspec.structs.replace(self, **parts)


def load(path: Path) -> Workload:
    """Read a workload file; ConfigError if it is invalid."""
    try:
        return checked(msgspec.convert(read_toml(path), Workload), origin=str(path))
    except (msgspec.ValidationError, RecursionError) as err:
        raise ConfigError(f"{path}: {err}") from err


def with_overrides(workload: Workload, overrides: Sequence[str], *, splits: bool = True) -> Workload:
    """Return the workload with the changes of `--set` options; without `splits`, at the smallest split that the changes
    allow, unless they choose one."""
    data, origin = msgspec.to_builtins(workload), " ".join(f"--set {override}" for override in overrides)
    for override in overrides:
        set_key(data, override)
    try:
        changed = msgspec.convert(data, Workload)
    except (msgspec.ValidationError, RecursionError) as err:
        raise ConfigError(f"{origin}: {err}") from err
    is_same = changed.fleet.rollout_devices == workload.fleet.rollout_devices
    if not splits and is_same and changed.job.strategy in STRATEGIES:
        least = changed.fleet.devices_per_instance * _least_instances(changed)
        changed = changed.with_changes(fleet={"rollout_devices": least})
    return checked(changed, origin=origin)


def checked(workload: Workload, *, origin: str) -> Workload:
    """Return `workload`; ConfigError with one line per problem."""
    problems = list(_problems(workload))
    if problems:
        raise ConfigError(*(f"{origin}: {problem}" for problem in problems))
    return workload


def _problems(workload: Workload) -> list[str]:
    job, fleet, lengths = workload.job, workload.fleet, workload.lengths
    if job.strategy not in STRATEGIES:
        return [f"job.strategy: {job.strategy!r} is not simulated; use one of {', '.join(STRATEGIES)}"]
    if job.rules not in RULES or not set(job.without) <= set(SWITCHES):
        return [f"job.rules: must be one of {', '.join(RULES)}; job.without: use any of {', '.join(SWITCHES)}"]
    if lengths.regime not in {*REGIMES, "C", "recorded"}:
        return [f"lengths.regime: unknown regime {lengths.regime!r}; use A, B, C, D, S or recorded"]
    sizes = {len(lengths.prompts), len(lengths.answers), len(lengths.rewards)}
    if lengths.regime == "recorded" and (len(sizes) > 1 or 0 in sizes):
        return ["lengths.answers: needs at least one recorded prompt, and as many rows of answers and of rewards"]
    found = _number_problems(workload)
    if found:
        return found
    if job.groups_per_step % workload.train.updates:
        found.append(
            f"train.updates: {workload.train.updates} updates must share job.groups_per_step = "
            f"{job.groups_per_step} evenly"
        )
    if any(len(row) != job.group_size for row in (*lengths.answers, *lengths.rewards)):
        return [f"lengths.answers, lengths.rewards: every prompt needs job.group_size = {job.group_size} of them"]
    if 0 < job.max_episodes < job.group_size:
        found.append(
            f"job.max_episodes: {job.max_episodes} episodes are fewer than one group has (job.group_size = "
            f"{job.group_size}); raise it, or set 0 for any number"
        )
    cap = workload.cap
    if any(not 0 <= n <= cap for row in lengths.answers for n in row):
        found.append(f"lengths.answers: no answer may exceed the token budget of {cap}; raise lengths.cap")
    if job.strategy in ("oversample", "partial_sync") and job.oversample <= 1:
        found.append("job.oversample: must be above 1; to generate no surplus, use job.strategy `periodic` or `sync`")
    elif not workload.num_instances:
        found.append(f"fleet.rollout_devices: {fleet.rollout_devices} devices are less than one instance has")
    elif workload.rules.in_flight is not None and workload.serves_adapters:
        found.append(f"adapters.use: job.strategy {job.strategy!r} would change adapters of requests; use merged")
    elif workload.num_instances < _least_instances(workload):
        found.append(
            f"fleet.rollout_devices: {workload.num_instances} instances cannot hold the "
            f"{workload.rules.max_staleness + 1} versions of K = {workload.rules.max_staleness}"
        )
    found += [*_tool_problems(workload), *_call_problems(workload)]
    if fleet.answer_s and workload.faults.instance_hours:
        found.append("fleet.answer_s, faults.instance_hours: a delayed answer would survive a loss; set either to 0")
    if not fleet.widths or min(fleet.widths) < 1:
        found.append("fleet.widths: must be one or more numbers of devices")
    if workload.train_devices < 1:
        found.append("fleet.rollout_devices: leaves no device for the trainer")
    longest = max(lengths.prompt_tokens, *lengths.prompts, 0) + workload.cap
    if longest > fleet.server.kv_tokens:
        found.append(
            f"fleet.server.kv_tokens: {fleet.server.kv_tokens} cannot hold the longest prompt plus the token budget "
            f"({longest})"
        )
    return found


def _least_instances(workload: Workload) -> int:
    """Return how many servers the versions of K need: one may hold adapters of all, or be updated in flight."""
    in_flight = workload.rules.in_flight is not None
    return 1 if in_flight or workload.serves_adapters else workload.rules.max_staleness + 1


def _number_problems(workload: Workload) -> list[str]:
    """Return the problems of single numbers: below 0, or 0 where the simulation divides."""
    numbers = dict(_numbers(workload))
    odd = [name for name, value in numbers.items() if (value >= 2**53 if isinstance(value, int) else math.isnan(value))]
    if odd:
        return [f"{name}: must be a number below 2^53" for name in odd]
    found = [f"{name}: {value} is below 0" for name, value in numbers.items() if value < 0]
    found += [f"{name}: must be at least {least}" for name, least in _AT_LEAST.items() if numbers[name] < least]
    found += [f"{name}: must be above 0" for name in _DIVISORS if numbers[name] == 0]
    found += [f"{name}: must be finite" for name, n in numbers.items() if name.startswith(_FINITE) and n == math.inf]
    if (drafts := workload.fleet.server.speculation) is not None and drafts.acceptance > 1:
        found.append("fleet.server.speculation.acceptance: must be at most 1")
    if workload.faults.push_failure_share >= 1:
        found.append("faults.push_failure_share: must be below 1; otherwise no server ever holds a version")
    return found


def _numbers(part: msgspec.Struct, *, path: str = "") -> Iterator[tuple[str, float]]:
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, msgspec.Struct):
            yield from _numbers(value, path=f"{path}{name}.")
        elif isinstance(value, int | float):
            yield f"{path}{name}", value


def _tool_problems(workload: Workload) -> list[str]:
    tools, found = workload.tools, []
    if tools.calls and (min(tools.calls) < 0 or not 0 < sum(tools.calls) < math.inf):
        found.append("tools.calls: weights of 0, 1, 2, ... calls must be finite, at least 0, and not all 0")
    if tools.max_turns > 1 and workload.lengths.regime == "recorded":
        found.append(
            "tools.calls: recorded answers have calls of their own; remove these, or use another lengths.regime"
        )
    return found


def _call_problems(workload: Workload) -> Iterator[str]:
    """Yield the problems of recorded calls: each follows the result of the one before it, within the answer."""
    lengths, begun = workload.lengths, workload.own_prompts
    if not lengths.calls:
        return
    if lengths.regime != "recorded" or [*map(len, lengths.calls)] != [*map(len, lengths.answers)]:
        yield "lengths.calls: needs a list of calls for each recorded answer"
        return
    for length, calls in zip(chain(*lengths.answers), chain(*lengths.calls), strict=True):
        edges = [0, *(edge for call in calls for edge in (call.at, call.at + call.num_tokens)), length]
        if begun != bool(calls and calls[0].at == 0 < calls[0].num_tokens):
            yield "lengths.calls: either every answer begins with a call, which has a result, or none does"
            return
        if edges != sorted(edges) or not all(0 <= call.latency_s < _NEVER for call in calls):
            yield f"lengths.calls: {list(map(list, calls))} cannot be the calls of an answer of {length} tokens"
            return
