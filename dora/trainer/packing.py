"""Rows of sequences: the input of one forward pass.

A packed row has all sequences of a pass one after the other. Sequences with the same prompt may share it: the row then
has the prompt once, followed by the responses, each of which has positions that continue those of the prompt. A padded
row has one sequence per line, padded on the right. It is for models with layers that carry state from one token to the
next: in a packed row the state of one sequence would reach the next. Several ranks may divide a packed row: each knows
all of it and computes one slice, and padding at the end makes the slices equal.

Invariant: only positions that predict a trained token reach the loss, so that values at masked positions (NaN included)
have no effect.
Legend: B lines of the row (1 if packed), T tokens of a line, P trained tokens, p those that a slice predicts, N
segments, n sequences, L layers with experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.errors import ConfigError
from dora.trainer.context import Context

#: Sequences share a padded row while the longest is at most this much longer than the shortest, plus SLACK tokens. So
#: padding is at most a third of a row of long sequences, and short ones do not need many passes.
MAX_STRETCH: Final = 1.5
SLACK: Final = 8
Sharing = Literal["auto", "on", "off"]
#: What `trainer.shared_prompts` means for `Layout.share_above`.
SHARE_ABOVE: Final[dict[Sharing, float]] = {"auto": 1.15, "on": 1.0, "off": math.inf}


@dataclass(frozen=True, slots=True)
class Layout:
    """How the sequences of a micro-batch share forward passes."""

    padded: bool = False
    #: The rotary embedding changes beyond this length, so longer and shorter sequences are never in one pass.
    rope_limit: int | None = None
    #: Sequences share their prompt if they would otherwise have more than this many times as many tokens.
    share_above: float = math.inf
    #: The ranks of which each has a slice of every row; None: a rank has rows by itself.
    context: Context | None = None

    #: Number of ranks that compute each row alike, since they divide the matrices.
    alike: int = 1

    @property
    def slices(self) -> int:
        """The number of ranks that divide a row."""
        return self.context.size if self.context is not None else 1

    @property
    def ranks(self) -> int:
        """The number of ranks that have the same rows."""
        return self.slices * self.alike

    def is_long(self, length: int) -> bool:
        """Return whether a sequence is beyond `rope_limit`."""
        return self.rope_limit is not None and length > self.rope_limit

    def shared(self, lengths: Sequence[int], prompt: PromptTokens) -> int:
        """Return how many tokens are shared by sequences of these lengths that start with `prompt`: all of it, or 0."""
        alone, saved = sum(lengths), (len(lengths) - 1) * prompt.length
        return prompt.length if saved and alone > self.share_above * (alone - saved) else 0


#: All sequences one after the other, each with its own prompt.
PACKED: Final = Layout()


class PromptTokens(NamedTuple):
    """The tokens of a sequence before the first trained one, or all of them."""

    length: int
    content: bytes
    experts: bytes = b""  # to which they are sent; b"": those that the model chooses


def prompts_of(
    tokens: NDArray[np.integer],
    *,
    lengths: Sequence[int] | NDArray[np.integer],
    trained: NDArray[np.integer],
    experts: NDArray[np.integer] | None = None,
) -> list[PromptTokens]:
    """Return the prompt of each sequence. `tokens`: all sequences one after the other; `trained`: ascending indices.
    `experts`: those of each token, by which prompts differ too."""
    prompts = []
    for end, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True):
        start = end - int(length)
        first = np.searchsorted(trained, start)
        stop = min(end, int(trained[first])) if first < len(trained) else end
        chosen = b"" if experts is None else experts[start:stop].tobytes()
        prompts.append(PromptTokens(stop - start, tokens[start:stop].tobytes(), chosen))
    return prompts


@dataclass(frozen=True, slots=True)
class Row:
    """The sequences of one forward pass; no sequence affects another.

    A segment is a whole sequence, a prompt that several sequences share, or the response of such a sequence.
    """

    tokens_BT: Tensor  # int64; 0 where padded
    positions_BT: Tensor  # int64, from 0 in every sequence
    uses_BT: Tensor  # int64, how many sequences have a token there: several a token of their prompt, none padding
    lengths: tuple[int, ...]  # [N] of the segments; none is empty
    prompts: tuple[int, ...]  # [N] the index of the segment with its prompt, if it is a response; else -1
    predictors_P: Tensor  # int64: indices into B x T, flattened, whose logits predict a trained token
    targets_P: Tensor  # int64: these tokens
    padded: bool = False
    context: Context | None = None  # the ranks that divide the row, whose length T is a multiple of their number
    own_p: Tensor | None = None  # with `context`: int64 indices into P, those predicted in this rank's slice
    experts_BTLk: Tensor | None = None  # int16, to which tokens are sent; -1: those that the model chooses
    lags_BT: Tensor | None = None  # with `experts_BTLk`: int64, staleness of the policy that chose them

    @property
    def num_padding(self) -> int:
        """The number of positions that hold no token."""
        return self.tokens_BT.numel() - sum(self.lengths)

    def flat(self, values_BT: Tensor) -> Tensor:
        """Return the values of this rank's positions, one after the other, as the layers of a model have them."""
        return (values_BT if self.context is None else self.context.own(values_BT)).flatten(0, 1)


def make_row(
    tokens: NDArray[np.integer],
    *,
    lengths: Sequence[int] | NDArray[np.integer],
    trained: NDArray[np.integer],
    experts: NDArray[np.int16] | None = None,
    lags_n: NDArray[np.integer] | None = None,
    layout: Layout = PACKED,
    device: torch.device,
) -> Row:
    """Return the row in which the tokens at the ascending indices `trained` are predicted, in this order.

    `tokens` has the sequences one after the other, `experts` [tokens, L, k] their experts, and `lags_n` their staleness
    (None: 0). If there is no sequence, the row is one untrained token, so that this rank takes part in the collectives
    of the other ranks.
    """
    lengths_n = np.asarray(lengths, np.int64)
    is_empty = len(tokens) == 0
    if is_empty:
        tokens, lengths_n, experts = np.zeros(1, np.int64), np.ones(1, np.int64), None
    starts = np.cumsum(lengths_n) - lengths_n
    positions = np.arange(len(tokens), dtype=np.int64) - np.repeat(starts, lengths_n)
    if layout.padded:
        num_lines, width = len(lengths_n), int(lengths_n.max())
        at, segments = np.repeat(np.arange(num_lines) * width, lengths_n) + positions, [(n, -1) for n in lengths_n]
    else:
        prompts = prompts_of(tokens, lengths=lengths_n, trained=trained, experts=experts)
        at, segments = _pack(lengths_n, starts, prompts, layout)
        num_lines, width = 1, int(at.max()) + 1
    width += -width % layout.slices
    tokens_BT = np.zeros((num_lines, width), np.int64)
    tokens_BT.flat[at] = tokens
    positions_BT = np.tile(np.arange(width) * layout.padded, (num_lines, 1))  # after a packed row, all are 0
    positions_BT.flat[at] = positions
    uses_BT = np.bincount(at, minlength=num_lines * width).reshape(num_lines, width) * (not is_empty)
    predictors_P = at[trained - 1]
    experts_BTLk, lags_BT = None, None
    if experts is not None:
        lags_BT = np.zeros((num_lines, width), np.int64)
        lags_BT.flat[at] = 0 if lags_n is None else np.repeat(lags_n, lengths_n)  # siblings have one version
        experts_BTLk = np.full((num_lines, width, *experts.shape[1:]), -1, np.int16)
        experts_BTLk.reshape(-1, *experts.shape[1:])[at] = experts
    own_p = None
    if layout.context is not None:
        own_p = np.flatnonzero(predictors_P // (width // layout.slices) == layout.context.rank)
    return Row(
        tokens_BT=torch.from_numpy(tokens_BT).to(device),
        positions_BT=torch.from_numpy(positions_BT).to(device),
        uses_BT=torch.from_numpy(uses_BT).to(device),
        lengths=tuple(int(length) for length, _ in segments),
        prompts=tuple(prompt for _, prompt in segments),
        predictors_P=torch.from_numpy(predictors_P).to(device),
        targets_P=torch.from_numpy(tokens[trained].astype(np.int64)).to(device),
        padded=layout.padded,
        context=layout.context,
        own_p=None if own_p is None else torch.from_numpy(own_p).to(device),
        experts_BTLk=None if experts_BTLk is None else torch.from_numpy(experts_BTLk).to(device),
        lags_BT=None if lags_BT is None else torch.from_numpy(lags_BT).to(device),
    )


def _pack(
    lengths_n: NDArray[np.int64], starts_n: NDArray[np.int64], prompts: Sequence[PromptTokens], layout: Layout
) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """Return the place of each token in a packed row, and the length and prompt of each segment."""
    at = np.empty(int(lengths_n.sum()), np.int64)
    segments: list[tuple[int, int]] = []
    end = 0

    def place(start: int, length: int, prompt: int) -> None:
        nonlocal end
        if length:
            at[start : start + length] = np.arange(end, end + length)
            segments.append((length, prompt))
            end += length

    for siblings in _families(range(len(prompts)), prompts):
        lengths = lengths_n[siblings].tolist()
        shared = layout.shared(lengths, prompts[siblings[0]])
        place(starts_n[siblings[0]], shared, -1)
        home = len(segments) - 1 if shared else -1
        for n, length in zip(siblings, lengths, strict=True):
            at[starts_n[n] : starts_n[n] + shared] = np.arange(shared) + at[starts_n[siblings[0]]]
            place(starts_n[n] + shared, length - shared, home)
    return at, segments


def _families(sequences: Iterable[int], prompts: Sequence[PromptTokens]) -> list[list[int]]:
    """Return the sequences, grouped by equal prompts, in the order of the first sequence of each group."""
    families: dict[PromptTokens, list[int]] = {}
    for n in sequences:
        families.setdefault(prompts[n], []).append(n)
    return list(families.values())


# ---- passes ---------------------------------------------------------------------------------------------------------


def unshared_tokens(lengths: Sequence[int], prompts: Sequence[PromptTokens], *, layout: Layout) -> int:
    """Return how many tokens sequences with equal prompts do not share because they have other experts there."""
    members = range(len(lengths))
    alike = [prompt._replace(experts=b"") for prompt in prompts]
    return _num_tokens(members, lengths, prompts, layout) - _num_tokens(members, lengths, alike, layout)


def split_passes(
    lengths: Sequence[int],
    *,
    prompts: Sequence[PromptTokens] = (),
    owners: Sequence[int] = (),
    layout: Layout,
    budget: int,
) -> list[list[int]]:
    """Return the indices of the sequences of each pass: at most `budget` tokens, padding included, or one sequence.

    With `prompts`, sequences that share a prompt are kept in one pass, unless they have too many tokens. Sequences with
    the same number in `owners` are always in one pass; ConfigError if the model computes them in different ways.
    """
    passes: list[list[int]] = []
    together = _together(lengths, owners, layout=layout)
    alone = [n for n in range(len(lengths)) if not together or all(n not in part for part in together)]
    for part in (*_parts(alone, lengths, prompts, layout=layout, budget=budget), *together):
        if passes and _may_join(passes[-1], part, lengths, prompts, layout=layout, budget=budget):
            passes[-1] += part
        else:
            passes.append(part)
    return passes


def _may_join(
    present: list[int],
    part: list[int],
    lengths: Sequence[int],
    prompts: Sequence[PromptTokens],
    *,
    layout: Layout,
    budget: int,
) -> bool:
    """Return whether sequences may be added to a pass that has other sequences."""
    if layout.is_long(lengths[part[0]]) != layout.is_long(lengths[present[0]]):
        return False
    if layout.padded:
        both = [lengths[n] for n in (*present, *part)]
        return len(both) * max(both) <= budget and max(both) <= MAX_STRETCH * min(both) + SLACK
    return _num_tokens(present + part, lengths, prompts, layout) <= budget


def _num_tokens(members: Sequence[int], lengths: Sequence[int], prompts: Sequence[PromptTokens], layout: Layout) -> int:
    """Return the number of tokens of a packed row."""
    total = sum(lengths[n] for n in members)
    if not prompts or math.isinf(layout.share_above):
        return total
    families = _families(members, prompts)
    return total - sum((len(f) - 1) * layout.shared([lengths[n] for n in f], prompts[f[0]]) for f in families)


def _together(lengths: Sequence[int], owners: Sequence[int], *, layout: Layout) -> list[list[int]]:
    """Return the sequences of each owner that has several sequences."""
    owned: dict[int, list[int]] = {}
    for n, owner in enumerate(owners):
        owned.setdefault(owner, []).append(n)
    found = [part for part in owned.values() if len(part) > 1]
    if any(len({layout.is_long(lengths[n]) for n in part}) > 1 for part in found):
        raise ConfigError(
            f"objective: an episode has rows of more and of fewer than {layout.rope_limit} tokens, which this model "
            "computes in different passes; use a loss, an aggregation and corrections that act on tokens"
        )
    return found


def _parts(
    members: Sequence[int], lengths: Sequence[int], prompts: Sequence[PromptTokens], *, layout: Layout, budget: int
) -> Iterator[list[int]]:
    """Yield sequences that must be in the same pass: as many that share a prompt as fit, or a single sequence."""
    order = sorted(members, key=lambda n: (layout.is_long(lengths[n]), layout.padded * lengths[n]))
    if layout.padded or not prompts or math.isinf(layout.share_above):
        yield from ([n] for n in order)
        return
    for _, alike in groupby(order, key=lambda n: layout.is_long(lengths[n])):
        for family in _families(alike, prompts):
            while family:
                counts = range(len(family), 1, -1)
                fits = (n for n in counts if _num_tokens(family[:n], lengths, prompts, layout) <= budget)
                count = next(fits, 1)
                shares = layout.shared([lengths[n] for n in family[:count]], prompts[family[0]])
                yield from [family[:count]] if shares else ([n] for n in family[:count])
                family = family[count:]
