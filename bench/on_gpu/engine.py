"""The embedded engine with families of experts and hybrids: log-probs beside plain transformers, on the CPU.

Requests of several lengths join, decode and leave at random, as in tests/embedded/test_families.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from result import Row

from dora.embedded.decoder import CausalDecoder
from dora.errors import ConfigError
from on_gpu.cases import Case, Place
from tests.embedded.conftest import Reference
from tests.embedded.rows import CLOSE, churn
from tests.embedded.test_families import SERVED, VOCAB
from tests.families import make_model

TURNS = 40


def cases(part: str, *, tiny: bool) -> list[Case]:
    return [Case("the embedded engine", partial(serve, SERVED[:2] if tiny else SERVED), limit_s=280.0)]


def serve(families: list[str], place: Place) -> Iterator[Row]:
    for family in families:
        folder, what = place.folder / family, f"{family}: largest difference of a log-prob"
        make_model(family).save_pretrained(folder)
        try:
            decoder = CausalDecoder(folder, slots=8, kv_tokens=4096, device=place.device, dtype="float32", threads=1)
        except ConfigError as err:
            yield Row(what, None, against=str(err))
            continue
        reference, room = Reference(folder), decoder.context_tokens - 1
        rows = churn(decoder, random.Random(0), lengths=[1, 2, 5, room // 3], turns=TURNS, vocab=VOCAB, room=room)
        largest = 0.0
        for row in rows:
            prompt, temperature = list(row.joiner.token_ids), row.joiner.temperature or 1.0
            expected = reference.logprobs(prompt + row.output_ids, temperature=temperature)[len(prompt) - 1 :]
            largest = max([largest, *(abs(x - y) for x, y in zip(row.logprobs, expected, strict=True))])
        yield Row(what, largest, "", f"{sum(len(row.output_ids) for row in rows)} tokens", bar=f"figure <= {CLOSE}")
