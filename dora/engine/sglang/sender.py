"""The sender process: rank 0 of a process group with one server, to which it broadcasts a version from the store.

It is a separate process so that neither the trainer nor the controller is ever in a collective with an engine: killing
the sender closes its sockets and ends a collective that hangs. Invariant: one order at a time, one group per order, and
no group outlives its order. Consumes: orders (lines of standard input). Produces: replies. Waits for: the next order,
the server's ranks at the rendezvous, and their receipt of each bucket. Unblocked by: the controller, the server, the
group's timeout. Ends with its standard input. The hidden command `dora send` starts it.

Groups are formed as in SGLang's private `init_custom_process_group` (0.5.20, srt/utils/common.py): the store has the
group's name as prefix twice, then the first device type of the backend. `init_process_group` uses other prefixes and
would never meet the server.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from dora.engine.sglang.orders import (
    Failed,
    Listening,
    Order,
    Reply,
    Scored,
    ScoreOrder,
    Send,
    SenderReady,
    Sent,
    TensorBucket,
)
from dora.model_files import read_config

Named = tuple[str, torch.Tensor]
#: Returns the log-probs of all tokens but the first, under the model in a folder.
ScorePrompt = Callable[[Path, Sequence[int]], list[float]]

PROMPT_TOKENS = 8
#: Prefix of a group's keys by backend: the first device type that torch lists for it.
_DEVICE_PREFIX = {"gloo": "cpu", "nccl": "cuda"}
_FAILURES = (OSError, LookupError, RuntimeError, ValueError, SafetensorError)  # torch raises RuntimeErrors


def run(score_prompt: ScorePrompt) -> None:
    """Carry out orders until standard input ends."""
    # Replies use a separate descriptor, because gloo writes log messages to standard output.
    with os.fdopen(os.dup(1), "wb", buffering=0) as replies:
        os.dup2(2, 1)

        def reply(message: Reply) -> None:
            replies.write(msgspec.json.encode(message) + b"\n")

        reply(SenderReady())
        decoder = msgspec.json.Decoder(Order)
        for line in sys.stdin.buffer:
            order = decoder.decode(line)
            try:
                if isinstance(order, Send):
                    _send(order, reply)
                    reply(Sent())
                else:
                    reply(_score(order, score_prompt))
            except _FAILURES as err:
                reply(Failed(f"{type(err).__name__}: {err}"))


def plan_buckets(tensors: Iterable[Named], *, bucket_bytes: int) -> list[list[Named]]:
    """Group consecutive tensors into buckets of at most `bucket_bytes`; a larger tensor has its own bucket."""
    buckets: list[list[Named]] = []
    room = 0
    for name, tensor in tensors:
        if not buckets or tensor.nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append((name, tensor))
        room -= tensor.nbytes
    return buckets


def _send(order: Send, reply: Callable[[Reply], None]) -> None:
    with ExitStack() as files:
        buckets = plan_buckets(_tensors(Path(order.folder), files), bucket_bytes=order.bucket_bytes)
        if not buckets:
            raise ValueError(f"{order.folder} holds no safetensors files")
        timeout = timedelta(seconds=order.timeout_s)
        store = _listen(order.address, timeout)
        reply(Listening(store.port, [_described(bucket) for bucket in buckets]))
        group = _join(order, store, timeout)
        for bucket in buckets:
            _broadcast(group, [tensor for _, tensor in bucket], device=_DEVICE_PREFIX[order.backend])


def _tensors(folder: Path, files: ExitStack) -> Iterator[Named]:
    """Yield all tensors of a version in the order of its files, memory-mapped."""
    for path in sorted(folder.glob("*.safetensors")):
        file = files.enter_context(safe_open(path, framework="pt", device="cpu"))
        for name in file.offset_keys():
            yield name, file.get_tensor(name)


def _described(bucket: Sequence[Named]) -> TensorBucket:
    return TensorBucket(
        names=[name for name, _ in bucket],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        shapes=[list(tensor.shape) for _, tensor in bucket],
    )


def _listen(address: str, timeout: timedelta) -> TCPStore:
    """Open the rendezvous on this address only; torch itself would listen on all."""
    listener = socket.create_server((address, 0))
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def _join(order: Send, store: Store, timeout: timedelta) -> Any:
    """Return the group when all ranks have joined."""
    for prefix in (order.group, f"{order.group}/", f"{_DEVICE_PREFIX[order.backend]}/"):
        store = PrefixStore(prefix, store)
    if order.backend == "nccl":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from CPU builds of torch

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return ProcessGroupNCCL(store, 0, order.world_size, nccl)
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # in torch's stubs it is another class
    gloo._devices = [ProcessGroupGloo.create_device(hostname=order.address)]
    gloo._timeout = timeout
    return ProcessGroupGloo(store, 0, order.world_size, gloo)


def _broadcast(group: Any, tensors: Sequence[torch.Tensor], *, device: str) -> None:
    """Return when the other ranks have received all tensors."""
    options = BroadcastOptions()
    options.rootRank = 0
    held = [tensor.to(device) for tensor in tensors]
    for work in [group.broadcast([tensor], options) for tensor in held]:
        work.wait()
    if device == "cuda":
        torch.cuda.synchronize()


def _score(order: ScoreOrder, score_prompt: ScorePrompt) -> Scored:
    folder = Path(order.folder)
    config = read_config(folder)
    vocab_size = config.get("text_config", config)["vocab_size"]
    token_ids = [vocab_size * i // PROMPT_TOKENS for i in range(PROMPT_TOKENS)]
    return Scored(token_ids, score_prompt(folder, token_ids))
