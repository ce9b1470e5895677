"""A small `transformers` causal LM as a Decoder: rows of different lengths in one KV tensor, stepped together.

The model's own forward runs; DORA supplies only the cache and the attention call (`slots.py`). Rows 0..n-1 are the live
requests and always dense, so that a step reads views and copies nothing; when a row leaves, the last row takes its
place. A prefill stops before the last prompt token. Like a sampled token, the last prompt token is pending, and the
next step computes it together with the pending tokens of all other rows. So a request whose prompt is cached needs no
separate forward. Invariant: KV positions below a row's length hold its tokens in order, and all later positions are
masked and finite. An extra row receives the writes of padding. Models whose layers have states cannot all skip padding
or continue a prompt. So each of their rows is prefilled alone and as a whole, and the prefix cache serves whole prompts
only. A row may have an adapter beside the model (`adapter_stack.py`), and its experts are kept beside its KV if they
are to be returned. Not thread-safe.

Legend: B rows, T new tokens per row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.cache_utils import DynamicCache
from transformers.utils.logging import disable_progress_bar

from dora.embedded.adapter_stack import AdapterStack
from dora.embedded.batcher import Joined, Joiner
from dora.embedded.live_weights import LiveWeights
from dora.embedded.prefixes import PrefixCache
from dora.embedded.sampling import GREEDY_BELOW, SamplingTensors, sample
from dora.embedded.scheduler import AdapterRoom
from dora.embedded.self_check import require_exact
from dora.embedded.slots import ATTENTION, Saved, SlotCache, filled_cache
from dora.errors import ConfigError
from dora.model_config import dynamic_from, load_config, positions, rope_limit
from dora.routers import find_routers

Result = TypeVar("Result")

DTYPES = ("float32", "bfloat16", "float16", "auto")
CHUNK_TOKENS = 2048  # maximum number of new tokens in one prefill forward: bounds its mask and its activations
LOGITS = 2**26  # maximum number of logits in one prefill forward that returns prompt log-probs
LENGTH_STEP = 32  # positions read are rounded up to this, so that kernels see few sizes


@dataclass(frozen=True, slots=True)
class _Found:
    """The part of a prompt that the prefix cache holds; the last prompt token is never taken from the cache."""

    saved: Saved | None
    held: int  # tokens that the cache holds
    length: int  # tokens taken from the cache
    missing: int  # tokens to prefill


class CausalDecoder:
    """Implements `dora.embedded.batcher.Decoder`."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int,
        kv_tokens: int,
        device: str,
        dtype: str,
        threads: int,
        adapters: AdapterRoom | None = None,
        returns_experts: bool = False,
    ) -> None:
        """`returns_experts`: keep the choice of experts of every token. ConfigError if the model has none."""
        torch.set_num_threads(threads)
        self._model, unused = _build(folder, device=device, dtype=dtype)
        self._weights = LiveWeights(self._model, unused=unused)
        config = self._model.config
        text = config.get_text_config()
        filled = self._try(filled_cache, self._model)
        self.context_tokens = _context_tokens(config, filled, kv_tokens=kv_tokens)
        self.vocab_size = text.vocab_size
        self.model_type, self.architectures = config.model_type, list(config.architectures or [])
        self.eos_token_ids = _eos_token_ids(self._model)
        self._device, self._slots, self._live = device, slots, 0
        self._routers = find_routers(self._model) if returns_experts else None
        routing = None if self._routers is None else self._routers.shape
        self._cache = SlotCache(filled, slots=slots, routing=routing)
        self._mask = torch.zeros(slots, 0, dtype=self._model.dtype, device=device)  # 0 readable, -inf not
        self._ints = torch.zeros(slots, 5, dtype=torch.int64, device=device)
        self._length, self._token, self._seed, self._top_k, self._greedy = self._ints.unbind(1)
        self._floats = torch.ones(slots, 3, device=device)
        self._settings: SamplingTensors | None = None  # settings of all live rows; None when the rows have changed
        self._lengths: list[int] = []  # lengths of the live rows, on the host
        self._bans: list[tuple[int, Sequence[int]] | None] = []  # (first index allowed, token ids) of the live rows
        self._places: list[int | None] = []  # of the adapters of the live rows
        self._row_ids = torch.arange(slots, device=device)
        most = slots if self._cache.stateful else kv_tokens  # a saved row is as large as a live one if it has states
        self._prefixes: PrefixCache[Saved] = PrefixCache(budget_tokens=kv_tokens // 4, budget_entries=most)
        self._grow(min(128, self.context_tokens))
        self.adapters = AdapterStack(self._model, adapters) if adapters is not None else None
        self._try(partial(require_exact, slots=slots, adapters=self.adapters), self, self._model)

    # --- Decoder

    @torch.inference_mode()
    def join(self, joiners: Sequence[Joiner]) -> list[Joined]:
        """Add rows. Rows that need a prefill come first, so that they form one view; the others need no forward
        pass."""
        found = [self._find(joiner) for joiner in joiners]
        order = sorted(range(len(joiners)), key=lambda i: found[i].missing == 0)
        joiners, found = [joiners[i] for i in order], [found[i] for i in order]
        first, self._live = self._live, self._live + len(joiners)
        self._grow(max(len(joiner.token_ids) for joiner in joiners))
        self._set_rows(first, joiners, found)
        missing = sum(one.missing > 0 for one in found)
        together = 1 if self._cache.stateful else max(missing, 1)
        prompt_logprobs: list[list[float] | None] = [None] * len(joiners)
        for begin in range(0, missing, together):
            wave = slice(begin, begin + together)
            prompt_logprobs[wave] = self._prefill(first + begin, joiners[wave], found[wave])
        for row, (joiner, one) in enumerate(zip(joiners, found, strict=True), first):
            if one.held < len(joiner.token_ids) - 1:
                known = joiner.token_ids[:-1]
                self._prefixes.put(joiner.namespace, known, self._cache.save(row, length=len(known)))
        return [
            Joined(i, one.length, _from_start(table, joiner))
            for i, one, table, joiner in zip(order, found, prompt_logprobs, joiners, strict=True)
        ]

    @torch.inference_mode()
    def step(self) -> tuple[list[int], list[float]]:
        live = self._live
        longest = max(self._lengths) + 1
        self._grow(longest)
        position_B = self._length[:live]
        write_at = self._row_ids[:live] * self._cache.capacity + position_B
        self._mask.view(-1).index_fill_(0, write_at, 0.0)
        positions = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, self._cache.capacity)
        self._cache.aim(write_at, rows=slice(0, live), positions=positions)
        mask = self._mask[:live, None, None, :positions]
        self._aim_adapters(slice(0, live))
        logits_BV = self._forward(self._token[:live, None], mask, position_B[:, None])[:, -1]
        position_B += 1
        self._lengths = [length + 1 for length in self._lengths]
        return self._sample(logits_BV)

    @property
    def can_verify(self) -> bool:
        return not self._cache.stateful

    @torch.inference_mode()
    def verify(self, drafts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float]]]:
        width = 1 + max(len(draft) for draft in drafts)
        logits_BTV, position_BT = self._draft_logits(drafts, width)
        for row, ban in enumerate(self._bans):
            if ban is not None:
                logits_BTV[row, : max(0, ban[0] - self._lengths[row] - 1), list(ban[1])] = -torch.inf
        self._settings = self._settings or self._settings_now()
        settings = self._settings.repeated(width)
        token_N, logprob_N = sample(logits_BTV.flatten(0, 1), settings, position_BT.flatten() + 1)
        token_BT, logprobs = token_N.view_as(position_BT), logprob_N.view_as(position_BT).tolist()
        if math.isnan(math.fsum(map(sum, logprobs))):  # a masked key adds 0 x NaN: to each row, its own draft did it
            for row, length in enumerate(self._lengths):
                self._cache.clear(row, begin=length, end=length + width)
            return [([token], [logprob]) for token, logprob in zip(*self.step(), strict=True)]
        tokens = token_BT.tolist()
        counts = [1 + _agreement(draft, sampled) for draft, sampled in zip(drafts, tokens, strict=True)]
        self._keep(counts, token_BT)
        return [(row[:count], found[:count]) for row, found, count in zip(tokens, logprobs, counts, strict=True)]

    def experts(self, row: int, *, begin: int, end: int) -> bytes:
        assert self._routers is not None
        shape = self._routers.shape
        found = np.zeros((end - begin, shape.num_layers, shape.top_k), "<i4")
        found[:, shape.layers] = self._cache.experts(row, begin=begin, end=end).cpu().numpy()
        return found.tobytes()

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        self._live -= 1
        last = self._live
        self._cache.forget(row, length=self._lengths[row])
        if row != last:
            self._cache.move(last, row, length=self._lengths[last])
            self._cache.forget(last, length=self._lengths[last])
            for state in (self._mask, self._ints, self._floats):
                state[row] = state[last]
        of_rows: list[list[Any]] = [self._lengths, self._bans, self._places]
        for values in of_rows:
            values[row] = values[last]
            values.pop()
        self._settings = None

    @torch.inference_mode()
    def load(self, folder: Path) -> None:
        self._weights.load(folder)

    @torch.inference_mode()
    def put(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._weights.put(tensors)

    def checksums(self) -> dict[str, str]:
        return self._weights.checksums()

    def flush(self) -> None:
        self._prefixes.clear()

    @property
    def cached_tokens(self) -> int:
        return self._prefixes.tokens

    # --- rows

    def _grow(self, positions: int) -> None:
        old = self._cache.capacity
        if positions <= old:
            return
        capacity = min(max(positions, 2 * old), -(-self.context_tokens // LENGTH_STEP) * LENGTH_STEP)
        self._cache.grow(capacity)
        mask = torch.full((self._slots, capacity), -torch.inf, dtype=self._mask.dtype, device=self._device)
        mask[:, :old] = self._mask
        self._mask = mask

    def _find(self, joiner: Joiner) -> _Found:
        held, saved = self._prefixes.match(joiner.namespace, joiner.token_ids[:-1])
        length = held if joiner.logprob_start is None else min(held, joiner.logprob_start)
        if self._cache.stateful and (saved is None or not saved.length == length == len(joiner.token_ids) - 1):
            length = 0
        return _Found(saved, held=held, length=length, missing=len(joiner.token_ids) - 1 - length)

    def _set_rows(self, first: int, joiners: Sequence[Joiner], found: Sequence[_Found]) -> None:
        """Set up the new rows, except for what is missing in the cache; the last prompt token is the pending one."""
        rows = slice(first, first + len(joiners))
        ints, floats = [], []
        for row, (joiner, one) in enumerate(zip(joiners, found, strict=True), first):
            greedy = joiner.temperature < GREEDY_BELOW
            top_k = joiner.top_k if joiner.top_k > 0 else self.vocab_size
            ints.append([len(joiner.token_ids) - 1, joiner.token_ids[-1], joiner.seed, top_k, greedy])
            floats.append([1.0 if greedy else joiner.temperature, joiner.top_p, joiner.min_p])
            self._lengths.append(len(joiner.token_ids) - 1)
            self._bans.append((joiner.ban_until, joiner.banned_ids) if joiner.banned_ids else None)
            self._places.append(joiner.adapter)
            self._cache.restore(row, one.saved, length=one.length)
        self._ints[rows] = torch.tensor(ints, device=self._device)
        self._floats[rows] = torch.tensor(floats, device=self._device)
        positions = torch.arange(self._cache.capacity, device=self._device)
        self._mask[rows] = torch.where(positions < self._length[rows, None], 0.0, -torch.inf).to(self._mask.dtype)
        self._settings = None

    # --- forward passes

    def _aim_adapters(self, rows: slice) -> None:
        if self.adapters is not None:
            self.adapters.aim(self._places[rows])

    def _forward(self, token_BT: Tensor, mask: Tensor, position_BT: Tensor, keep: int = 1) -> Tensor:
        with nullcontext() if self._routers is None else self._routers.record() as recording:
            output = self._model(
                input_ids=token_BT,
                attention_mask=mask,
                position_ids=position_BT,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=keep,
            )
            if recording is not None:
                self._cache.keep_experts(recording.take())
        return output.logits

    def _prefill(self, first: int, joiners: Sequence[Joiner], found: Sequence[_Found]) -> Sequence[list[float] | None]:
        """Compute the missing KV of rows `first`.., in chunks, and log-probs of the uncached tokens if requested."""
        longest = max(one.missing for one in found)
        padded = [
            [*joiner.token_ids[one.length :], *[0] * (longest - one.missing)]
            for joiner, one in zip(joiners, found, strict=True)
        ]
        token_BT = torch.tensor(padded, device=self._device)  # one column more than is computed
        cached_B1 = torch.tensor([[one.length] for one in found], device=self._device)
        length_B1 = self._length[first : first + len(found), None]
        wanted = any(joiner.logprob_start is not None for joiner in joiners)
        width = max(1, (min(CHUNK_TOKENS, LOGITS // self.vocab_size) if wanted else CHUNK_TOKENS) // len(joiners))
        width = longest if self._cache.stateful else width
        tables = []
        for begin in range(0, longest, width):
            end = min(begin + width, longest)
            position_BT = cached_B1 + torch.arange(begin, end, device=self._device)
            logits_BTV = self._prefill_chunk(first, token_BT[:, begin:end], position_BT, length_B1, all_logits=wanted)
            if wanted:
                logprobs_BTV = logits_BTV.float().log_softmax(dim=-1)
                tables.append(logprobs_BTV.gather(2, token_BT[:, begin + 1 : end + 1, None])[..., 0])
        if not wanted:
            return [None] * len(found)
        return [row[: one.missing] for row, one in zip(torch.cat(tables, dim=1).tolist(), found, strict=True)]

    def _prefill_chunk(
        self, first: int, token_BT: Tensor, position_BT: Tensor, length_B1: Tensor, *, all_logits: bool
    ) -> Tensor:
        rows = slice(first, first + token_BT.shape[0])
        capacity, trash = self._cache.capacity, self._slots * self._cache.capacity
        write_at = torch.where(position_BT < length_B1, self._row_ids[rows, None] * capacity + position_BT, trash)
        position_BT = torch.minimum(position_BT, length_B1)  # for padding, whose results are not used
        positions = int(position_BT.max()) + 1
        self._cache.aim(write_at.flatten(), rows=rows, positions=positions, first=self._cache.stateful)
        self._aim_adapters(rows)
        readable = torch.arange(positions, device=self._device) <= position_BT[:, :, None]
        mask = torch.where(readable, 0.0, -torch.inf).to(self._mask.dtype)[:, None]
        return self._forward(token_BT, mask, position_BT, keep=0 if all_logits else 1)

    def _draft_logits(self, drafts: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Tensor]:
        """Compute the pending token and the draft of every row; return the logits and the positions. Padding has the
        position of the row's last token, and is written to the extra row."""
        live = self._live
        longest = max(length + 1 + len(draft) for length, draft in zip(self._lengths, drafts, strict=True))
        self._grow(longest)
        padded = torch.tensor([[len(draft), *draft, *[0] * (width - 1 - len(draft))] for draft in drafts])
        drafted_B1, draft_BT = padded.to(self._device).split((1, width - 1), dim=1)
        offset_T = torch.arange(width, device=self._device)
        position_BT = self._length[:live, None] + torch.minimum(offset_T, drafted_B1)
        flat_BT = self._row_ids[:live, None] * self._cache.capacity + position_BT
        write_at_BT = flat_BT.masked_fill(offset_T > drafted_B1, self._slots * self._cache.capacity)
        positions = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, self._cache.capacity)
        self._cache.aim(write_at_BT.flatten(), rows=slice(0, live), positions=positions)
        readable = torch.arange(positions, device=self._device) <= position_BT[:, :, None]
        mask = torch.where(readable, 0.0, -torch.inf).to(self._mask.dtype)[:, None]
        self._aim_adapters(slice(0, self._live))
        token_BT = torch.cat((self._token[:live, None], draft_BT), dim=1)
        return self._forward(token_BT, mask, position_BT, keep=0), position_BT

    def _keep(self, counts: Sequence[int], token_BT: Tensor) -> None:
        """Keep the first `counts` of the tokens computed for each row; the last of them becomes its pending token.
        What the others leave behind the length is masked."""
        for row, count in enumerate(counts):
            self._mask[row, self._lengths[row] : self._lengths[row] + count] = 0.0
            self._lengths[row] += count
        count_B = torch.tensor(counts, device=self._device)
        self._token[: self._live] = token_BT.gather(1, count_B[:, None] - 1)[:, 0]
        self._length[: self._live] += count_B

    def _sample(self, logits_BV: Tensor) -> tuple[list[int], list[float]]:
        """Sample the next token of every row, which becomes its pending token."""
        for row, ban in enumerate(self._bans):
            if ban is not None and self._lengths[row] < ban[0]:
                logits_BV[row, list(ban[1])] = -torch.inf
        self._settings = self._settings or self._settings_now()
        token_B, logprob_B = sample(logits_BV, self._settings, self._length[: self._live])
        self._token[: self._live] = token_B
        logprobs: list[float] = logprob_B.tolist()
        return token_B.tolist(), logprobs

    def _settings_now(self) -> SamplingTensors:
        rows = slice(0, self._live)
        temperature, top_p, min_p = self._floats[rows].split(1, dim=1)
        top_k, greedy = self._top_k[rows, None], self._greedy[rows].bool()
        any_filter = bool(((top_p < 1) | (min_p > 0) | (top_k < self.vocab_size)).any())
        return SamplingTensors(
            temperature, greedy, top_p, top_k, min_p, self._seed[rows], bool(greedy.any()), any_filter
        )

    def _try(self, act: Callable[..., Result], *arguments: Any) -> Result:
        """Run a first forward pass; an unsupported architecture fails here, with a ConfigError."""
        try:
            with torch.inference_mode():
                return act(*arguments)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as err:
            kind, reason = type(self._model).__name__, str(err).partition("\n")[0]
            raise ConfigError(f"{kind} is not served by the embedded engine: {reason}") from err


def _agreement(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """Return the number of tokens that were sampled as drafted."""
    pairs = zip(draft, sampled, strict=False)
    return next((at for at, (token, other) in enumerate(pairs) if token != other), len(draft))


def _from_start(logprobs: list[float] | None, joiner: Joiner) -> list[float | None] | None:
    """Return the log-probs from `logprob_start` on; `logprobs` ends at the last prompt token, the first one is None."""
    if joiner.logprob_start is None:
        return None
    count = len(joiner.token_ids) - joiner.logprob_start - 1
    return [None, *(logprobs or [])[-count:]] if count else [None]


def _build(folder: Path, *, device: str, dtype: str) -> tuple[Any, frozenset[str]]:
    """Return the model, and the names of the tensors in the folder that the model does not use."""
    config = load_config(folder, field="--model-path")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: this machine has no CUDA device that torch can use; use cpu")
    disable_progress_bar()
    try:
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError("it is quantized; give a bfloat16 or float32 version of it, or use SGLang")
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=ATTENTION,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as err:  # anything that the class of a model raises
        reason = "its attention cannot be replaced" if ATTENTION in str(err) else err
        raise ConfigError(f"model folder {folder} cannot be loaded as a causal LM: {reason}") from err
    return model.eval().requires_grad_(False).to(device), frozenset(found["unexpected_keys"])


def _context_tokens(config: PretrainedConfig, filled: DynamicCache, *, kv_tokens: int) -> int:
    """Return the context length: at most the length up to which every token sees all earlier ones, and the rotary
    angles of a token do not depend on other tokens."""
    windows = [window for layer in filled.layers if (window := getattr(layer, "sliding_window", None))]
    known = (positions(config), dynamic_from(config), rope_limit(config), *windows)
    limits = [limit for limit in known if limit is not None]
    return min(limits, default=kv_tokens)


def _eos_token_ids(model: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in (model.config, model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        found.update([eos] if isinstance(eos, int) else eos or [])
    return frozenset(found)
