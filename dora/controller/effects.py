"""Work commands carried out: one order in, one fact out.

Invariant: an effect returns exactly one event, on failure too; only what is foreseen is caught. A cancelled effect
returns nothing: its order was voided by the core before. Called by the controller loop, one task per command.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dora.controller.evaluations import Evaluations
from dora.controller.fleet import Fleet
from dora.controller.trajectories import Record, Trajectories
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import FOREIGN_VERSION, GroupId, TrajectoryId
from dora.core.strategies import Pause
from dora.engine.client import EngineClient, GenerateRequest
from dora.engine.errors import RequestRefused, ServerGone
from dora.engine.rids import request_id
from dora.engine.stream import GenerateResult
from dora.errors import ProtocolError, RemoteError
from dora.tasks.pool import Graded, GraderPool
from dora.tasks.prompts import Prompt, PromptStream
from dora.tasks.rewards import GradeRequest
from dora.tasks.tokenizer import Tokenizer
from dora.weights.push import Transport, push
from dora.weights.store import StoreError, VersionStore

#: A refused request waits so long before the core may try again, so that `max_attempts` means something.
REFUSAL_PAUSE_S = 0.5


@dataclass
class Io:
    """Everything the effects reach outside with, and the values they need."""

    run_id: str
    seed: int
    group_size: int
    max_new_tokens: int
    temperature: float
    push_timeout_s: float
    transport: Transport
    live: Pause | None  # weights reach live requests, and how a server is paused for them
    keep_versions: int  # durable versions kept besides those needed; 0: all
    client: EngineClient
    fleet: Fleet
    store: VersionStore
    trajectories: Trajectories
    stream: PromptStream
    tokenizer: Tokenizer
    graders: GraderPool
    eval_graders: Sequence[GraderPool]  # by set
    evaluations: Evaluations
    now: Callable[[], float]

    def label(self, version: int) -> str:
        """Weight label and prefix-cache namespace of a version."""
        return f"{self.run_id}/{version}"

    def version_of(self, label: str) -> int:
        """The version a label names, FOREIGN_VERSION if it is not one of this run."""
        run_id, _, number = label.rpartition("/")
        return int(number) if run_id == self.run_id and number.isdecimal() else FOREIGN_VERSION

    def attempt_seed(self, trajectory: TrajectoryId, num_tokens: int) -> int:
        """Sampling seed of an attempt: of the run, the trajectory, and the tokens it goes on from.

        A seed that ignored the last would make a resumed request repeat its random numbers on some servers.
        """
        digest = hashlib.blake2b(f"{self.seed} {trajectory} {num_tokens}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


async def generate(order: cmd.Generate, *, io: Io) -> ev.Event:
    """Stream one attempt into the records; GenerationFinished, -Stopped or -Failed."""
    trajectory, attempt = order.trajectory, order.attempt
    record = io.trajectories.begin(trajectory, attempt)
    start = len(record.tokens)
    if _is_over(record, io=io):
        # The server before was lost between the last token and the last chunk: there is nothing left to generate.
        return _finished(order, record, spans=(), io=io)
    url = io.fleet.urls.get(order.instance)
    if url is None:
        return _failed(order, record, io=io, server_gone=True, reason=f"instance {order.instance} is down")
    request = GenerateRequest(
        rid=request_id(io.run_id, trajectory=trajectory, attempt=attempt),
        input_ids=[*record.prompt.tokens, *record.tokens],
        max_new_tokens=io.max_new_tokens - start,
        temperature=io.temperature if trajectory >= 0 else io.evaluations.locate(trajectory)[0].temperature,
        stop_token_ids=io.tokenizer.eos_ids,
        seed=io.attempt_seed(trajectory, start),
        extra_key=io.label(order.version),
    )
    try:
        result = await io.client.generate(url, request, partial(io.trajectories.append, trajectory, attempt))
    except ServerGone as err:
        return _failed(order, record, io=io, server_gone=True, reason=str(err))
    except (RequestRefused, ProtocolError) as err:
        await asyncio.sleep(REFUSAL_PAUSE_S)
        return _failed(order, record, io=io, server_gone=False, reason=str(err))
    return _ended(order, record, result, start=start, io=io)


def _failed(order: cmd.Generate, record: Record, *, io: Io, server_gone: bool, reason: str) -> ev.Event:
    return ev.GenerationFailed(io.now(), order.trajectory, order.attempt, len(record.tokens), server_gone, reason)


def _ended(order: cmd.Generate, record: Record, result: GenerateResult, *, start: int, io: Io) -> ev.Event:
    spans = tuple((io.version_of(label), start + a, start + b) for label, a, b in result.spans)
    if result.finish_reason == "abort" and not _is_over(record, io=io):
        return ev.GenerationStopped(io.now(), order.trajectory, order.attempt, len(record.tokens), spans)
    return _finished(order, record, spans=spans, io=io)


def _finished(order: cmd.Generate, record: Record, *, spans: tuple[ev.Span, ...], io: Io) -> ev.Event:
    record.length_capped = record.tokens[-1] not in io.tokenizer.eos_ids
    return ev.GenerationFinished(
        io.now(), order.trajectory, order.attempt, len(record.tokens), record.length_capped, spans
    )


def _is_over(record: Record, *, io: Io) -> bool:
    """The answer ended with a stop token, or its budget is used up."""
    tokens = record.tokens
    return bool(tokens) and (tokens[-1] in io.tokenizer.eos_ids or len(tokens) >= io.max_new_tokens)


async def grade(order: cmd.GradeTrajectory, *, io: Io) -> ev.Event:
    """Score an answer in a limited process; a failure is a reason, never a reward."""
    trajectory = order.trajectory
    record = io.trajectories.records[trajectory]
    pool = io.graders if trajectory >= 0 else io.eval_graders[io.evaluations.set_index(trajectory)]
    prompt = record.prompt
    request = GradeRequest(
        prompt=prompt.text,
        response=io.tokenizer.decode(record.tokens.tolist()),
        answer=prompt.answer,
        metadata=prompt.metadata,
    )
    outcome = await pool.grade(request)
    if isinstance(outcome, Graded):
        record.reward = outcome.reward
        return ev.TrajectoryGraded(io.now(), trajectory, order.attempt, outcome.reward)
    return ev.TrajectoryGraded(io.now(), trajectory, order.attempt, None, outcome.reason)


async def push_weights(order: cmd.PushWeights, *, io: Io) -> ev.Event:
    """Give an instance a version; it gets new work only after the read-back."""
    url = io.fleet.urls.get(order.instance)
    try:
        if url is None:
            raise RemoteError(f"instance {order.instance} is down")
        folder = await asyncio.to_thread(io.store.folder, order.version)
        await push(
            io.client.push_endpoint(url),
            folder=folder,
            label=io.label(order.version),
            timeout_s=io.push_timeout_s,
            transport=io.transport,
            live=io.live,
        )
    except (RemoteError, StoreError) as err:
        return ev.WeightPushFailed(io.now(), order.instance, order.attempt, str(err))
    return ev.WeightPushFinished(io.now(), order.instance, order.attempt, order.version)


async def dismiss(order: cmd.DismissInstance, *, io: Io) -> ev.Event:
    """Let an instance go that the core has emptied."""
    await io.fleet.dismiss(order.instance)
    return ev.InstanceRemoved(io.now(), order.instance)


async def fetch_prompts(order: cmd.FetchPrompts, *, io: Io) -> ev.Event:
    """Read the next prompts of the stream, off the loop: some sources compute for a second."""

    def read() -> list[Prompt]:
        found = []
        for position in range(order.first, order.first + order.count):
            prompt = io.stream.at(position)
            if prompt is None:
                break
            found.append(prompt)
        return found

    prompts = await asyncio.to_thread(read)
    for prompt in prompts:
        io.trajectories.prompts[GroupId(prompt.position)] = prompt
    lengths = tuple(len(p.tokens) for p in prompts)
    return ev.PromptsArrived(io.now(), order.first, lengths, len(prompts) < order.count)
