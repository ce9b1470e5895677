"""Command lines of servers with SGLang's protocol. Both stream token ids without text, and each token once."""

from __future__ import annotations

import sys
from typing import Final

_TOKENS_ONCE: Final = ("--incremental-streaming-output", "--skip-tokenizer-init")

EMBEDDED: Final = (
    *(sys.executable, "-m", "dora", "serve", *_TOKENS_ONCE),
    *("--model", "{model}", "--host", "{host}", "--port", "{port}", "--slots", "{slots}"),
    *("--kv-tokens", "{kv_tokens}", "--device", "{device}", "--dtype", "{dtype}", "--threads", "{threads}"),
    *("--min-step-ms", "{min_step_ms}"),
)
SGLANG: Final = (
    *(sys.executable, "-m", "dora.engine.sglang.serve", *_TOKENS_ONCE),
    *("--model-path", "{model}", "--host", "{host}", "--port", "{port}", "--max-running-requests", "{slots}"),
    *("--device", "{device}", "--dtype", "{dtype}", "--tp-size", "{tp}", "--enable-metrics"),
    *("--nnodes", "{nodes}", "--node-rank", "{node_rank}", "--dist-init-addr", "{master}"),
)
