"""SGLang's server with the API key of its environment: it takes a flag alone, and a command line is no secret.

Invariant: the key is in the environment of this process and in its memory, which other users cannot read, and nowhere
else: no file, no command line of this or of the processes that SGLang starts. Run as `python -m
dora.engine.sglang.serve` with the words of `sglang.launch_server`.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """SGLang's own main module takes the place of this one, as its workers (spawned) must find it."""
    sys.argv += ["--api-key", os.environ.pop("DORA_SERVE_API_KEY")]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
