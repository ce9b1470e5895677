"""Replies of hosts, checked: a host is never trusted to follow the protocol.

The protocol is described in docs/ENVIRONMENTS-PROTOCOL.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from dora.environments.api import End, Message, Observation, Reset
from dora.environments.messages import has_named_function
from dora.errors import ProtocolError, one_line
from dora.tasks.rewards import LARGEST_REWARD

#: `raised`: code of the user raised. `timeout`: a call did not return in time. `host`: the host process died, or a
#: server that it uses was lost. `invalid`: the reply, row or turn was not valid. `set_aside`: the row had failed too
#: often. `no_place`: all hosts stayed full. `replay`: a new environment did not repeat what was recorded of the lost
#: one.
Cause = Literal["raised", "timeout", "host", "invalid", "set_aside", "no_place", "replay"]


@dataclass(frozen=True, slots=True)
class EnvironmentFailed:
    """The outcome of a call after which the environment cannot go on; the episode has no reward, not a reward of 0."""

    cause: Cause
    reason: str  # one line: "raised ValueError: no such level (shop.py:12)"


Outcome = Reset | Observation | End | EnvironmentFailed


class Head(msgspec.Struct, frozen=True):
    """What every reply has."""

    id: int
    type: str


class Ready(msgspec.Struct, frozen=True):
    """The reply to `hello`; `reason`, if set, says why the host cannot serve."""

    type: Literal["ready", "refused"]
    protocol: int = 1
    can_replay: bool = False
    gives_rewards: bool = True
    wants_tokens: bool = False
    reason: str = ""


class FailedCall(msgspec.Struct, frozen=True):
    """The reply to a call that failed its episode."""

    cause: Literal["raised", "timeout", "invalid", "host"]
    reason: str
    stuck: bool = False  # a thread is left behind, which cannot be stopped
    loss: int = 0  # of the cause `host`: number of the loss, which may have made other episodes fail, too


#: Most tokens of a conversation.
MAX_TOKENS: Final = 1 << 20
#: Most terms of a reward, most metrics of an episode, and most characters of the name of one.
MAX_TERMS: Final = 64
MAX_TERM_NAME: Final = 200
_KINDS: dict[str, Any] = {"reset": Reset, "observation": Observation, "end": End, "failed": FailedCall}
_ANY = {"system", "user", "assistant", "tool"}


def decode(body: bytes, kind: type[Any]) -> Any:
    """Decode a frame as a `kind`, ignoring fields that the kind does not have; ProtocolError if that fails."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"invalid reply: {err}") from err


def read_reply(body: bytes, *, expected: Sequence[str]) -> Reset | Observation | End | FailedCall:
    """Return the reply to a call; ProtocolError unless its type is `failed` or one of `expected`."""
    kind = decode(body, Head).type
    if kind not in (*expected, "failed"):
        raise ProtocolError(f"invalid reply: the reply is '{kind}', not {' or '.join(expected)}")
    reply: Reset | Observation | End | FailedCall = decode(body, _KINDS[kind])
    if not isinstance(reply, FailedCall):
        roles = _roles(reply)
        _check_tokens(reply, kind=kind)
        if not reply.messages and roles is not None and (isinstance(reply, End) or not reply.tokens):
            raise ProtocolError(f"invalid reply: {kind} without a message")
        for message in reply.messages:
            _check(message, roles=roles)
    if isinstance(reply, Reset) and not all(map(has_named_function, reply.tools)):
        raise ProtocolError("invalid reply: a tool whose function has no name")
    if isinstance(reply, Observation | End) and not abs(reply.reward or 0.0) <= LARGEST_REWARD:
        raise ProtocolError(f"invalid reply: the reward is {reply.reward}, expected a finite number of 32 bits")
    if isinstance(reply, End):
        _check_named(reply.terms, of="term")
        _check_named(reply.metrics, of="metric")
    return reply


def _check_named(values: Mapping[str, float], *, of: str) -> None:
    if len(values) > MAX_TERMS or any(len(name) > MAX_TERM_NAME for name in values):
        raise ProtocolError(
            f"invalid reply: {len(values)} {of}s, expected at most {MAX_TERMS} with names of at most "
            f"{MAX_TERM_NAME} characters"
        )
    for name, value in values.items():
        if not abs(value) <= LARGEST_REWARD:
            raise ProtocolError(f"invalid reply: {of} {name!r} is {value}, expected a finite number of 32 bits")


def _check_tokens(reply: Reset | Observation | End, *, kind: str) -> None:
    tokens = () if isinstance(reply, End) else reply.tokens
    if tokens and reply.messages:
        raise ProtocolError(f"invalid reply: {kind} with messages and tokens; one of them is the conversation")
    if not isinstance(reply, End) and not 0 <= reply.turn_tokens <= MAX_TOKENS:
        raise ProtocolError(f"invalid reply: {kind} with turn_tokens {reply.turn_tokens}, expected 0 to {MAX_TOKENS:,}")
    if len(tokens) > MAX_TOKENS or not all(0 <= token < 2**31 for token in tokens):
        raise ProtocolError(f"invalid reply: {kind} with more than {MAX_TOKENS:,} tokens, or with ids that are none")


def _roles(reply: Reset | Observation | End) -> set[str] | None:
    """Return the roles that messages of a reply may have; None: any role, and the reply may have no message."""
    if isinstance(reply, End):
        return None
    return _ANY if isinstance(reply, Reset) or reply.rewrites else _ANY - {"assistant"}


def _check(message: Message, *, roles: set[str] | None) -> None:
    role = message.get("role")
    if not isinstance(role, str) or (roles is not None and role not in roles):
        raise ProtocolError(
            f"invalid reply: a message of the role {role!r}, not {', '.join(sorted(roles or ['text']))}"
        )
    if not isinstance(message.get("content"), str):
        raise ProtocolError(
            f"invalid reply: the content of a message is {type(message.get('content')).__name__}, not text"
        )
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise ProtocolError("invalid reply: a message of the role 'tool' without its tool_call_id")


def outcome_of(failed: FailedCall) -> EnvironmentFailed:
    prefix = "invalid reply: " if failed.cause == "invalid" else ""
    return EnvironmentFailed(failed.cause, one_line(prefix + failed.reason))
