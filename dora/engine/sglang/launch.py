"""Command lines of servers with SGLang's protocol. Both stream token ids without text, and each token once.

Of adapters, one more is asked for than are needed: requests without an adapter count as one.
"""

from __future__ import annotations

import sys
from typing import Final

from dora.engine.api import AdapterNeeds

_TOKENS_ONCE: Final = ("--incremental-streaming-output", "--skip-tokenizer-init")

EMBEDDED: Final = (
    *(sys.executable, "-m", "dora", "serve", *_TOKENS_ONCE),
    *("--model", "{model}", "--host", "{host}", "--port", "{port}", "--slots", "{slots}"),
    *("--kv-tokens", "{kv_tokens}", "--device", "{device}", "--dtype", "{dtype}", "--threads", "{threads}"),
    *("--min-step-ms", "{min_step_ms}", "--draft-tokens", "{draft_tokens}"),
)
SGLANG: Final = (
    *(sys.executable, "-m", "dora.engine.sglang.serve", *_TOKENS_ONCE),
    *("--model-path", "{model}", "--host", "{host}", "--port", "{port}", "--max-running-requests", "{slots}"),
    *("--device", "{device}", "--dtype", "{dtype}", "--tp-size", "{tp}", "--enable-metrics"),
    *("--nnodes", "{nodes}", "--node-rank", "{node_rank}", "--dist-init-addr", "{master}"),
)
#: The flags with which servers return the choice of experts.
EMBEDDED_ROUTING: Final = ("--dialect", "0.5.23", "--routed-experts")
SGLANG_ROUTING: Final = ("--enable-return-routed-experts",)


def sglang_adapters(needs: AdapterNeeds) -> tuple[str, ...]:
    """Return the flags of SGLang that make room for adapters."""
    return (
        *("--enable-lora", "--lora-strict-loading", "--max-loras-per-batch", str(needs.count + 1)),
        *("--max-lora-rank", str(needs.rank), "--lora-target-modules", *sorted(needs.targets)),
    )


def embedded_adapters(needs: AdapterNeeds) -> tuple[str, ...]:
    """Return the flags of the embedded engine that make room for adapters."""
    return (
        *("--dialect", "0.5.23", "--max-loras-per-batch", str(needs.count + 1)),
        *("--max-lora-rank", str(needs.rank), "--lora-target-modules", ",".join(sorted(needs.targets))),
    )
