"""Start SGLang's server with an API key from the environment. SGLang itself takes it only on the command line, which
every user of the machine can read.

Invariant: the key is only in the environment and the memory of this process, never in a file or on a command line,
including those of SGLang's workers. Usage: `python -m dora.engine.sglang.serve` with the flags of
`sglang.launch_server`.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Run SGLang's main module in place of this one, because its spawned workers import it."""
    sys.argv += ["--api-key", os.environ.pop("DORA_SERVE_API_KEY")]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
