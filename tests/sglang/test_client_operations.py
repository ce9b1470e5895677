"""No sequence of calls that our client can make kills a server or leaves it unable to serve: a machine makes them.

Every rule is one operation of `EngineClient` (or a push, a probe, a dropped connection) on one server, whatever its
state: paused, full, empty, in the middle of an update that was given up. Refusals and time-outs are fine; after each
step the server must live, and at the end of each example a fresh answer must come from the weights it says it holds.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from dora.core.strategies import Pause
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.probe import probe
from dora.engine.sglang.push import push
from dora.engine.sglang.target import PushTarget
from dora.errors import ConfigError, RemoteError
from tests.embedded.conftest import CONTEXT, VOCAB, Reference
from tests.sglang.conftest import PROMPT, QUEUE, SETTLE_S, SLOTS, Server, Tokens, request

pytestmark = pytest.mark.timeout(300, func_only=True)  # about 2 minutes on the real server

Result = TypeVar("Result")
Model = Literal["a", "b"]
MODELS = st.sampled_from(get_args(Model))

SHORT_S = 0.5  # for what may have to wait: an unpaused update of a busy server, a probe of a paused one
#: Requests that make no sense: refused here if they would kill a server, there otherwise.
NONSENSE: dict[str, dict[str, Any]] = {
    "an id beyond the vocabulary": {"tokens": [VOCAB]},
    "a negative id": {"tokens": [-1]},
    "no input": {"tokens": []},
    "too long an input": {"tokens": [5] * CONTEXT},
    "no budget": {"max_new_tokens": 0},
    "a negative temperature": {"temperature": -1.0},
    "an empty nucleus": {"top_p": 0.0},
    "no candidates": {"top_k": 0},
}
STEPS = 25
EXAMPLES = {"embedded": 12, "sglang": 16}


class Operations(RuleBasedStateMachine):
    """The client's own calls in any order. Labels name the model whose weights they stand for: `a/7`."""

    server: Server
    folders: dict[Model, Path]
    references: dict[Model, Reference]
    failure: str | None = None  # the first

    def __init__(self) -> None:
        super().__init__()
        self._url = self.server.url
        self._runner = asyncio.Runner()
        self._calls: dict[str, asyncio.Task[object]] = {}
        self._story: list[str] = []
        self._count = 0
        self._client: EngineClient

    @initialize()
    def connect(self) -> None:
        async def make() -> EngineClient:
            return EngineClient(max_connections=64, vocab_size=VOCAB, control_timeout_s=5.0)

        self._client = self._runner.run(make())

    # --- requests. What is drawn never depends on what the server did: hypothesis must be able to draw it again

    @rule(endless=st.booleans(), wait=st.booleans())
    def start(self, endless: bool, wait: bool) -> None:
        """A call in the background; with `wait`, until its first tokens came or it is clear that none come yet."""
        if len(self._calls) < SLOTS + QUEUE + 2:
            self._do("start endless" if endless else "start", self._begin(endless=endless, wait=wait))

    @rule(which=st.integers(0, SLOTS + QUEUE), how=st.sampled_from(["abort", "drop", "start again"]))
    def disturb(self, which: int, how: str) -> None:
        """One of the calls that are believed to be live, or an unknown one."""
        rid = [*self._calls, "nobody-0"][which % (len(self._calls) + 1)]
        match how:
            case "abort":
                self._do(f"abort {rid}", self._client.abort(self._url, rid))
            case "drop":
                self._do(f"drop {rid}", self._drop(rid))
            case _:
                again = self._client.generate(self._url, request(rid), Tokens())
                self._do(f"start {rid} again", asyncio.wait_for(again, SHORT_S))

    # --- control

    @rule(what=st.sampled_from([*get_args(Pause), "resume", "flush"]))
    def hold(self, what: Any) -> None:
        match what:
            case "resume":
                self._do(what, self._client.resume(self._url))
            case "flush":
                self._do(what, self._client.flush_cache(self._url))
            case mode:
                self._do(f"pause {mode}", self._client.pause(self._url, mode))

    @rule(model=MODELS, how=st.sampled_from(["update", "update", "update from nowhere", "push"]))
    def weights(self, model: Model, how: str) -> None:
        """Update the weights, whatever the server is doing. If it is unpaused and busy, the client gives the update up,
        and the server carries it out when it can."""
        client, url, folder = self._client, self._url, self.folders[model]
        self._count += 1
        label = f"{model}/{self._count}"
        if how == "push":
            order = push(PushTarget(client, url), folder=folder, label=label, timeout_s=5.0)
        else:
            path = folder if how == "update" else folder / "nowhere"
            order = client.update_weights_from_disk(url, str(path), label, timeout_s=SHORT_S)
        self._do(f"{how} {label}", order)

    @rule(what=st.sampled_from(["loads", "weight_version", "server_info", "health", "probe", *NONSENSE]))
    def ask(self, what: str) -> None:
        client, url = self._client, self._url
        if what == "health":
            self._do(what, client.health(url, timeout_s=SHORT_S))
        elif what == "probe":
            self._do(what, probe(client, url, timeout_s=SHORT_S))
        elif what in NONSENSE:
            nonsense = replace(request("nonsense"), **NONSENSE[what])
            self._do(what, asyncio.wait_for(client.generate(url, nonsense, Tokens()), SHORT_S))
        else:
            self._do(what, getattr(client, what)(url))

    # --- what must hold

    @invariant()
    def the_server_lives(self) -> None:
        if not self._story:
            return
        try:
            self._runner.run(self._client.loads(self._url))
        except RemoteError as err:
            self._fail(str(err))
        if not (self.server.main_process().is_running() and self.server.model_process().is_running()):
            self._fail("a process of the server is gone")

    def teardown(self) -> None:
        try:
            if self._story and self.failure is None:
                self._runner.run(self._settle())
                self._runner.run(self._check_a_fresh_answer())
        except (RemoteError, TimeoutError) as err:
            self._fail(f"it did not come back to serving: {err!r}")
        finally:
            self._runner.run(self._client.close())
            self._runner.close()

    async def _check_a_fresh_answer(self) -> None:
        """A new answer must come from a single version, the one that the server reports, and from its weights. While an
        update that was given up may still take effect, the next answer decides."""
        label, result, tokens = "", None, Tokens()
        async with asyncio.timeout(SETTLE_S):
            while result is None or not (result.spans == ((label, 0, result.num_tokens),) and await self._holds(label)):
                self._count += 1
                label, tokens = await self._client.weight_version(self._url), Tokens()
                fresh = replace(request(f"fresh-{id(self):x}-{self._count:04}"), label=label)
                result = await self._client.generate(self._url, fresh, tokens)
        reference = self.references["b" if label.startswith("b/") else "a"]
        if tokens.logprobs != pytest.approx(reference.logprobs(PROMPT + tokens.token_ids)[len(PROMPT) - 1 :], abs=1e-3):
            self._fail(f"a fresh answer under '{label}' is not of its weights")

    async def _holds(self, label: str) -> bool:
        return await self._client.weight_version(self._url) == label

    def _fail(self, what: str) -> None:
        """Keep the failure for the test: hypothesis would call a server again that may be gone for good, and report
        that."""
        failure = self.failure or f"after {', '.join(self._story)}: {what}"
        type(self).failure = failure
        pytest.fail(failure)

    # --- helpers

    def _do(self, what: str, call: Coroutine[Any, Any, object]) -> None:
        """Do one operation; a refusal, a time-out or giving up counts as an answer."""
        self._story.append(what)
        try:
            self._runner.run(call)
        except (RemoteError, ConfigError, TimeoutError) as err:
            self._story[-1] += f" [{type(err).__name__}]"
        self._calls = {rid: task for rid, task in self._calls.items() if not task.done()}

    async def _begin(self, *, endless: bool, wait: bool) -> None:
        self._count += 1
        rid, tokens = f"machine-{id(self):x}-{self._count:04}", Tokens()
        call = self._client.generate(self._url, request(rid, endless=endless), tokens)
        self._calls[rid] = asyncio.create_task(_outcome(call), name=rid)
        if wait:
            async with asyncio.timeout(SHORT_S):
                await tokens.until(1)

    async def _drop(self, rid: str) -> None:
        if rid in self._calls:
            self._calls[rid].cancel()
            await asyncio.wait({self._calls[rid]})

    async def _settle(self) -> None:
        """Make the server empty and unpaused, by the client's own means. An update that was given up may still take
        effect."""
        for rid, task in self._calls.items():
            await self._client.abort(self._url, rid)
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls.values())
        async with asyncio.timeout(SETTLE_S):
            await self._client.resume(self._url)
            while not await self._client.flush_cache(self._url):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.02)


async def _outcome(call: Coroutine[Any, Any, object]) -> object:
    """A stream may break off, be refused or be aborted; the server may be well nevertheless."""
    try:
        return await call
    except RemoteError as err:
        return err


@pytest.mark.deep
def test_no_sequence_of_our_calls_kills_a_server(
    server: Server,
    model_a: Path,
    model_b: Path,
    reference_a: Reference,
    reference_b: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dora.engine.sglang.push.DRAIN_TIMEOUT_S", SHORT_S)

    class OnThisServer(Operations):
        pass

    OnThisServer.server = server
    OnThisServer.folders = {"a": model_a, "b": model_b}
    OnThisServer.references = {"a": reference_a, "b": reference_b}
    try:
        run_state_machine_as_test(
            OnThisServer,
            settings=settings(
                max_examples=EXAMPLES[server.kind],
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        assert OnThisServer.failure is None, OnThisServer.failure


def test_the_client_cannot_say_what_would_end_requests_or_flush_under_them() -> None:
    """SGLang's defaults: a pause in mode abort, an update that flushes (which kills it), a relabel that aborts."""
    assert set(get_args(Pause)) == {"in_place", "retract"}
    taken = {
        name: set(inspect.signature(call).parameters) for name, call in vars(EngineClient).items() if callable(call)
    }
    assert taken["pause"] == {"self", "url", "mode"}
    assert taken["abort"] == {"self", "url", "rid"}
    assert taken["update_weights_from_disk"] == {"self", "url", "folder", "label", "timeout_s"}
