"""The embedded engine with room for three adapters, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.embedded.adapted import DENSE, RANK

SERVE = """
import sys
from pathlib import Path
from dora.embedded.server import ServeOptions, run_server
run_server(ServeOptions(model_path=Path(sys.argv[1]), slots=8, kv_tokens=16384, skip_tokenizer_init=True,
                        incremental_streaming_output=True, dialect="0.5.23", max_lora_rank=int(sys.argv[2]),
                        lora_target_modules=tuple(sys.argv[3:]), max_loras_per_batch=3))
"""


@contextmanager
def serving_adapters(model: Path) -> Iterator[str]:
    """Yield its URL; adapters have the rank RANK and change the modules DENSE."""
    command = [sys.executable, "-c", SERVE, str(model), str(RANK), *DENSE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[1]
        finally:
            process.kill()
