"""Servers, graders and a trainer whose results prove their inputs.

A policy is 32 hex digits. A token is a digest of (policy, trajectory, position), so that an answer shows which policy
sampled it; the policy after a step is a digest of the previous policy and the step's waves, so that it shows what it
was trained on. The servers read versions from the store's folders, as their weights or as adapters; the trainer
imitates dora/trainer (step.py, publish.py, checkpoint.py) with the real version store, checkpoints and fence.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from dora import files
from dora.app.opening import Opened
from dora.controller.fleet import Started
from dora.core.strategies import Pause
from dora.engine.api import GenerateRequest, GenerateResult, OnTokens
from dora.engine.errors import RequestRefused, ServerGone
from dora.engine.sglang.answers import Loads
from dora.errors import ConfigError, DoraError, ProtocolError, RemoteError
from dora.paced.engine import trajectory_of
from dora.tasks.pool import Graded, GradingFailed
from dora.tasks.rewards import GradeRequest
from dora.transport import messages as wire
from dora.weights import checkpoints
from dora.weights.fence import pass_fence
from dora.weights.store import ADAPTER, VersionStore, checksum_of, checksum_of_files
from tests.crash.policy import ARRAYS, BASE, EOS, POLICY, token, trained


def substance(batch: wire.MicroBatch) -> bytes:
    """What a micro-batch contributes to a step."""
    return b"".join(np.ascontiguousarray(getattr(batch, name)).tobytes() for name in ARRAYS)


def make_model(folder: Path, *, like: Path) -> None:
    """Write a model folder with the tokenizer of `like` and the policy of version 0."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(like / name, folder / name)
    (folder / POLICY).write_text(BASE)


@dataclass(frozen=True)
class Faults:
    """Failure rates of requests, grades, and loads and unloads of adapters, and durations."""

    gone: float = 0.02
    refused: float = 0.03
    ungraded: float = 0.03
    grade_s: float = 0.005  #: duration of a grade, multiplied by up to 6
    load_s: float = 0.01  #: duration of a load of weights, or of a load or unload of an adapter
    doubtful: float = 0.0  #: of loads and unloads: half of them have no effect


# -- servers ----------------------------------------------------------------------------------------------------------


#: The policy of a server whose weights no label may vouch for, such as those of half a load: its tokens break C1.
TORN = "f" * 32
#: In place of the policy of an adapter that was unloaded.
GONE = "gone"
#: Trajectory under which a proof is computed, and number of its tokens.
PROOF, PROOF_TOKENS = -1, 4


class Adapter(NamedTuple):
    """An adapter that a server has or had: SGLang keeps the folder, and loads it again for a request."""

    folder: str
    policy: str


class Held(NamedTuple):
    """What a server has."""

    label: str = "default"
    policy: str = ""
    adapters: Mapping[str, Adapter] = {}  #: by name, of each that was ever loaded


FRESH = Held()


def proof(policy: str) -> list[float]:
    """The log-probs under a policy by which a server shows that it has it."""
    return [-token(policy, PROOF, place) / 64 for place in range(1, PROOF_TOKENS)]


#: Share of the kept servers that cannot be taken over.
LAME = 0.1
#: The adapters that servers have room for.
RANK, TARGETS = 4, ("q_proj", "v_proj")


class Engines:
    """All servers of a run: the calls of SGLang's client."""

    def __init__(
        self,
        *,
        seed: str,
        faults: Faults,
        pushed: Callable[[str], None],
        changed: Callable[[str, Held | None], None],
        kept: Mapping[str, Held],
        room: int,
    ) -> None:
        """`changed` is told what a server holds whenever that changes. `kept`: by url, what an earlier life left.
        `room`: for how many adapters at a time."""
        self._room = room
        self._seed = seed
        self._faults = faults
        self._pushed = pushed
        self._changed = changed
        self.kept = dict(kept)  # until they are killed
        self.held = dict(kept)  # by url
        self._users: Counter[tuple[str, str]] = Counter()  # requests under way, by url and adapter
        self._draws = itertools.count()
        self.stopped: set[str] = set()  # request ids
        self.dying: dict[str, asyncio.Event] = {}

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        held = self.held.setdefault(url, FRESH)
        trajectory = trajectory_of(request.id)
        if trajectory is None:  # the probe
            return GenerateResult("length", ((held.label, 0, 1),), 1, 0)
        if request.adapter is None:
            return await self._sample(url, request, on_tokens, trajectory=trajectory, held=held)
        policy = self._adapter(url, request.adapter).policy
        assert policy not in (GONE, TORN), f"a request names {request.adapter}, which is not loaded"
        self._users[url, request.adapter] += 1
        try:
            held = held._replace(policy=policy)
            return await self._sample(url, request, on_tokens, trajectory=trajectory, held=held)
        finally:
            self._users[url, request.adapter] -= 1

    async def _sample(
        self, url: str, request: GenerateRequest, on_tokens: OnTokens, *, trajectory: int, held: Held
    ) -> GenerateResult:
        rng = random.Random(f"{self._seed} {request.id}")
        ends = rng.random()
        if ends < self._faults.refused:
            raise RequestRefused(f"{url}: no", status=503, retryable=True)
        pace_s = rng.choice((0.002, 0.02, 0.1, 0.7))
        place, done = len(request.tokens), 0
        reason = "length"
        while done < request.max_new_tokens and reason == "length":
            await asyncio.sleep(pace_s)
            if request.id in self.stopped:
                reason = "abort"
                break
            if 0 <= ends - self._faults.refused < self._faults.gone and done:
                self.dying[url].set()
                raise ServerGone(f"{url}: the connection broke off")
            chunk: list[int] = []
            for _ in range(min(rng.randrange(1, 6), request.max_new_tokens - done)):
                chunk.append(token(held.policy, trajectory, place + done))
                done += 1
                if chunk[-1] == EOS:
                    reason = "stop"
                    break
            on_tokens(chunk, [-chunk_token / 64 for chunk_token in chunk])
        spans = ((held.label, 0, done),) if done else ()
        return GenerateResult(reason, spans, done, 0)  # type: ignore[arg-type]

    async def abort(self, url: str, rid: str) -> None:
        self.stopped.add(rid)

    async def loads(self, url: str) -> Loads:
        return Loads(num_running=0, num_waiting=0, used_tokens=0, max_total_tokens=4096, max_running=8)

    async def server_info(self, url: str) -> dict[str, Any]:
        lora = {
            "enable_lora": True,
            "lora_strict_loading": True,
            "max_loras_per_batch": self._room + 1,
            "max_lora_rank": RANK,
        }
        return {"version": "model", **lora, "lora_target_modules": [*TARGETS]}

    async def weight_version(self, url: str) -> str:
        return self.held.setdefault(url, FRESH).label

    def hold(self, url: str, held: Held | None) -> None:
        """Change what a server holds; None: it has ended."""
        if held is None:
            self.held.pop(url, None)
            self.kept.pop(url, None)
        else:
            self.held[url] = held
        self._changed(url, held)

    async def set_label(self, url: str, label: str) -> None:
        self.hold(url, self.held.setdefault(url, FRESH)._replace(label=label))

    async def has_route(self, url: str, path: str) -> bool:
        return False

    async def update(self, url: str, path: str, body: dict[str, Any]) -> None:
        raise RequestRefused(f"{url}{path}: Not Found", status=404, retryable=False)

    async def health(self, url: str, *, timeout_s: float) -> None:
        return

    async def resume(self, url: str) -> None:
        if url in self.kept and random.Random(f"{self._seed} {url}").random() < LAME:
            raise ServerGone(f"{url}: cannot connect")

    async def pause(self, url: str, mode: Pause) -> None:
        return

    async def flush_cache(self, url: str, *, timeout_s: float | None = None) -> bool:
        return True

    async def update_weights_from_disk(self, url: str, folder: str, label: str, *, timeout_s: float) -> None:
        self.hold(url, self.held.setdefault(url, FRESH)._replace(policy=TORN))
        await asyncio.sleep(self._faults.load_s)
        try:
            self.hold(url, Held(label, (Path(folder) / POLICY).read_text()))
        except OSError as err:
            raise RequestRefused(f"{url}: {err}", status=400, retryable=False) from err
        self._pushed(label)

    # -- adapters -----------------------------------------------------------------------------------------------------

    async def load_adapter(self, url: str, name: str, folder: str, *, timeout_s: float) -> None:
        assert name not in self.held.setdefault(url, FRESH).adapters, f"the name {name} was used before"
        assert len(await self.adapters(url)) < self._room, f"{url} has no room for {name}"
        self._pushed(f"adapter/{int(Path(folder).parent.name[1:])}")
        fails, has_effect = self._draw()
        self._have(url, name, TORN, folder=folder)
        await self._take_time(url)
        if fails and not has_effect:
            self._have(url, name, GONE)
            raise RequestRefused(f"{url}: no", status=400, retryable=False)
        self._read(url, name, folder)
        if fails:
            raise RemoteError(f"{url}: no answer in time")

    async def unload_adapter(self, url: str, name: str, *, timeout_s: float) -> None:
        if name not in await self.adapters(url):
            raise RequestRefused(f"{url}: {name} is not loaded", status=400, retryable=False)
        assert not self._users[url, name], f"{name} is unloaded under a request"
        fails, has_effect = self._draw()
        if has_effect:
            self._have(url, name, TORN)
        await self._take_time(url)
        if has_effect:
            self._have(url, name, GONE)
        if fails:
            raise RemoteError(f"{url}: no answer in time")

    async def adapters(self, url: str) -> dict[str, str]:
        known = self.held.setdefault(url, FRESH).adapters
        return {name: adapter.folder for name, adapter in known.items() if adapter.policy != GONE}

    async def prompt_logprobs(
        self, url: str, token_ids: Sequence[int], *, timeout_s: float, adapter: str | None = None
    ) -> list[float]:
        assert adapter is not None
        known = self._adapter(url, adapter)
        if known.policy == GONE:
            self._read(url, adapter, known.folder)
        return proof(self._adapter(url, adapter).policy)

    def _draw(self) -> tuple[bool, bool]:
        """Whether a load or unload fails, and whether it has an effect."""
        drawn = random.Random(f"{self._seed} {next(self._draws)}").random()
        return drawn < self._faults.doubtful, drawn >= self._faults.doubtful / 2

    async def _take_time(self, url: str) -> None:
        """Pass the time of a load or unload."""
        process = self.dying[url]
        await asyncio.sleep(self._faults.load_s)
        if process.is_set() or self.dying[url] is not process:
            raise ServerGone(f"{url}: the connection broke off")

    def _adapter(self, url: str, name: str) -> Adapter:
        """Return the adapter that a request names; a server that was started since then knows none."""
        adapter = self.held.setdefault(url, FRESH).adapters.get(name)
        if adapter is None:
            raise RequestRefused(f"{url}: {name} was never loaded", status=400, retryable=False)
        return adapter

    def _read(self, url: str, name: str, folder: str) -> None:
        try:
            self._have(url, name, (Path(folder) / POLICY).read_text())
        except OSError as err:
            self._have(url, name, GONE)
            raise RequestRefused(f"{url}: {err}", status=400, retryable=False) from err

    def _have(self, url: str, name: str, policy: str, *, folder: str = "") -> None:
        held = self.held[url]
        adapter = Adapter(folder or held.adapters[name].folder, policy)
        self.hold(url, held._replace(adapters={**held.adapters, name: adapter}))


class Server:
    """A server process that is up as soon as it is started; an earlier life may have left one running."""

    def __init__(self, url: str, engines: Engines) -> None:
        self.url = url
        self._engines = engines

    async def start(self) -> Started:
        self._engines.dying[self.url] = asyncio.Event()
        return Started(self.url, is_kept=self.url in self._engines.kept)

    async def ended(self) -> str:
        await self._engines.dying[self.url].wait()
        return f"{self.url} died"

    async def kill(self) -> None:
        self._engines.hold(self.url, None)

    async def stop(self) -> None:
        return


class Graders:
    """A reward is a digest of prompt and answer."""

    def __init__(self, *, faults: Faults) -> None:
        self._faults = faults

    async def grade(self, request: GradeRequest) -> Graded | GradingFailed:
        drawn = hashlib.blake2b(f"{request.prompt}|{request.response}".encode(), digest_size=4).digest()
        number = int.from_bytes(drawn, "little")
        await asyncio.sleep((number % 7) * self._faults.grade_s)
        if number % 1000 < 1000 * self._faults.ungraded:
            return GradingFailed("timeout")
        return Graded(float(number >> 10 & 1))


# -- trainer ----------------------------------------------------------------------------------------------------------


class End:
    """The controller's end of the link to all ranks, without sockets."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.renew(0)

    def renew(self, incarnation: int) -> None:
        self.inboxes: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in range(self._num_ranks)]
        self.outbox: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

    async def wait_ready(self, timeout_s: float) -> int:
        return self._num_ranks

    async def send(self, rank: int, message: Any) -> None:
        await self.inboxes[rank].put(message)

    async def receive(self) -> tuple[int, Any]:
        return await self.outbox.get()


class RanksModel:
    """The processes of a trainer. Those that are lost may go on for a while, as a host that was cut off does."""

    are_cut_off = False

    def __init__(self, end: End, opened: Opened, *, rng: random.Random, arrived: Callable[[wire.MicroBatch], None]):
        self._end = end
        self._opened = opened
        self._rng = rng
        self._arrived = arrived
        self.tasks: list[asyncio.Task[None]] = []
        self.start()

    def start(self) -> None:
        self._lost = asyncio.Event()
        model = TrainerModel(self._end, rng=self._rng, arrived=self._arrived)
        self.tasks.append(asyncio.create_task(model.run()))

    def lose(self) -> None:
        self._lost.set()

    async def ended(self) -> str:
        await self._lost.wait()
        return "trainer: killed"

    def why_restart(self) -> str:
        return ""

    async def restart(self, incarnation: int) -> int:
        await self._opened.fence_ranks(incarnation)
        if self._rng.random() < 0.5:
            self.tasks[-1].cancel()
            self._opened.store.unstage()
        self.start()
        return len(self._end.inboxes)


def _checksums(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): checksum_of(path) for path in paths}


class TrainerModel:
    """All ranks of a trainer in one task."""

    def __init__(self, end: End, *, rng: random.Random, arrived: Callable[[wire.MicroBatch], None]) -> None:
        self._inboxes, self._outbox = end.inboxes, end.outbox
        self._rng = rng
        self._arrived = arrived
        self._ranks = range(len(end.inboxes))
        self._policy = BASE
        self._publishing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run from Configure to Stop; report failures as a rank does."""
        beats = asyncio.create_task(self._beat())
        try:
            await self._run()
        except DoraError as err:
            self._say(wire.TrainerFailed(rank=0, reason=str(err), is_final=True))
        finally:
            beats.cancel()

    async def _beat(self) -> None:
        for count in itertools.count():
            for rank in self._ranks:
                self._say(wire.RankPulse(rank=rank, count=count, activity="forward_backward"), rank=rank)
            await asyncio.sleep(wire.PULSE_S)

    async def _run(self) -> None:
        order = (await self._next())[0]
        self._order = order
        self._fence = partial(pass_fence, Path(order.fence), epoch=order.epoch, incarnation=order.incarnation)
        self._store = VersionStore(
            memory_root=Path(order.memory_root), durable_root=Path(order.durable_root), fence=self._fence
        )
        await self._pause()
        skipped = self._load()
        self._index, self._waves = 0, b""
        await self._publish(self._step)
        for rank in self._ranks:
            self._say(wire.RankReady(rank=rank, next_step=self._step, skipped=skipped), rank=rank)
        while True:
            messages = await self._next()
            match messages[0]:
                case wire.MicroBatch():
                    await self._train(messages)
                case wire.SaveCheckpoint():
                    await self._save()
                case wire.Stop():
                    break
        if self._publishing is not None:
            await self._publishing

    async def _next(self) -> list[Any]:
        return [await inbox.get() for inbox in self._inboxes]

    def _say(self, message: Any, *, rank: int = 0) -> None:
        self._outbox.put_nowait((rank, message))

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 0.01, 0.05, 0.4)))

    async def _train(self, batches: list[wire.MicroBatch]) -> None:
        first = batches[0]
        if (first.step, first.index) != (self._step, self._index):
            raise ProtocolError(f"micro-batch {first.step}/{first.index}, expected {self._step}/{self._index}")
        if first.parent != self._chain:
            raise ProtocolError(f"micro-batch {first.step}/{first.index} belongs to another history")
        self._arrived(first)
        await self._pause()
        self._waves += b"".join(substance(batch) for batch in batches)
        self._index += 1
        for rank, batch in enumerate(batches):
            done = wire.MicroBatchDone(
                rank=rank, step=batch.step, index=batch.index, num_tokens=len(batch.tokens), busy_s=0.0
            )
            self._say(done, rank=rank)
        if first.last:
            await self._close(first.chain)

    async def _close(self, chain: str) -> None:
        await self._pause()
        self._policy = trained(self._policy, self._waves)
        self._step, self._chain = self._step + 1, chain
        self._index, self._waves = 0, b""
        self._say(wire.StepDone(rank=0, step=self._step - 1, metrics={}, chain=chain))
        await self._publish(self._step)
        settings = self._order.settings
        if self._step % settings.checkpoint_every == 0 or self._step == settings.steps:
            await self._save()

    # -- versions -----------------------------------------------------------------------------------------------------

    async def _publish(self, version: int) -> None:
        """Publish in the background, after the previous version."""
        if self._publishing is not None:
            await self._publishing
        self._publishing = asyncio.create_task(self._write(version, self._policy, self._chain))

    async def _write(self, version: int, policy: str, chain: str) -> None:
        await self._pause()
        try:
            replayed = version in {*self._store.live(), *self._store.durable()}
            staged = self._store.stage(version)
            (staged / POLICY).write_text(policy)
            (staged / "config.json").write_text("{}")
            if self._order.settings.lora is not None:
                self._write_adapter(staged / ADAPTER, policy)
            made = _checksums(staged) if replayed else {}
            manifest = self._store.seal(version, staged, chain=chain)
        except DoraError as err:
            self._say(wire.TrainerFailed(rank=0, reason=str(err), is_final=True))
            return
        differs = checksum_of_files(made) if replayed and made != manifest.files else ""
        self._say(
            wire.VersionWritten(
                version=version,
                num_bytes=manifest.num_bytes,
                files=dict(manifest.files),
                chain=chain,
                differs=differs,
            )
        )

    def _write_adapter(self, folder: Path, policy: str) -> None:
        files.make_folder(folder)
        (folder / POLICY).write_text(policy)
        shown = {"dtype": "float32", "token_ids": [*range(PROOF_TOKENS)], "logprobs": proof(policy)}
        (folder / "proof.json").write_text(json.dumps(shown))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    async def _save(self) -> None:
        parent = Path(self._order.checkpoints)
        target = checkpoints.folder_of(parent, step=self._step, chain=self._chain)
        manifest = self._manifest()
        if checkpoints.read_manifest(target) != manifest:
            while not self._save_in(parent, target):
                await self._pause()
        self._say(
            wire.CheckpointWritten(
                step=self._step,
                folder=str(target),
                num_bytes=sum(manifest.num_bytes),
                files=manifest.files(self._ranks),
                chain=self._chain,
            )
        )

    def _save_in(self, parent: Path, target: Path) -> bool:
        """Whether there was room for it."""
        try:
            self._write_checkpoint(parent, target)
        except OSError as err:
            if not files.is_full(err):
                raise
            return False
        return True

    def _write_checkpoint(self, parent: Path, target: Path) -> None:
        written = target.with_name(f".{target.name}")
        files.remove(written)
        files.make_folder(written)
        for rank in self._ranks:
            path = checkpoints.rank_file(written, rank)
            path.write_text(self._policy)
            files.wrote(path)
            files.sync(path)
        checkpoints.write_manifest(written, self._manifest())
        self._fence()
        files.remove(target)
        files.rename(written, target)
        files.sync_folder(parent)

    def _manifest(self) -> checkpoints.CheckpointManifest:
        count, of_file = len(self._ranks), xxhash.xxh3_128_hexdigest(self._policy.encode())
        state = self._checksums(self._policy)
        return checkpoints.CheckpointManifest(self._step, count, self._chain, state, [32] * count, [of_file] * count)

    def _checksums(self, policy: str) -> list[str]:
        return [hashlib.sha256(f"{rank} {policy}".encode()).hexdigest() for rank in self._ranks]

    def _load(self) -> tuple[str, ...]:
        """Load the first checkpoint that is whole."""
        skipped = []
        for path in map(Path, self._order.resume_from):
            manifest = checkpoints.read_manifest(path)
            if manifest is not None:
                stored = [
                    checkpoints.rank_file(path, rank).read_bytes().decode(errors="replace") for rank in self._ranks
                ]
                if len(set(stored)) == 1 and self._checksums(stored[0]) == manifest.state_checksums:
                    self._step, self._chain, self._policy = manifest.step, manifest.chain, stored[0]
                    return tuple(skipped)
            skipped.append(f"{path} is damaged")
            if path.exists():
                self._fence()
                checkpoints.set_aside(path, why="damaged")
        if not self._order.may_start_over:
            raise ConfigError(f"no checkpoint can be loaded: {'; '.join(skipped)}")
        self._step, self._chain = 0, self._order.chain
        self._policy = (Path(self._order.model_path) / POLICY).read_text()
        return tuple(skipped)
