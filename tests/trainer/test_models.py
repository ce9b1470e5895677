"""Ten families of docs/MODELS.md, measured again, and the document itself; `python -m tests.models` measures all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.families import FAMILIES
from tests.models import DOCUMENT, examine

#: Dense, capped, with sinks, LongRoPE, experts in both styles, latent attention, and four kinds of layers with state.
MEASURED = (
    "qwen3", "gemma2", "gpt_oss", "phi3", "mixtral", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "lfm2",
    "granitemoehybrid",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _single_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def rows() -> dict[str, list[str]]:
    """The cells of each family's row in the document."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ") and "verdict" not in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {family: others for family, *others in cells}


def test_the_document_has_every_family_and_none_is_silently_wrong() -> None:
    found = rows()
    assert found.keys() == FAMILIES.keys()
    assert {cells[-1] for cells in found.values() if cells[0] != "refused"} == {"trained"}


@pytest.mark.parametrize("family", MEASURED)
def test_a_family_is_exact_and_trained_as_the_document_says(family: str) -> None:
    verdict = examine(family)
    assert verdict.problem == ""
    assert verdict.is_right, verdict.line()
    assert verdict.rows == rows()[family][0]
