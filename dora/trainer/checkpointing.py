"""Activation checkpointing of decoder layers (arXiv 1604.06174): what a layer keeps for backward, and what it repeats.

Measured in float32 with 12 Qwen3 layers of hidden size 640, 512 tokens, on one CPU core (KiB kept per token, time of
forward and backward):

    none       765   1.00
    selective  357   1.06   keeps the outputs of matrix products and attention; repeats norms, rotations, activations
    full        38   1.27   keeps the input of the layer; repeats its whole forward pass

Keeping attention alone takes 69 KiB and 1.27, keeping every second product takes 228 KiB and 1.16. Both cost more time
per byte saved than `selective`, so there is no mode for them. Batched products are repeated, because where attention is
written with them, their outputs are the [T x T] scores. Repeated operations give the same values, so gradients are
equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial, wraps
from typing import Any, Final, Literal, get_args

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

Mode = Literal["none", "selective", "full"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

#: Operators, without namespace and overload, whose outputs `selective` keeps. The operators of GPUs are untested.
KEPT_OPERATORS: Final = frozenset(
    {
        "mm", "addmm", "_grouped_mm", "_scaled_mm",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_flash_attention_forward", "_efficient_attention_forward",
        "flex_attention", "_flash_attn_forward", "_flash_attn_varlen_forward",
    }
)  # fmt: skip


def apply_checkpointing(layers: Iterable[nn.Module], mode: Mode) -> None:
    """Let each layer keep what `mode` says; names of parameters do not change.

    Models of transformers have a switch of their own, which has no effect in evaluation mode. Only `forward` is
    repeated, not the hooks of FSDP2 around it.
    """
    if mode == "none":
        return
    for layer in layers:
        contexts = partial(_selective_contexts, _kept(layer)) if mode == "selective" else noop_context_fn
        forward = layer.forward
        repeated = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        layer.forward = wraps(forward)(repeated)


def _kept(layer: nn.Module) -> frozenset[str]:
    """Return the operators whose outputs this layer can keep: transformers adds the biases of experts in place."""
    has_biases = any(getattr(module, "has_bias", False) for module in layer.modules())
    return KEPT_OPERATORS - {"_grouped_mm"} if has_biases else KEPT_OPERATORS


def _selective_contexts(kept: frozenset[str]) -> Any:
    return tuple(_Only(kept, mode) for mode in create_selective_checkpoint_contexts(_keep))


def _keep(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


class _Only(TorchDispatchMode):
    """Show a mode only the operators that are kept.

    torch expects the same operators in both passes, also of those that it repeats. Units of FSDP2 within a layer,
    as of divided experts, gather their weights in both, but not by the same operators.
    """

    supports_higher_order_operators = True  # such as FlexAttention

    def __init__(self, kept: frozenset[str], mode: Any) -> None:
        super().__init__()
        self._kept, self._mode = kept, mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(operator, "overloadpacket", operator).__name__ in self._kept:
            return self._mode.__torch_dispatch__(operator, types, args, kwargs)
        return operator(*args, **(kwargs or {}))
