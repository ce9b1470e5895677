"""The memory of one trainer rank, forecast from the config of a model folder.

The trainer's own forward and backward pass run on tensors without data, and every storage counts while it is alive. So
a forecast needs no weights, and no formula for a family or a kind of checkpointing. Of equal layers only the first one
runs. The others return their input, and the memory that the first one keeps is counted again for each of them. The
copies that FSDP2 makes of weights and gradients are calculated. Two parts that only a GPU has are left out: the scratch
memory of kernels, and the unused parts of the allocator's blocks. Ranks that divide a pass are forecast as if each had
a pass of its own tokens: in attention, all tokens of some heads take as much as some tokens of all heads. Left out are
the output of attention, which is kept before and after its exchange (5 % of what a small model keeps), what the
exchange of one layer needs, and keys and values that are repeated because their heads cannot be divided. Ranks that
divide matrices are forecast with less to gather, and with all that a pass of whole layers keeps: they keep less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_iter

from dora.model_config import is_of_experts, load_config
from dora.trainer import model as policy
from dora.trainer.adapters import Adapters
from dora.trainer.checkpointing import MODES, Mode, apply_checkpointing
from dora.trainer.experts import expert_parameters, require_experts
from dora.trainer.layouts import layout_of, require_divided
from dora.trainer.live_bytes import LiveBytes
from dora.trainer.logprobs import few_tiles, logprobs
from dora.trainer.optimizer import MomentBytes, roles_of
from dora.trainer.packing import PACKED, Layout, Row, make_row
from dora.trainer.tensor import divided_parameters, require_tensor
from dora.transport.messages import LoraSettings

#: Models with at most this many bytes of weights run with data, which takes a tenth of the time.
WITH_DATA: Final = 2**26
#: Tokens of the two rows that are run; longer rows are extrapolated from them. The three pairs are for models with
#: data, for models without data, and for models without data whose layers loop over tokens: each operation takes 0.1 ms
#: even then.
WITH_DATA_ROWS: Final = (128, 512)
ROWS: Final = (2048, 4096)
LOOP_ROWS: Final = (64, 128)
#: Largest share of the memory that a forecast may take: it is a few percent wrong, and allocators waste some.
FITS: Final = 0.9
MOMENTS: Final = MomentBytes(hidden=8.0, other=8.0)
_CPU: Final = torch.device("cpu")
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes on the device of one rank, all alive early in the backward pass."""

    states: int  # this rank's rows of weights, gradients and moments, float32, and of copies
    gathered: int  # whole weights and gradients, of the model or of a few layers, and whole copies
    kept: int  # for the backward pass, at the end of the forward pass
    working: int  # the most that the backward pass uses in addition

    @property
    def total(self) -> int:
        return self.states + self.gathered + self.kept + self.working


@dataclass(frozen=True, slots=True)
class _Count:
    """Bytes that a forward and backward pass took."""

    kept: int  # for the backward pass
    working: tuple[int, ...]  # the most in addition during the backward pass of the head, the layers, the embeddings
    operations: int  # number of operations in the forward pass of the layers


class Outline:
    """A model without data, and the memory that training it takes."""

    def __init__(
        self,
        model_path: Path,
        *,
        dtype: torch.dtype,
        checkpointing: Mode = "none",
        moments: MomentBytes = MOMENTS,
        copies: int = 0,
        copies_on_host: bool = False,
        expert_ranks: int = 1,
        tensor_ranks: int = 1,
        lora: LoraSettings | None = None,
        frozen_adapters: Collection[str] = (),
    ) -> None:
        """`dtype`: of the computation. `moments`: of the optimizer on the device. `copies`: number of policies in
        addition to the trained one (dora/trainer/copies.py). `expert_ranks`: that divide the experts, of whose tokens
        each is assumed to get as many. `lora`, `frozen_adapters`: see `ShardedModel`.

        ConfigError if the folder has no model that can be trained in this way.
        """
        self._copies = copies
        self._copies_on_host = copies_on_host
        self._model = policy.build_on_meta(load_config(model_path), dtype)
        if lora is not None:
            Adapters(self._model, lora, frozen=frozen_adapters)
            self._model.enable_input_require_grads()  # so that the first layer keeps what the others do
        layers = list(policy.decoder_layers(self._model))
        if expert_ranks > 1:
            require_experts(self._model, ranks=expert_ranks)
        if tensor_ranks > 1:
            require_tensor(self._model, ranks=tensor_ranks)
        groups = expert_ranks * tensor_ranks  # one of them is 1
        of_groups = expert_parameters(self._model) if expert_ranks > 1 else divided_parameters(self._model)
        divided = {self._model.get_parameter(name) for name in of_groups}
        absent = {unit: _size(unit, divided) * (groups - 1) // groups for unit in (self._model, *layers)}
        units = [_size(unit) - absent[unit] for unit in policy.sharding_units(self._model)]
        self.parameters = _size(self._model)  #: number
        adapters = sum(p.numel() for name, p in self._model.named_parameters() if ".lora_" in name)
        self.published = self.parameters - adapters  #: number of those that a server has
        named = self._model.named_parameters()
        self.experts = sum(p.numel() for name, p in named if is_of_experts(name) and ".lora_" not in name)
        self._gatherable = self.parameters - absent[self._model]  # number on one rank
        self._trained = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        self._moments = _moments(self._model, moments)
        self._largest_unit = max(units, default=0)
        self._rest = self._gatherable - sum(units)  # embeddings, head
        self._width = dtype.itemsize
        self._live = _LiveShapes()
        self._repeated: list[int] = []  # bytes kept by the layers that do not run
        self._has_data = self.parameters * self._width <= WITH_DATA
        _allocate(self._model, dtype, nullcontext() if self._has_data else FakeTensorMode(allow_non_fake_inputs=True))
        apply_checkpointing(layers, checkpointing)
        _run_one_of_each(layers, self._live, self._repeated)
        self._run(trial_row(2, longest=2))  # the first pass also measures what follows the head
        self._layout = layout_of(self._model)
        self._sizes = self._rows()
        self._counted: dict[Layout, tuple[_Count, _Count]] = {}  # with these sizes

    def forecast(
        self, *, tokens: int, longest: int, ranks: int, layout: Layout | None = None, is_trial: bool = False
    ) -> Forecast:
        """Forecast one pass over sequences of `longest` tokens, `tokens` in all, but at least one sequence.

        `layout`: of the rows; None: the layout for this kind of model. `is_trial`: without moments and copies.
        """
        copies, moments = (0, 0.0) if is_trial else (self._copies, self._moments)
        if is_gathered := policy.stays_gathered(self._model):  # all, and gradients until the step closes
            has_all = self._trained == self.parameters
            gradients = self._gatherable * 4 + self._rest * self._width if has_all else self._trained * 4
            gathered = self._gatherable * self._width * (1 + copies) + gradients
        else:  # embeddings and head, and two layers: one computes while the next is gathered
            gathered = (self._rest + 2 * self._largest_unit) * self._width
        copy_bytes = 0 if self._copies_on_host else copies * self._width
        kept, working = self._count(max(tokens, longest), longest, layout or self._layout)
        frozen = (self.parameters - self._trained) * self._width
        states = frozen + self._trained * (4 + 4 * (not is_gathered)) + self.parameters * copy_bytes + moments
        return Forecast(
            states=round(-(-states // ranks)),
            gathered=gathered,
            kept=kept,
            working=working,
        )

    def require_divided(self, *, ranks: int, longest: int) -> None:
        """Raise ConfigError unless this many ranks can divide each row; `longest`: tokens of the longest sequence."""
        require_divided(self._model, ranks=ranks, longest=longest)

    def checkpoint_bytes(self, moments: MomentBytes) -> int:
        """Return the size of a checkpoint with what is trained, in float32, and these moments."""
        return 4 * self._trained + _moments(self._model, moments)

    def _count(self, tokens: int, longest: int, layout: Layout) -> tuple[int, int]:
        """Return the bytes that the forward pass keeps, and the bytes that the backward pass uses in addition."""
        sizes = self._sizes
        if tokens <= sizes[1]:
            found = self._run(trial_row(tokens, longest=longest, layout=layout))
            return found.kept, max(found.working)
        if layout not in self._counted:
            first, second = (self._run(trial_row(n, longest=n, layout=layout)) for n in sizes)
            self._counted[layout] = (first, second)
        first, second = self._counted[layout]

        def extrapolate(here: int, there: int) -> int:
            return round(here + (tokens - sizes[0]) / (sizes[1] - sizes[0]) * (there - here))

        working = [extrapolate(*pair) for pair in zip(first.working, second.working, strict=True)]
        return extrapolate(first.kept, second.kept), max(*working, *second.working)

    def _rows(self) -> tuple[int, int]:
        """Return the tokens of the rows from which to extrapolate."""
        if self._has_data:
            return WITH_DATA_ROWS
        short, long = (self._run(trial_row(n, longest=n)).operations for n in LOOP_ROWS)
        return LOOP_ROWS if long > short else ROWS

    def _run(self, row: Row) -> _Count:
        self._repeated.clear()
        live = self._live
        live.begin()
        with live, nullcontext() if self._has_data else few_tiles():
            loss = logprobs(self._model, row, temperature=1.0)[0].sum()
            kept = live.now
            live.reach(0)
            loss.backward()
        self._model.zero_grad()
        return _Count(kept + sum(self._repeated), tuple(most - kept for most in live.most), live.operations)


def largest_pass(
    outline: Outline, *, tokens: int, longest: int, ranks: int, memory: int, layout: Layout | None = None
) -> int:
    """Return how many tokens of one pass fit in `memory` bytes; below 1 if the weights alone do not."""
    tokens = max(tokens, longest)
    here, twice = (
        outline.forecast(tokens=n, longest=longest, ranks=ranks, layout=layout).total for n in (tokens, 2 * tokens)
    )
    return tokens + math.floor((FITS * memory - here) / (twice - here) * tokens)


def choose_mode(
    model_path: Path,
    *,
    dtype: torch.dtype,
    tokens: int,
    longest: int,
    ranks: int,
    memory: int,
    moments: MomentBytes = MOMENTS,
    copies: int = 0,
    copies_on_host: bool = False,
    expert_ranks: int = 1,
    tensor_ranks: int = 1,
    lora: LoraSettings | None = None,
    frozen_adapters: Collection[str] = (),
) -> tuple[Mode, Forecast]:
    """Return the first mode of checkpointing whose forecast fits in `memory` bytes, or else the last one."""
    for mode in MODES:
        outline = Outline(
            model_path,
            dtype=dtype,
            checkpointing=mode,
            moments=moments,
            copies=copies,
            copies_on_host=copies_on_host,
            expert_ranks=expert_ranks,
            tensor_ranks=tensor_ranks,
            lora=lora,
            frozen_adapters=frozen_adapters,
        )
        found = outline.forecast(tokens=tokens, longest=longest, ranks=ranks)
        if found.total <= FITS * memory:
            break
    return mode, found


def trial_row(tokens: int, *, longest: int, layout: Layout = PACKED, device: torch.device = _CPU) -> Row:
    """Return a row of sequences of `longest` tokens, about `tokens` in all; all but their first ones are trained."""
    lengths = [longest] * max(1, tokens // longest)
    rest = tokens - sum(lengths)
    if rest > 0 and not layout.padded:
        lengths.append(rest)
    trained = np.setdiff1d(np.arange(sum(lengths)), np.cumsum(lengths) - lengths)
    return make_row(np.ones(sum(lengths), np.int64), lengths=lengths, trained=trained, layout=layout, device=device)


# ---- a model without data -------------------------------------------------------------------------------------------


def _size(module: nn.Module, only: Container[nn.Parameter] | None = None) -> int:
    """Return the number of parameters, or of those that are in `only`."""
    return sum(parameter.numel() for parameter in module.parameters() if only is None or parameter in only)


def _moments(model: Any, moments: MomentBytes) -> int:
    """Return the bytes of all moments of a model."""
    roles = roles_of(model)
    each = (getattr(moments, "hidden" if roles[name] == "hidden" else "other") * p.numel()
            for name, p in model.named_parameters() if p.requires_grad)  # fmt: skip
    return round(sum(each))


def _allocate(model: Any, dtype: torch.dtype, mode: AbstractContextManager[Any]) -> None:
    """Give a model on meta the CPU's tensors of `mode`; its parameters become `dtype`, as FSDP2 casts them.

    The gradients of layers are dropped at once, as FSDP2 reduces them; those of embeddings and head stay to the end.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for parameter in policy.decoder_layers(model).parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    with mode:
        model.to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.detach().zero_()
    model.eval()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _LiveShapes(LiveBytes):
    """Run operations whose result would depend on data; count the operations of layers and the peak of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Begin with a new pass."""
        self.operations = 0  #: number of operations in the forward pass of the layers
        self.in_layer = False
        self.most = [0, 0, 0]  #: most bytes alive at once in the backward pass of the head, the layers, the embeddings
        self._phase: int | None = None  # index into `most`; None: not in the backward pass

    def reach(self, phase: int) -> None:
        """Begin a phase of the backward pass."""
        self._phase = max(phase, self._phase or 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += self.in_layer
        out = super().__torch_dispatch__(partial(_without_data, func), types, args, kwargs)
        if self._phase is not None:
            self.most[self._phase] = max(self.most[self._phase], self.now)
        return out


def _without_data(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operation on tensors without data: a scalar is 1, and shapes come from the arguments."""
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in tree_iter(args))
    if is_fake and func is _aten._local_scalar_dense.default:
        return 1
    if is_fake and func is _aten.index.Tensor:
        args = (args[0], [part for index in args[1] for part in _positions(index)])
    if is_fake and func is _aten._grouped_mm.default:  # experts; torch knows the shape for bfloat16 only
        left, right, ends = args[:3]
        experts = ends.shape if left.dim() == right.dim() == 2 else ()
        return left.new_empty(*experts, left.shape[0], right.shape[-1])
    return func(*args, **kwargs)


def _positions(index: Tensor | None) -> list[Tensor | None]:
    """Return a mask with data as the positions where it is true; anything else as it is."""
    if index is None or index.dtype is not torch.bool or isinstance(index, FakeTensor):
        return [index]
    return list(index.nonzero().unbind(1))


# ---- one layer of each kind -----------------------------------------------------------------------------------------


def _run_one_of_each(layers: list[nn.Module], live: _LiveShapes, repeated: list[int]) -> None:
    """Make all but the first of equal layers return their input, and add to `repeated` what they would keep."""
    first: dict[object, _First] = {}
    for layer in layers:
        kind = _kind(layer)
        if kind in first:
            layer.forward = partial(first[kind].stand_in, repeated)
        else:
            first[kind] = _First(layer, live, is_first=not first)


class _First:
    """The first of several equal layers: what it keeps, and the form of its result."""

    def __init__(self, layer: nn.Module, live: _LiveShapes, *, is_first: bool) -> None:
        self._live = live
        self._is_first = is_first
        self._before = self._kept = 0
        self._rest: tuple[Any, ...] | None = None
        layer.register_forward_pre_hook(self._begin, prepend=True)
        layer.register_forward_hook(self._end)

    def _begin(self, _layer: nn.Module, args: Any) -> None:
        if self._is_first and args and args[0].requires_grad:
            args[0].register_hook(lambda _: self._live.reach(2))
        self._before = self._live.now
        self._live.in_layer = True

    def _end(self, _layer: nn.Module, _args: Any, out: Any) -> None:
        self._live.in_layer = False
        self._kept = self._live.now - self._before
        self._rest = out[1:] if isinstance(out, tuple) else None
        hidden = out[0] if isinstance(out, tuple) else out
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._live.reach(1))

    def stand_in(self, repeated: list[int], hidden: Tensor, *_: Any, **__: Any) -> Any:
        repeated.append(self._kept)
        return hidden if self._rest is None else (hidden, *self._rest)


def _kind(layer: nn.Module) -> object:
    """Return the same for equal layers: their classes, shapes and plain settings (a window), not their index."""
    return tuple(
        (
            name,
            type(module),
            tuple(parameter.shape for parameter in module._parameters.values() if parameter is not None),
            tuple((key, value) for key, value in vars(module).items() if _is_setting(key, value)),
        )
        for name, module in layer.named_modules()
    )


def _is_setting(key: str, value: object) -> bool:
    return not key.startswith("_") and "idx" not in key and isinstance(value, bool | int | str | None)
