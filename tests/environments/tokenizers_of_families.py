"""Small tokenizers that carry the special tokens of a family of the package `renderers`: byte-level BPE, made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from renderers import base, config_from_name
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dora.environments import renderer
from dora.tasks import tokenizer

#: gpt-oss needs a vocabulary that it would download.
FAMILIES = [family for family in renderer.families() if family != "gpt-oss"]
#: Merges are learned from this, so that text has several tokenizations.
TEXT = ['the look_up name arguments key value \n\n {"name": "k3", "arguments": {"key": 3}} function parameter'] * 9


class _Asked:
    """Answers a renderer's constructor with a token for everything, and notes what was asked."""

    name_or_path, unk_token_id, eos_token_id = "", None, None

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def convert_tokens_to_ids(self, token: str) -> int:
        self.tokens += [] if token in self.tokens else [token]
        return self.tokens.index(token)

    def encode(self, text: str, **_: object) -> list[int]:
        return [self.convert_tokens_to_ids(text)]

    def decode(self, ids: object, **_: object) -> str:
        return ""


def special_tokens(family: str) -> tuple[list[str], str]:
    """Return the tokens that the family's renderer asks for, and one that ends a turn."""
    asked = _Asked()
    base._populate_registry()
    made = base.RENDERER_REGISTRY[family](asked, config_from_name(family))
    return [token for token in asked.tokens if len(token) > 1], asked.tokens[made.get_stop_token_ids()[0]]


def make_folder(folder: Path, special: list[str], *, eos: str, **settings: Any) -> Path:
    """Write a tokenizer with `special` tokens; `settings` go to tokenizer_config.json."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=330, show_progress=False, initial_alphabet=alphabet))
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, **settings}))
    return folder


def family_tokenizer(folder: Path, family: str) -> tokenizer.Tokenizer:
    special, eos = special_tokens(family)
    return tokenizer.load_tokenizer(make_folder(folder / family, special, eos=eos))
