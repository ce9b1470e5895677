"""Lets torchvision be imported where its compiled part cannot load: a wheel built for CUDA beside a CPU torch.

Such a torchvision fails while it describes two operators that its compiled part would have defined. This defines them
just before, if they are missing. Loaded at the start of every interpreter of the environment by the .pth file beside
it; SGLang and transformers import torchvision, and neither calls it here.
"""

import sys

_OPERATORS = ("nms", "qnms")


class _DefineOperators:
    """A finder that finds nothing: it is asked for each module and acts at the right one, once."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            import torch

            for operator in _OPERATORS:
                if not hasattr(torch.ops.torchvision, operator):
                    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    torch.library.define(f"torchvision::{operator}", schema)
        return None


sys.meta_path.insert(0, _DefineOperators())
