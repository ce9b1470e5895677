"""Lets SGLang hold adapters where there is no accelerator: it pins their memory, and torch has no pinned memory there.

Requests for pinned memory get ordinary memory, from the moment that SGLang's part for adapters is imported. Loaded at
the start of every interpreter of the environment by the .pth file beside it.
"""

import sys
from functools import wraps

_MAKERS = ("arange", "empty", "full", "ones", "tensor", "zeros")


def _unpinned(make):
    @wraps(make)
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


class _Unpin:
    """A finder that finds nothing: it is asked for each module and acts at the right one, once."""

    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.lora":
            sys.meta_path.remove(self)
            import torch

            if not torch.accelerator.is_available():
                for maker in _MAKERS:
                    setattr(torch, maker, _unpinned(getattr(torch, maker)))
                torch.Tensor.pin_memory = lambda self: self
        return None


sys.meta_path.insert(0, _Unpin())
