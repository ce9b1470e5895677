"""Lets SGLang hold adapters and the choice of experts where there is no accelerator: it pins the memory of both, and
torch has no pinned memory there.

Requests for pinned memory get ordinary memory, and the registration of memory with CUDA, which only speeds up copies,
succeeds without effect, from the moment that SGLang's part for either is imported. Loaded at the start of every
interpreter of the environment by the .pth file beside it.
"""

import sys
from functools import wraps
from types import SimpleNamespace

_PARTS = ("sglang.srt.lora", "sglang.srt.state_capturer")
_MAKERS = ("arange", "empty", "full", "ones", "tensor", "zeros")


def _unpinned(make):
    @wraps(make)
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


class _Unpin:
    """A finder that finds nothing: it is asked for each module and acts at the right one, once."""

    def find_spec(self, name, path=None, target=None):
        if name in _PARTS:
            sys.meta_path.remove(self)
            import torch

            if not torch.accelerator.is_available():
                for maker in _MAKERS:
                    setattr(torch, maker, _unpinned(getattr(torch, maker)))
                torch.Tensor.pin_memory = lambda self: self
                done = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
                torch.cuda.cudart = lambda: done
        return None


sys.meta_path.insert(0, _Unpin())
