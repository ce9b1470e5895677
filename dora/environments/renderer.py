"""Conversations as tokens: the first prompt, the parse of a sampled turn, and the tokens that continue after it.

Invariant: sampled tokens are never made from text again. `bridge` returns only what must follow them, so that the next
request's tokens extend the sampled ones exactly.

The families are those of the package `renderers` (github.com/PrimeIntellect-ai/renderers), which imports neither torch
nor transformers. It is imported when a renderer is opened, because it takes about a second (the OpenAI client).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from dora.environments import probes
from dora.environments.api import ToolCall, Turn
from dora.environments.shapes import MessageShape, ShapePair, example_of, pairs_of, shapes_of, shortened
from dora.errors import ConfigError, DoraError
from dora.extras import require_extra
from dora.tasks.chat_template import DATE
from dora.tasks.tokenizer import Tokenizer

#: A message as OpenAI's API has it: role, content, and reasoning_content and tool_calls, or tool_call_id and name.
Message = Mapping[str, Any]
#: A tool as OpenAI's API has it: {"type": "function", "function": {"name", "description", "parameters"}}.
Tool = Mapping[str, Any]

_FIELD: Final = "environment.renderer"
#: The family that uses the chat template; it cannot continue turns, because where a turn ends in a template is unknown.
_TEMPLATE: Final = "default"
#: First prompts that are kept: those of the groups that begin at about the same time.
MAX_BEGUN: Final = 64
#: Longer ones are made again, so that they take 16 MiB together.
LONGEST_BEGUN: Final = 1 << 16
#: Exceptions that third-party parsers may raise for text that a policy sampled.
_PARSER_ERRORS: Final = (AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class RenderingFailed(DoraError):
    """An environment's messages cannot be rendered; its episode cannot go on."""


class Renderer:
    """The renderer of one model: `family` is its name, `settings` are those with which the package renderers makes it,
    `stop_ids` are the tokens that end a turn."""

    def __init__(
        self,
        renderer: Any,
        tokenizer: Tokenizer,
        *,
        family: str,
        settings: Mapping[str, Any] | None = None,
        has_template: bool = False,
    ) -> None:
        """`renderer`: follows the protocol `renderers.Renderer`. `has_template`: a chat template must agree."""
        self.family = family
        self.settings = settings or {"name": family}
        self._has_template = has_template
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._known_shapes: set[tuple[bool, ShapePair]] = set()  # with tools or without; rendered as they should be
        self._begun: dict[bytes, array[int]] = {}  # digest of messages and tools -> tokens of a first prompt
        self._own_stops = frozenset(renderer.get_stop_token_ids())
        self.stop_ids = tuple(sorted(self._own_stops | set(tokenizer.eos_ids)))

    def require_known(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens that an environment gives; RenderingFailed if the model does not have them all."""
        if tokens and max(tokens) >= self._tokenizer.vocab_size:
            raise RenderingFailed(
                f"token {max(tokens)} is none of the {self._tokenizer.vocab_size} tokens of the model's tokenizer"
            )
        return [*tokens]

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of a whole conversation, up to the start of the next turn."""
        try:
            told = [*map(self._tokenizer.as_text, messages)]
            ids = self._renderer.render_ids(told, tools=[*tools] or None, add_generation_prompt=True)
        except _PARSER_ERRORS as err:
            raise RenderingFailed(f"renderer {self.family} rejected the messages: {_reason(err)}") from err
        return list(ids)

    def begin(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of a first prompt. RenderingFailed also if the chat template, by which the family was
        recognized, renders them differently: probes cannot cover all messages and tools. It may block for a while.

        Siblings mostly begin with the same messages, so the last MAX_BEGUN prompts are kept.
        """
        key = hashlib.blake2b(msgspec.json.encode([messages, tools]), digest_size=16).digest()
        if (known := self._begun.get(key)) is not None:
            return known.tolist()
        ids = self._begin(messages, tools)
        if len(ids) <= LONGEST_BEGUN:
            if len(self._begun) >= MAX_BEGUN:
                self._begun.pop(next(iter(self._begun)), None)
            self._begun[key] = array("i", ids)
        return ids

    def _begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        self.require_shape(messages, tools=tools)
        ids = self.render(messages, tools=tools)
        if self._has_template and ids != self._by_template(messages, tools):
            raise RenderingFailed(f"renderer {self.family} and the chat template render the messages differently")
        return ids

    def require_shape(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> None:
        """Compare with the chat template by which the family was recognized how conversations of this shape are
        rendered, once for each pair of messages in it. RenderingFailed if they differ, or if a text is left out."""
        self.require_shapes(shapes_of(messages), tools=tools)

    def require_shapes(self, shapes: Sequence[MessageShape], *, tools: Sequence[Tool] = ()) -> None:
        """As `require_shape`, with the shape of each message."""
        shapes = shortened(shapes)
        pairs = [(bool(tools), pair) for pair in pairs_of(shapes)]
        if self._known_shapes.issuperset(pairs):
            return
        example = example_of(shapes, tool=_name_of(tools[0]) if tools else "look_up")
        ids = self.render(example, tools=tools)
        # Without thinking, families keep marks that a template drops from earlier turns.
        is_compared = self._has_template and self._tokenizer.thinking is None
        if is_compared and ids != self._by_template(example, tools):
            told = ", ".join(map(str, shapes))
            raise RenderingFailed(f"renderer {self.family} and the chat template render differently: {told}")
        for pair in {*pairs} - self._known_shapes:
            shape = pair[1][1]
            if shape.has_text and not self._owns(pairs.index(pair), example, tools):
                raise RenderingFailed(f"renderer {self.family} leaves out the text of {shape}")
        self._known_shapes.update(pairs)

    def _owns(self, number: int, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Return whether the text of a message makes a difference to the tokens."""
        without = [*messages]
        without[number] = {**messages[number], "content": ""}
        try:
            return self.render(without, tools=tools) != self.render(messages, tools=tools)
        except RenderingFailed:
            return True

    def _by_template(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        try:
            return _by_template(self._tokenizer, messages, tools)
        except ConfigError as err:
            raise RenderingFailed(str(err)) from err

    def bridge(
        self, prompt: Sequence[int], sampled: Sequence[int], messages: Sequence[Message], *, tools: Sequence[Tool] = ()
    ) -> list[int] | None:
        """Return the tokens to append to `prompt` and `sampled`, up to the start of the next turn.

        `prompt` is everything before the sampled turn, `messages` what follows it. None: the family cannot continue
        these tokens exactly, as when the turn ended within its reasoning, or `messages` has another turn.
        """
        before, turn = [*prompt, *sampled], len(prompt)  # numbers are made once: there may be 100,000
        try:
            told = [*map(self._tokenizer.as_text, messages)]
            bridged = self._renderer.bridge_to_next_turn(before[:turn], before[turn:], told, tools=[*tools] or None)
        except _PARSER_ERRORS as err:
            raise RenderingFailed(f"renderer {self.family} rejected the messages: {_reason(err)}") from err
        if bridged is None or len(bridged.token_ids) <= len(before) or bridged.token_ids[: len(before)] != before:
            return None
        return list(bridged.token_ids[len(before) :])

    def parse(
        self,
        sampled: Sequence[int],
        *,
        prompt: Sequence[int],
        tools: Sequence[Tool] = (),
        finish: Literal["stop", "length"] = "stop",
        first_call: int = 0,
    ) -> Turn:
        """Parse any sampled turn. Text that looks like a call but is not a valid one gets `arguments` None.

        `prompt` is what the turn was sampled after, since it may have opened the reasoning. `first_call` numbers the
        calls of an episode, unless the family writes ids of its own.
        """
        ids = [*sampled]
        if ids and ids[-1] in self.stop_ids and ids[-1] not in self._own_stops:
            ids.pop()
        try:
            parsed = self._renderer.parse_response(ids, tools=[*tools] or None, prompt_ids=[*prompt])
        except _PARSER_ERRORS:
            text = self._tokenizer.decode(ids)
            return Turn(text, "", (ToolCall(f"call_{first_call}", "", None, text),), finish)
        calls = tuple(_call(call, number) for number, call in enumerate(parsed.tool_calls, first_call))
        return Turn(parsed.content, parsed.reasoning_content or "", calls, finish)


def open_renderer(tokenizer: Tokenizer, *, settings: Mapping[str, Any] | None = None) -> Renderer:
    """Return the renderer of a model folder, chosen by its chat template or by `settings`.

    `settings` has the terms of the package renderers: `name` is a family, "auto" (the family that renders what the chat
    template renders) or "custom" with `import_path`; the rest are the options of the family. Nothing is downloaded. A
    family that cannot continue a conversation after its sampled tokens is refused by a ConfigError.
    """
    require_extra("renderers", field="environment.name")
    options = dict(settings or {})
    family = options.pop("name", "auto")
    if family == "auto":
        return _recognize(tokenizer, options)
    if family == _TEMPLATE:
        raise ConfigError(_refusal("the chat template", tokenizer))
    found = _open(family, tokenizer, options)
    if not _bridges(found):
        raise ConfigError(_refusal(f"renderer {found.family}", tokenizer))
    return found


def families() -> list[str]:
    """Return the names of all families; `gpt-oss` needs its vocabulary file (TIKTOKEN_ENCODINGS_BASE)."""
    from renderers import RendererConfig

    variants = get_args(get_args(RendererConfig)[0])
    return sorted({variant.model_fields["name"].default for variant in variants} - {"auto", "custom", _TEMPLATE})


class _Candidate(NamedTuple):
    """A family that fits the tokenizer, with its options."""

    family: str
    options: Mapping[str, Any]
    renderer: Renderer


def _recognize(tokenizer: Tokenizer, options: Mapping[str, Any]) -> Renderer:
    """Return the first family that bridges, and renders all probes as the chat template does.

    With `model.thinking` only first prompts are compared: without thinking, families keep marks that a template drops.
    """
    if not tokenizer.has_chat_template:
        raise ConfigError(
            f"model.path: {tokenizer.folder} has no chat template, which episodes of several turns need; use a "
            "model that has one ('seed-tools' is a small one), or name its family in environment.renderer"
        )
    plain = replace(tokenizer, thinking=None)
    left = [*_candidates(plain, options)]
    for name in probes.PROBES:
        left = _equal(left, plain, name)
    left = [candidate for candidate in left if _bridges(candidate.renderer)]
    if not left:
        raise ConfigError(_refusal("the chat template", tokenizer))
    chosen = left[0]._replace(renderer=_open(left[0].family, tokenizer, left[0].options, has_template=True))
    for name in probes.FIRST_PROMPTS:
        _equal([chosen], tokenizer, name)
    return chosen.renderer


def _candidates(tokenizer: Tokenizer, options: Mapping[str, Any]) -> Iterator[_Candidate]:
    for family, switch in itertools.product(families(), ({}, {"enable_thinking": False})):
        with suppress(ConfigError):
            yield _Candidate(family, {**switch, **options}, _open(family, tokenizer, {**switch, **options}))


def _equal(candidates: Sequence[_Candidate], tokenizer: Tokenizer, name: str) -> list[_Candidate]:
    """Return the candidates that render (or reject) a probe as the chat template does; ConfigError if there is none."""
    probe, wanted = probes.PROBES[name], None
    try:
        wanted = _by_template(tokenizer, probe.messages, probe.tools)
    except ConfigError as err:
        if name in probes.REQUIRED:
            raise ConfigError(_refusal("the chat template", tokenizer, why=str(err))) from err
    equal = [candidate for candidate in candidates if _by_family(candidate.renderer, probe) == wanted]
    if not equal:
        why = f"{candidates[0].family} renders {name} differently" if candidates else "no family has its tokens"
        raise ConfigError(_refusal("the chat template", tokenizer, why=why))
    return equal


def _by_family(renderer: Renderer, probe: probes.ProbeConversation) -> list[int] | None:
    try:
        return renderer.render(probe.messages, tools=probe.tools)
    except RenderingFailed:
        return None


def _by_template(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat(messages, tools=tools), special_tokens=False)


def _bridges(renderer: Renderer) -> bool:
    """Return whether a result can follow a call as the family writes it, or at least a text that was cut off."""
    start, result = probes.START, probes.RESULT
    prompt = renderer.render(start.messages, tools=start.tools)
    whole = renderer._renderer.render_ids([*probes.CALL.messages], tools=[*start.tools])
    same = next((index for index, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    stop = next((index for index, token in enumerate(whole) if index > same and token in renderer.stop_ids), len(whole))
    turns = (whole[same : stop + 1], renderer._tokenizer.encode("k", special_tokens=False))
    return any(renderer.bridge(prompt, turn, result, tools=start.tools) is not None for turn in turns)


def _open(family: str, tokenizer: Tokenizer, options: Mapping[str, Any], *, has_template: bool = False) -> Renderer:
    from renderers import config_from_name, create_renderer
    from renderers.configs import CustomRendererConfig

    if family == "gpt-oss" and "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
        raise ConfigError(
            f"{_FIELD}: gpt-oss would download its vocabulary; put o200k_base.tiktoken into a folder and set the "
            "environment variable TIKTOKEN_ENCODINGS_BASE to it"
        )
    try:
        schema = CustomRendererConfig if family == "custom" else type(config_from_name(family))
    except ValueError as err:
        raise ConfigError(f"{_FIELD}.name: no family '{family}'; choose one of {', '.join(families())}") from err
    try:
        config = _config(schema, {"name": family, **options}, tokenizer)
        found = create_renderer(_ForRenderers(tokenizer), config)
        return Renderer(
            found,
            tokenizer,
            family=options.get("import_path", family),
            settings=config.model_dump(mode="json"),
            has_template=has_template,
        )
    except Exception as err:  # custom renderers may raise anything
        raise ConfigError(
            f"{_FIELD}: '{family}' does not fit the tokenizer of {tokenizer.folder} or its settings ({_reason(err)})"
        ) from err


def _config(schema: Any, options: dict[str, Any], tokenizer: Tokenizer) -> Any:
    """Return the family's settings. Reasoning is kept unless the options say otherwise: dropping it forks."""
    if tokenizer.thinking is not None and "enable_thinking" in schema.template_field_names():
        options = {**options, "enable_thinking": tokenizer.thinking}
    if "conversation_start_date" in schema.template_field_names():  # otherwise today
        options = {"conversation_start_date": f"{DATE:%Y-%m-%d}", **options}
    try:
        return schema.model_validate({"thinking_retention": "all", **options})
    except ValueError:
        return schema.model_validate(options)  # an option of the user says that reasoning is dropped


def _name_of(tool: Tool) -> str:
    return str(tool.get("function", tool).get("name", "look_up"))


def _call(parsed: Any, number: int) -> ToolCall:
    """Return a call; its arguments are None unless it has a name and arguments that JSON can hold."""
    name, arguments = parsed.name, parsed.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    named = isinstance(name, str) and name != "" and _is_json(name)
    valid = named and parsed.status in ("ok", "unknown_tool") and isinstance(arguments, dict) and _is_json(arguments)
    return ToolCall(parsed.id or f"call_{number}", name if named else "", arguments if valid else None, parsed.raw)


def _is_json(value: object) -> bool:
    """Python's decoder also accepts NaN and lone surrogates, which JSON does not have."""
    try:
        return bool(msgspec.json.decode(msgspec.json.encode(value)) == value)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return False


def _refusal(what: str, tokenizer: Tokenizer, *, why: str = "") -> str:
    reason = why and f" ({why})"
    return (
        f"{_FIELD}: {what} of {tokenizer.folder} cannot continue a conversation after its sampled tokens, as several "
        f"turns must{reason}; name the model's family if it has one ({', '.join(families())}), or a renderer of your "
        'own: { name = "custom", import_path = "file.py:Class" }'
    )


def _reason(err: Exception) -> str:
    return f"{type(err).__name__}: {err}"


class _ForRenderers:
    """A tokenizer with the methods that the package renderers calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = str(tokenizer.folder)
        self.unk_token_id = None  # `convert_tokens_to_ids` returns None for an unknown token
        self.eos_token_id = next(iter(tokenizer.eos_ids), None)

    def encode(self, text: str, **_: object) -> list[int]:
        return self._tokenizer.encode(text, special_tokens=False)

    def decode(self, ids: int | Sequence[int], **_: object) -> str:
        return self._tokenizer.decode([ids] if isinstance(ids, int) else ids, special_tokens=True)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._tokenizer.token_id(token)
