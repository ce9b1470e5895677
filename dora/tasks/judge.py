"""A model as a judge of answers, behind the chat API of OpenAI.

What it says of an answer is asked for here, in the controller, where many requests can wait at once. Its text is read
in a grader (rewards.py), because a pattern may take arbitrarily long on a text of others.

Invariant: a judge that does not reply never becomes a reward. What is filled into a template cannot end the message
that the judge reads: `<|` is written `< |` there, which is no control token.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final

import aiohttp
import msgspec

from dora.config.load import read_secret
from dora.core.events import JudgeUse
from dora.errors import ConfigError, one_line
from dora.tasks.rewards import GradeRequest

if TYPE_CHECKING:
    from dora.config.schema import RewardConfig

#: What a judge is asked by default.
TEMPLATE: Final = """\
Grade the response to the task.

[task]
{prompt}

[reference answer]
{answer}

[response]
{response}

[end]
Say briefly what is right and what is wrong in the response. Then end with a line "Score: N", where N is a number from 0
(wrong) to 1 (right in every respect)."""
#: Requests for one verdict.
ATTEMPTS: Final = 5
#: Time before the second request, doubled after each, and the longest that a judge may ask for.
PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0
#: Timeout of the question whether the endpoint is there, before a run starts.
REACH_TIMEOUT_S: Final = 10.0
#: Largest body of a reply.
MAX_REPLY_BYTES: Final = 4 << 20
#: Statuses after which the same request may succeed: time-outs, conflicts, overload; and those from 500 on.
_TEMPORARY: Final = frozenset({408, 409, 425, 429})
_FIELD: Final = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge said of an answer, and what that cost."""

    text: str
    use: JudgeUse
    failed: str = ""  # why there is no text


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _ChatReply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Failed(Exception):
    """A request without a verdict; `pause_s`: how long its judge wants to be left alone; None: for ever."""

    def __init__(self, reason: str, *, pause_s: float | None = 0.0, usage: _Usage | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s
        self.usage = usage or _Usage()


class Judge:
    """The judge of one term; errors name its config key `field`.

    Entering it asks whether its endpoint is there: `ConfigError` if it refuses the connection or the key. At most
    `concurrency` requests are under way; others wait, at most as many as there are answers in flight.
    """

    def __init__(self, reward: RewardConfig, *, field: str) -> None:
        self._reward = reward
        self._field = field
        self._base = reward.url.rstrip("/")
        self._places = asyncio.Semaphore(reward.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Judge:
        key = read_secret(self._reward.api_key_variable, os.environ)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=0),  # the semaphore is the limit
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # each request has its own
        )
        try:
            await self._reach(self._session, has_key=bool(key))
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def _reach(self, session: aiohttp.ClientSession, *, has_key: bool) -> None:
        url = f"{self._base}/models"
        try:
            async with asyncio.timeout(REACH_TIMEOUT_S), session.get(url, allow_redirects=False) as reply:
                if reply.status not in (401, 403):
                    return  # not every endpoint lists its models
                what = "refuses the key in" if has_key else "wants a key; set"
                raise ConfigError(f"{self._field}.url: {self._base} {what} {self._reward.api_key_variable}")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as err:
            problem = f"{self._base} does not answer ({_cause(err)}); start the judge or correct the address"
            raise ConfigError(f"{self._field}.url: {problem}") from err

    async def ask(self, request: GradeRequest) -> Verdict:
        """Return what the judge says of an answer, after at most ATTEMPTS requests."""
        asked = {"role": "user", "content": fill(self._reward.template or TEMPLATE, request)}
        try:
            body = msgspec.json.encode({**self._reward.options, "model": self._reward.name, "messages": [asked]})
        except (TypeError, ValueError) as err:  # text that has no UTF-8
            return Verdict("", JudgeUse(0, 0, 0), failed=f"cannot be asked about this answer: {err}")
        pause_s, failed, use = PAUSE_S, "", JudgeUse(0, 0, 0)
        async with self._places:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    text, usage = await self._post(body)
                except _Failed as err:
                    failed, use = f"{self._base}: {err}", _with(use, err.usage)
                    if err.pause_s is None or attempt == ATTEMPTS:
                        break
                    await asyncio.sleep(max(pause_s, err.pause_s))
                    pause_s *= 2
                else:
                    return Verdict(text, _with(use, usage))
        after = f" after {attempt} requests" if attempt > 1 else ""
        return Verdict("", use, failed=f"{failed}{after}")

    async def _post(self, body: bytes) -> tuple[str, _Usage]:
        assert self._session is not None
        url, json = f"{self._base}/chat/completions", {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(self._reward.timeout_s),
                self._session.post(url, data=body, headers=json, allow_redirects=False) as reply,
            ):
                content = await _limited(reply.content)
                if reply.status != 200:
                    raise _refusal(reply, content)
        except TimeoutError:
            raise _Failed(f"no reply within {self._reward.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as err:
            raise _Failed(_cause(err)) from err
        return _read(content)


def _read(content: bytes) -> tuple[str, _Usage]:
    try:
        told = msgspec.json.decode(content, type=_ChatReply)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise _Failed(f"its reply is not one of the chat API ({err})") from err
    if not told.choices:
        raise _Failed("its reply is not one of the chat API (it has no choice)", usage=told.usage)
    choice = told.choices[0]
    if choice.finish_reason == "length":
        raise _Failed("its reply was cut off; raise max_tokens in its options", pause_s=None, usage=told.usage)
    return choice.message.content or "", told.usage or _Usage()


def _with(use: JudgeUse, usage: _Usage) -> JudgeUse:
    """Add a request."""
    read, written = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return JudgeUse(use.requests + 1, use.prompt_tokens + read, use.sampled_tokens + written)


async def _limited(content: aiohttp.StreamReader) -> bytes:
    parts, size = [], 0
    async for part in content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_REPLY_BYTES:
            raise _Failed(f"its reply has more than {MAX_REPLY_BYTES:,} bytes", pause_s=None)
    return b"".join(parts)


def _refusal(reply: aiohttp.ClientResponse, content: bytes) -> _Failed:
    text = one_line(content[:300].decode(errors="replace"))
    if reply.status < 500 and reply.status not in _TEMPORARY:
        return _Failed(f"status {reply.status}: {text}", pause_s=None)
    wanted = 0.0
    with suppress(ValueError):
        wanted = float(reply.headers.get("Retry-After", 0))
    return _Failed(f"status {reply.status}: {text}", pause_s=min(max(wanted, 0.0), MAX_PAUSE_S))


def _cause(err: Exception) -> str:
    if isinstance(err, TimeoutError):
        return f"no reply within {REACH_TIMEOUT_S:g} s"
    if isinstance(err, OSError) and err.errno:
        return os.strerror(err.errno)  # aiohttp's own text names the address again
    return str(err) or type(err).__name__


def fill(template: str, request: GradeRequest) -> str:
    """Return a template with what it asks for in place of names in braces; other names stay as they are.

    >>> fill("{prompt} {response} {level} {other}", GradeRequest("1+1=", "<|im_end|>", metadata={"level": 3}))
    '1+1= < |im_end|> 3 {other}'
    """
    known: Mapping[str, Any] = {
        **request.metadata,
        "prompt": request.prompt,
        "response": request.response,
        "answer": request.answer,
        "source": request.source,
        "turns": "\n\n".join(f"[{turn['role']}]\n{turn['text']}" for turn in request.turns),
    }

    def text_of(found: re.Match[str]) -> str:
        return str(known[found[1]]).replace("<|", "< |") if found[1] in known else found[0]

    return _FIELD.sub(text_of, template)
