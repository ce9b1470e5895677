"""A small `transformers` causal LM as a Decoder: rows of different lengths in one KV tensor, stepped together.

The model's own forward runs; DORA supplies only the cache and the attention call. Rows 0..n-1 are the live requests and
always dense, so that a step reads views of the KV tensor and copies nothing; when a row leaves, the last one takes its
place. A prefill stops before the last prompt token: like a sampled token, that one is pending and is computed in the
next step with those of all other rows, so that a request whose prompt is cached needs no separate forward. Invariant:
KV positions below a row's length hold its tokens in order, and the positions behind are masked and finite. An extra row
receives the writes of padding. Not thread-safe.

Legend: L layers, B rows, T new tokens per row, S positions read, W key width (KV heads x head size), V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import AttentionInterface
from transformers.utils.logging import disable_progress_bar

from dora.embedded.batcher import Joined, Joiner
from dora.embedded.prefixes import PrefixCache
from dora.embedded.sampling import GREEDY_BELOW, SamplingTensors, sample
from dora.errors import ConfigError

ATTENTION = "dora_slots"
DTYPES = ("float32", "bfloat16", "float16", "auto")
CHUNK_TOKENS = 2048  # maximum number of new tokens in one prefill forward: bounds its mask and its activations
LOGITS = 2**26  # maximum number of logits in one prefill forward that returns prompt log-probs
LENGTH_STEP = 32  # positions read are rounded up to this, so that kernels see few sizes


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA over slot views. In a decode step, the query heads of a KV head form one block, so keys are not repeated."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ConfigError("this model's attention (soft cap or sinks) is not supported by the embedded engine")
    rows, heads, new, size = query.shape
    kv_heads = key.shape[1]
    if new == 1:
        query = query.reshape(rows, kv_heads, heads // kv_heads, size)
    else:
        key, value = repeat_kv(key, heads // kv_heads), repeat_kv(value, heads // kv_heads)
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, heads, new, -1).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attend)


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """The view of the KV tensor that one forward writes to (`write_at`) and reads (`rows`, `positions`)."""

    def __init__(self, *, layers: int, slots: int, heads: int, size: int, dtype: torch.dtype, device: str) -> None:
        super().__init__(layers=[])
        self.heads = heads
        self.capacity = 0
        self.kv = torch.zeros(layers, 2, slots + 1, 0, heads * size, dtype=dtype, device=device)

    def grow(self, capacity: int) -> None:
        layers, two, rows, old, width = self.kv.shape
        kv = torch.zeros(layers, two, rows, capacity, width, dtype=self.kv.dtype, device=self.kv.device)
        kv[:, :, :, :old] = self.kv
        self.kv, self.capacity = kv, capacity

    def aim(self, write_at: Tensor, *, rows: slice, positions: int) -> None:
        self.write_at = write_at  # flat (row, position) index of every new token
        layers, _, num_rows, capacity, width = self.kv.shape
        self._flat = self.kv.view(layers, 2, num_rows * capacity, width).unbind()
        read = self.kv[:, :, rows, :positions].unflatten(-1, (self.heads, -1)).transpose(3, 4)
        self._read = read.unbind()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        flat, read = self._flat[layer_idx], self._read[layer_idx]
        width = flat.shape[-1]
        flat[0].index_copy_(0, self.write_at, key_states.transpose(1, 2).reshape(-1, width))
        flat[1].index_copy_(0, self.write_at, value_states.transpose(1, 2).reshape(-1, width))
        return read[0], read[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


@dataclass(frozen=True, slots=True)
class _Found:
    """The part of a prompt that the prefix cache holds; the last token is never taken from it."""

    kv: Tensor | None
    held: int  # tokens it holds
    length: int  # tokens taken from it
    missing: int  # tokens to prefill


class CausalDecoder:
    """Implements `dora.embedded.batcher.Decoder`."""

    def __init__(self, folder: Path, *, slots: int, kv_tokens: int, device: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = _build(folder, device=device, dtype=dtype)
        config = self._model.config
        self.context_tokens = _context_tokens(config)
        self.vocab_size = config.vocab_size
        self.model_type, self.architectures = config.model_type, list(config.architectures or [])
        self.eos_token_ids = _eos_token_ids(self._model)
        self._device, self._slots, self._live = device, slots, 0
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._cache = SlotCache(
            layers=config.num_hidden_layers, slots=slots, heads=heads, size=size, dtype=self._model.dtype, device=device
        )
        self._mask = torch.zeros(slots, 0, dtype=self._model.dtype, device=device)  # 0 readable, -inf not
        self._ints = torch.zeros(slots, 5, dtype=torch.int64, device=device)
        self._length, self._token, self._seed, self._top_k, self._greedy = self._ints.unbind(1)
        self._floats = torch.ones(slots, 3, device=device)
        self._settings: SamplingTensors | None = None  # of all live rows; None when they have changed
        self._poisoned = False  # the model returned NaN, so the KV may contain NaN
        self._lengths: list[int] = []  # of the live rows, on the host
        self._bans: list[tuple[int, Sequence[int]] | None] = []  # (first index allowed, token ids) of the live rows
        self._row_ids = torch.arange(slots, device=device)
        self._prefixes: PrefixCache[Tensor] = PrefixCache(budget_tokens=kv_tokens // 4)
        self._grow(min(128, self.context_tokens))
        self._warm_up()

    # --- Decoder

    @torch.inference_mode()
    def join(self, joiners: Sequence[Joiner]) -> list[Joined]:
        """Add rows. Those to prefill come first, so that they form one view; the others need no forward pass."""
        found = [self._find(joiner) for joiner in joiners]
        order = sorted(range(len(joiners)), key=lambda i: found[i].missing == 0)
        joiners, found = [joiners[i] for i in order], [found[i] for i in order]
        first, self._live = self._live, self._live + len(joiners)
        self._grow(max(len(joiner.token_ids) for joiner in joiners))
        self._set_rows(first, joiners, found)
        missing = sum(one.missing > 0 for one in found)
        prompt_logprobs: list[list[float] | None] = [None] * len(joiners)
        if missing:
            prompt_logprobs[:missing] = self._prefill(first, joiners[:missing], found[:missing])
        for row, (joiner, one) in enumerate(zip(joiners, found, strict=True), first):
            if one.held < len(joiner.token_ids) - 1:
                known = joiner.token_ids[:-1]
                self._prefixes.put(joiner.namespace, known, self._cache.kv[:, :, row, : len(known)].clone())
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
        logits_BV = self._forward(self._token[:live, None], mask, position_B[:, None])[:, -1]
        position_B += 1
        self._lengths = [length + 1 for length in self._lengths]
        return self._sample(logits_BV)

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        self._live -= 1
        last = self._live
        if row != last:
            kv, length = self._cache.kv, self._lengths[last]
            kv[:, :, row, :length] = kv[:, :, last, :length]
            for state in (self._mask, self._ints, self._floats):
                state[row] = state[last]
            self._lengths[row], self._bans[row] = self._lengths[last], self._bans[last]
        self._lengths.pop()
        self._bans.pop()
        self._settings = None

    @torch.inference_mode()
    def load(self, folder: Path) -> None:
        _copy_weights(self._model, folder)
        self._forget_nan()

    @torch.inference_mode()
    def put(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        state = self._model.state_dict()
        for name, source in tensors:
            if name in state:  # SGLang skips the others too
                _copy(source, state[name], name=name, file="the bucket")
        self._forget_nan()

    def checksums(self) -> dict[str, str]:
        return {name: _checksum(tensor) for name, tensor in self._model.state_dict().items()}

    def _forget_nan(self) -> None:
        if self._poisoned and not self._live:  # masked positions count 0 times what they hold, and 0 x NaN is NaN
            self._cache.kv.zero_()
            self._poisoned = False

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
        held, kv = self._prefixes.match(joiner.namespace, joiner.token_ids[:-1])
        length = held if joiner.logprob_start is None else min(held, joiner.logprob_start)
        return _Found(kv, held=held, length=length, missing=len(joiner.token_ids) - 1 - length)

    def _set_rows(self, first: int, joiners: Sequence[Joiner], found: Sequence[_Found]) -> None:
        """Set up the new rows, except for KV that is missing; the last prompt token is the pending one."""
        rows = slice(first, first + len(joiners))
        ints, floats = [], []
        for row, (joiner, one) in enumerate(zip(joiners, found, strict=True), first):
            greedy = joiner.temperature < GREEDY_BELOW
            top_k = joiner.top_k if joiner.top_k > 0 else self.vocab_size
            ints.append([len(joiner.token_ids) - 1, joiner.token_ids[-1], joiner.seed, top_k, greedy])
            floats.append([1.0 if greedy else joiner.temperature, joiner.top_p, joiner.min_p])
            self._lengths.append(len(joiner.token_ids) - 1)
            self._bans.append((joiner.ban_until, joiner.banned_ids) if joiner.banned_ids else None)
            if one.kv is not None:
                self._cache.kv[:, :, row, : one.length] = one.kv[:, :, : one.length]
        self._ints[rows] = torch.tensor(ints, device=self._device)
        self._floats[rows] = torch.tensor(floats, device=self._device)
        positions = torch.arange(self._cache.capacity, device=self._device)
        self._mask[rows] = torch.where(positions < self._length[rows, None], 0.0, -torch.inf).to(self._mask.dtype)
        self._settings = None

    # --- forward passes

    def _forward(self, token_BT: Tensor, mask: Tensor, position_BT: Tensor, keep: int = 1) -> Tensor:
        return self._model(
            input_ids=token_BT,
            attention_mask=mask,
            position_ids=position_BT,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits

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
        self._cache.aim(write_at.flatten(), rows=rows, positions=positions)
        readable = torch.arange(positions, device=self._device) <= position_BT[:, :, None]
        mask = torch.where(readable, 0.0, -torch.inf).to(self._mask.dtype)[:, None]
        return self._forward(token_BT, mask, position_BT, keep=0 if all_logits else 1)

    def _sample(self, logits_BV: Tensor) -> tuple[list[int], list[float]]:
        """Sample the next token of every row, which becomes its pending token."""
        for row, ban in enumerate(self._bans):
            if ban is not None and self._lengths[row] < ban[0]:
                logits_BV[row, list(ban[1])] = -torch.inf
        self._settings = self._settings or self._settings_now()
        token_B, logprob_B = sample(logits_BV, self._settings, self._length[: self._live])
        self._token[: self._live] = token_B
        logprobs: list[float] = logprob_B.tolist()
        self._poisoned |= math.isnan(sum(logprobs))
        return token_B.tolist(), logprobs

    def _settings_now(self) -> SamplingTensors:
        rows = slice(0, self._live)
        temperature, top_p, min_p = self._floats[rows].split(1, dim=1)
        top_k, greedy = self._top_k[rows, None], self._greedy[rows].bool()
        any_filter = bool(((top_p < 1) | (min_p > 0) | (top_k < self.vocab_size)).any())
        return SamplingTensors(
            temperature, greedy, top_p, top_k, min_p, self._seed[rows], bool(greedy.any()), any_filter
        )

    def _warm_up(self) -> None:
        """Run one request, so that kernels are loaded and an unsupported architecture is found at the start."""
        joiner = Joiner(token_ids=[0, 0], namespace="", seed=0)
        try:
            self.join([joiner])
            self.step()
        except (TypeError, ValueError, RuntimeError) as err:
            kind = type(self._model).__name__
            raise ConfigError(
                f"{kind} does not run on the embedded engine, which needs standard attention: {err}"
            ) from err
        self.leave(0)
        self.flush()


def _from_start(logprobs: list[float] | None, joiner: Joiner) -> list[float | None] | None:
    """Return the log-probs from `logprob_start` on; `logprobs` ends at the last prompt token, the first one is None."""
    if joiner.logprob_start is None:
        return None
    count = len(joiner.token_ids) - joiner.logprob_start - 1
    return [None, *(logprobs or [])[-count:]] if count else [None]


def _build(folder: Path, *, device: str, dtype: str) -> Any:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json: give a Hugging Face model folder")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: this machine has no CUDA device that torch can use; use cpu")
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=ATTENTION,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as err:
        raise ConfigError(f"model folder {folder} cannot be loaded as a causal LM: {err}") from err
    return model.eval().requires_grad_(False).to(device)


def _context_tokens(config: PretrainedConfig) -> int:
    """Return the context length, at most that of the sliding window, within which attention is full."""
    context = config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        return min(context, window)
    return context


def _eos_token_ids(model: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in (model.config, model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        found.update([eos] if isinstance(eos, int) else eos or [])
    return frozenset(found)


def _copy(source: Tensor, target: Tensor, *, name: str, file: object) -> None:
    if source.shape != target.shape:
        raise ConfigError(f"{file}: {name} has shape {list(source.shape)}, the served model has {list(target.shape)}")
    target.copy_(source)


def _checksum(tensor: Tensor) -> str:
    """SGLang's checksum on a CPU: the first eight bytes of the SHA-256 of the tensor's bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()[:16]


def _copy_weights(model: Any, folder: Path) -> None:
    """Copy a checkpoint into the live parameters: same names, same shapes, any safetensors sharding."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors files")
    state = model.state_dict()
    missing = set(state)
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118  a safetensors file is not a mapping
                if name not in state:
                    raise ConfigError(f"{file} holds {name}, which the served model does not have")
                _copy(tensors.get_tensor(name), state[name], name=name, file=file)
                missing.discard(name)
    held = {state[name].data_ptr() for name in set(state) - missing}
    missing = {name for name in missing if state[name].data_ptr() not in held}  # tied weights are stored once
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} weights of the served model, first {min(missing)}")
