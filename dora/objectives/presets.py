"""Known algorithms as defaults of `[objective]`; keys that are given explicitly take precedence.

Algorithms that differ only in their clip use the ratio to the policy that sampled (`bypass`): with one update per step,
r = π/π_o is always 1, so clipping r would have no effect.
"""

from __future__ import annotations

from typing import Any, Final

#: Name -> keys of `[objective]`.
PRESETS: Final[dict[str, dict[str, Any]]] = {
    # DeepSeekMath, arXiv 2402.03300; without its KL term
    "grpo": {
        "advantage": "grpo",
        "aggregation": "seq_mean_token_mean",
        "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2},
    },
    # arXiv 2503.14476
    "dapo": {
        "advantage": "grpo",
        "aggregation": "token_mean",
        "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28},
    },
    # arXiv 2503.20783
    "dr_grpo": {
        "advantage": "dr_grpo",
        "aggregation": "seq_mean_token_sum_norm",
        "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2},
    },
    # arXiv 2507.18071
    "gspo": {
        "advantage": "grpo",
        "aggregation": "seq_mean_token_mean",
        "loss": {"kind": "gspo", "ratio": "bypass", "clip_low": 3e-4, "clip_high": 4e-4},
    },
    # MiniMax-M1, arXiv 2506.13585
    "cispo": {
        "advantage": "grpo",
        "aggregation": "token_mean",
        "loss": {"kind": "cispo", "ratio": "bypass", "clip_high": 0.28},
    },
    # arXiv 2602.04879
    "dppo": {
        "advantage": "grpo",
        "aggregation": "token_mean",
        "loss": {"kind": "dppo_tv", "threshold": 0.2, "pull": 1e-3},
    },
    # arXiv 2402.14740
    "reinforce": {
        "advantage": "rloo",
        "aggregation": "seq_mean_token_sum_norm",
        "loss": {"kind": "reinforce"},
    },
    # arXiv 2509.18883
    "longcat": {
        "advantage": "grpo",
        "aggregation": "longcat",
        "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    },
}
