"""Conversion between text and token ids for a Hugging Face model folder, without transformers.

Transformers' tokenizers import torch (1.6-4 s, several hundred MB), which the controller does not need. So
`tokenizer.json` is read by the `tokenizers` package, which transformers uses as well, and the chat template is rendered
by jinja2 in the same sandbox and with the same settings (chat_template.py). tests/tasks/test_tokenizer.py compares both
with transformers.

Messages come from data, tools and agents. Text of a message that spells a control token of the model (`<|im_end|>`) is
never encoded as that token; otherwise a message could end itself and begin another one as the user or the policy.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers

from dora import foreign
from dora.errors import ConfigError
from dora.tasks.chat_template import ChatTemplate

Message = Mapping[str, Any]

#: The longest templates of models have 20 kB.
_MAX_TEMPLATE_BYTES: Final = 1 << 20
#: Around text that spells a control token; it survives templates. In messages it becomes U+FFFD.
_SPELLED: Final = "\U0010fffd"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class _Merging(msgspec.Struct):
    """What tokenizer.json says of merges; each is a pair, or, as older versions wrote it, both with a space between."""

    continuing_subword_prefix: str | None = None
    merges: list[str | tuple[str, str]] = []


class _File(msgspec.Struct):
    model: _Merging


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """One model folder's tokenizer; `thinking` is the chat template's switch (None leaves it to the template)."""

    folder: Path
    eos_ids: tuple[int, ...]  # every id that may end an answer
    thinking: bool | None
    _codec: tokenizers.Tokenizer
    _template: ChatTemplate | None  # None: the folder has no chat template
    _special_tokens: Mapping[str, str]
    _plain: _Plain

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer can produce; a model's embedding may be padded beyond it."""
        size: int = self._codec.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. `special_tokens`: add the tokenizer's special tokens (BOS); rendered chats already
        contain them. ConfigError if the tokenizer of the folder cannot encode it."""
        if _SPELLED in text:
            return self._encode_spelled(text)
        with self._named("encode a text"):
            ids: list[int] = self._codec.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def _encode_spelled(self, text: str) -> list[int]:
        """Return the ids of a rendered chat, in which every other part spells a control token."""
        ids: list[int] = []
        with self._named("encode a text"):
            for number, part in enumerate(text.split(_SPELLED)):
                ids += self._plain.encode(part) if number % 2 else self.encode(part, special_tokens=False)
        return ids

    def as_text(self, message: Message) -> Message:
        """Return a message whose text `encode` turns into ordinary tokens alone."""
        kept = {**message}
        for name in ("content", "reasoning_content"):
            if isinstance(text := message.get(name), str):
                with self._named("normalize a text"):
                    kept[name] = self._plain.mark(text)
        return kept

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of `ids`; rewards receive it without special tokens. ConfigError if the tokenizer of the
        folder cannot decode them."""
        with self._named("decode an answer"):
            text: str = self._codec.decode(list(ids), skip_special_tokens=not special_tokens)
        return text

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        with _of_file(self.folder / "tokenizer.json", f"cannot {what}"):
            yield

    def token_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary."""
        found: int | None = self._codec.token_to_id(token)
        return found

    def render_chat(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render the conversation with the chat template, up to the start of the answer."""
        if self._template is None:
            raise ConfigError(f"model.path: {self.folder} has no chat template; add one")
        switch = {} if self.thinking is None else {"enable_thinking": self.thinking}
        return self._template.render(
            messages=[*map(self.as_text, messages)],
            tools=[*tools] or None,
            add_generation_prompt=True,
            **self._special_tokens,
            **switch,
        )


class _Plain:
    """The same tokenizer without control tokens; made when it is first needed, as it takes half a second."""

    def __init__(self, codec: tokenizers.Tokenizer) -> None:
        special = {token.content for token in codec.get_added_tokens_decoder().values() if token.special}
        if codec.normalizer is not None:
            special |= {codec.normalizer.normalize_str(word) for word in special}
        words = [re.escape(word) for word in sorted(special, key=len, reverse=True) if word]
        self._spelled = re.compile("|".join(words)) if words else None
        self._codec = codec
        self._made: tokenizers.Tokenizer | None = None

    def mark(self, text: str) -> str:
        """Return text in which all that spells a control token is marked: the whole, if the tokenizer's normalizer
        makes one of other characters."""
        text = text.replace(_SPELLED, "\ufffd")
        if self._spelled is None:
            return text
        normalizer = self._codec.normalizer
        if normalizer is not None:
            normal = normalizer.normalize_str(text)
            if len(self._spelled.findall(normal)) > len(self._spelled.findall(text)):
                return f"{_SPELLED}{text}{_SPELLED}"
        return self._spelled.sub(rf"{_SPELLED}\g<0>{_SPELLED}", text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of text that spells control tokens, none of which is among them."""
        if self._made is None:
            made = tokenizers.Tokenizer.from_str(self._codec.to_str())
            made.encode_special_tokens = True
            self._made = made
        ids: list[int] = self._made.encode(text, add_special_tokens=False).ids
        return ids


def unmarked(text: str) -> str:
    """Return a rendered chat as people read it."""
    return text.replace(_SPELLED, "")


def load_tokenizer(folder: Path, *, thinking: bool | None = None) -> Tokenizer:
    """Return the tokenizer of a model folder; `ConfigError` names what the folder lacks."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"model.path: {folder} has no tokenizer.json; write one with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    with _of_file(file, "is not a tokenizer"):
        _require_whole_characters(file)
        codec = tokenizers.Tokenizer.from_file(str(file))
        codec.no_truncation()
        codec.no_padding()
        plain = _Plain(codec)
    settings = _read_json(folder / "tokenizer_config.json")
    source, file = _template_source(folder, settings)
    if thinking is not None and "enable_thinking" not in source:
        raise ConfigError(f"model.thinking: the chat template of {folder} has no enable_thinking switch; unset it")
    special = _special_tokens(settings)
    return Tokenizer(
        folder=folder,
        eos_ids=_eos_ids(folder, codec, special),
        thinking=thinking,
        _codec=codec,
        _template=ChatTemplate(source, file) if source else None,
        _special_tokens=special,
        _plain=plain,
    )


def _require_whole_characters(file: Path) -> None:
    """Raise UnicodeDecodeError if a merge removes the prefix from a part of which it cuts a character: `tokenizers`
    0.23 aborts the process then, where it cannot say which token is missing."""
    try:
        merging = msgspec.json.decode(file.read_bytes(), type=_File).model
    except msgspec.MsgspecError:
        return  # not a file with merges, or `tokenizers` says what is wrong
    if prefix := (merging.continuing_subword_prefix or "").encode():
        for merge in merging.merges:
            second = merge[1] if isinstance(merge, tuple) else merge.partition(" ")[2]
            second.encode()[len(prefix) :].decode()


@contextmanager
def _of_file(file: Path, what: str) -> Iterator[None]:
    """Turn an error of the package `tokenizers` into a ConfigError. Most are bare Exceptions; a panic of its Rust side,
    which files of others can cause, is not even one."""
    try:
        yield
    except (ConfigError, TypeError):  # TypeError: what was to be encoded is no text
        raise
    except BaseException as err:
        if not isinstance(err, Exception) and type(err).__name__ != "PanicException":
            raise
        raise ConfigError(f"model.path: {file} {what} ({err}); replace it") from err


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"model.path: {path} is not JSON ({err})") from err
    if not isinstance(content, dict):
        raise ConfigError(f"model.path: {path} must contain a JSON object")
    return content


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by role; the file has strings or, if written by older versions, {"content": ...}."""
    entries = {role: settings.get(role) for role in _SPECIAL_TOKENS}
    texts = {role: entry.get("content") if isinstance(entry, dict) else entry for role, entry in entries.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _eos_ids(folder: Path, codec: tokenizers.Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    """Return the end tokens that the three files name, as inference servers do, in order of first mention."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(id) is int and abs(id) < 2**31 for id in listed):
            raise ConfigError(
                f"model.path: eos_token_id in {folder / name} is not a token id, or a list of them; correct it"
            )
        found += listed
    eos = codec.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return tuple(dict.fromkeys([*found, *([] if eos is None else [eos])]))


def _template_source(folder: Path, settings: Mapping[str, Any]) -> tuple[str, Path]:
    """Return the folder's chat template, "" if there is none, and its file. A separate file of the template takes
    precedence over tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):
        try:
            return foreign.read(file, max_bytes=_MAX_TEMPLATE_BYTES, follow_links=True).decode(), file
        except (OSError, UnicodeDecodeError, foreign.ForeignFileError) as err:
            raise ConfigError(f"model.path: the chat template {file} cannot be read ({err}); replace it") from err
    file = folder / "chat_template.json"
    found = _read_json(file).get("chat_template")
    if found is None:
        file, found = folder / "tokenizer_config.json", settings.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}.get("default")
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"model.path: chat_template in {file} must be text, or a list of named texts; correct it")
    return found or "", file
