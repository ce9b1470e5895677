from __future__ import annotations

from pathlib import Path

import pytest

from dora.tasks.tokenizer import Tokenizer
from tests.environments.tokenizers_of_families import family_tokenizer


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return family_tokenizer(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def module(tmp_path: Path):
    """Return a writer of a Python file, which returns the path."""

    def write(source: str) -> str:
        path = tmp_path / "own_renderer.py"
        path.write_text(source)
        return str(path)

    return write
