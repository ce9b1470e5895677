"""Entry point of a trainer rank: `torchrun ... -m dora.trainer.main`.

DORA_CONTROLLER (address), DORA_TOKEN and DORA_INCARNATION come from the controller, rank and world size from torchrun,
and everything else from the Configure message. A rank that fails before Stop sends TrainerFailed and exits with code 1;
torchrun then terminates the other ranks.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dora.errors import ConfigError, DoraError, ProtocolError, RemoteError
from dora.trainer.attention_gpu import describe
from dora.trainer.checkpoint import Saver, Storage
from dora.trainer.checkpointing import MODES, Mode
from dora.trainer.context import make_context
from dora.trainer.copies import count_copies, frozen_adapters
from dora.trainer.forecast import choose_mode
from dora.trainer.forward_check import check_training
from dora.trainer.full_disk import print_error
from dora.trainer.meeting import Meeting
from dora.trainer.memory import memory_errors, rank_memory, train_in_memory
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy, decoder_layers, require_device
from dora.trainer.optimizer import moment_bytes
from dora.trainer.publish import Publisher
from dora.trainer.pulse import Pulse, beat_with
from dora.trainer.resharding import Arrangement
from dora.trainer.spans import RankClock, process_start
from dora.trainer.step import Trainer
from dora.transport.messages import Configure, DeleteCheckpoint, MicroBatch, SaveCheckpoint, Stop, TrainerFailed
from dora.transport.trainer_end import TrainerEnd
from dora.weights.fence import StaleEpoch, pass_fence
from dora.weights.store import VersionStore

CONNECT_TIMEOUT_S = 120.0  # ranks may be started before the controller
MESSAGE_TIMEOUT_S = 24 * 3600.0  # rollout may be slow; the controller has its own timeout
COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # a rank that hangs must not block the others forever


def main() -> None:
    """Run one rank until Stop."""
    try:
        environment = _environment("DORA_CONTROLLER", "DORA_TOKEN", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    except ConfigError as err:
        raise SystemExit(f"dora trainer: {err}") from None
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    end = TrainerEnd(
        address=environment["DORA_CONTROLLER"],
        token=environment["DORA_TOKEN"],
        rank=rank,
        world_size=world_size,
        incarnation=int(os.environ.get("DORA_INCARNATION", "0")),
        has_lease="DORA_LEASE" in os.environ,
    )
    try:
        end.connect(CONNECT_TIMEOUT_S)
        run(end, local_rank=int(environment["LOCAL_RANK"]))
    except Exception as err:  # noqa: BLE001 the process ends, with the traceback in its log
        if not isinstance(err, DoraError):
            traceback.print_exc()  # a bug
        _fail(end, err)
    finally:
        end.close()


def run(end: TrainerEnd, *, local_rank: int) -> None:
    """Run one rank from Configure to Stop."""
    clock = RankClock(int(os.environ["RANK"]), began=process_start())
    order = end.receive(MESSAGE_TIMEOUT_S)
    if not isinstance(order, Configure):
        raise ProtocolError(f"the first message is {type(order).__name__}, expected Configure")
    settings = order.settings
    torch.set_num_threads(settings.threads)
    require_device(settings.device, index=local_rank)
    if settings.device == "cuda":
        torch.cuda.set_device(local_rank)
    first, second = _join("nccl" if settings.device == "cuda" else "gloo")
    mesh = make_mesh(
        settings.device,
        shard_ranks=settings.shard_ranks,
        expert_ranks=settings.expert_ranks,
        tensor_ranks=settings.tensor_ranks,
    )
    context = make_context(settings.context_ranks)
    if settings.device != "cuda":
        _stop_listening()
    if dist.get_rank() == 0:
        print(describe(settings.device), flush=True)  # noqa: T201
    device = torch.device("cuda", local_rank) if settings.device == "cuda" else torch.device("cpu")
    pulse = Pulse(dist.get_rank(), clock=clock, send=end.try_send)
    pulse.start()
    with memory_errors(device, during="while the model was loaded", change="use a smaller model"):
        mode, chosen = _checkpointing(order, device)
        policy = Policy(
            Path(order.model_path),
            mesh=mesh,
            dtype=getattr(torch, settings.dtype),
            activation_checkpointing=mode,
            compiled=settings.compile,
            lora=settings.lora,
            frozen_adapters=frozen_adapters(settings),
        )
        checked = check_training(
            policy,
            dtype=settings.dtype,
            shared_prompts=settings.shared_prompts,
            longest=settings.longest_request,
            context=context,
        )
        fail = partial(_fail, end)
        trainer = Trainer(
            order,
            end=end,
            policy=policy,
            layout=replace(checked.layout, alike=settings.tensor_ranks),
            publisher=_publisher(order, end, policy, PrefixStore("versions", first), fail),
            saver=_saver(order, end, policy, PrefixStore("checkpoints", second), fail),
            clock=clock,
        )
        beat_with(decoder_layers(policy.model), clock)
        trainer.start(note="; ".join(note for note in (checked.note, chosen) if note))
    clock.switch("waiting")
    while not isinstance(message := end.receive(MESSAGE_TIMEOUT_S), Stop):
        match message:
            case MicroBatch():
                with train_in_memory(message, settings, device):
                    trainer.train(message)
            case SaveCheckpoint():
                trainer.save_checkpoint()
            case DeleteCheckpoint():
                trainer.drop_checkpoint(message.name)
            case Configure():
                raise ProtocolError("a second Configure")
    trainer.close()
    pulse.stop()
    dist.destroy_process_group()


def _checkpointing(order: Configure, device: torch.device) -> tuple[Mode, str]:
    """Return the kind of checkpointing of all ranks and, if it is not what a user expects, a note; a collective."""
    settings = order.settings
    if settings.activation_checkpointing != "auto":
        return settings.activation_checkpointing, ""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory = torch.tensor(rank_memory(device, ranks_here=ranks_here), device=device)
    dist.all_reduce(memory, dist.ReduceOp.MIN)
    chosen = torch.zeros((), dtype=torch.int64, device=device)
    if dist.get_rank() == 0:
        mode, found = choose_mode(
            Path(order.model_path),
            dtype=getattr(torch, settings.dtype),
            tokens=settings.micro_batch_tokens,
            longest=-(-settings.longest_request // settings.context_ranks),
            ranks=settings.shard_ranks or dist.get_world_size(),
            memory=int(memory),
            moments=moment_bytes(optimizer=settings.optimizer, optimizer_state=settings.optimizer_state),
            copies=count_copies(settings),
            copies_on_host=settings.copies == "host",
            expert_ranks=settings.expert_ranks,
            tensor_ranks=settings.tensor_ranks,
            lora=settings.lora,
            frozen_adapters=frozen_adapters(settings),
        )
        chosen.fill_(MODES.index(mode))
        figures = f"a rank is forecast to take {found.total / 2**30:.1f} of {int(memory) / 2**30:.1f} GB"
        print(f"activation checkpointing: {mode}; {figures}", flush=True)  # noqa: T201
    dist.broadcast(chosen, 0)
    mode = MODES[int(chosen)]
    return mode, f"trainer.activation_checkpointing: {mode}, chosen to save memory" if mode != "none" else ""


def _join(backend: str) -> tuple[Store, Store]:
    """Join the process group that torchrun's environment describes; return stores for two threads' words. Ranks of one
    host use the file DORA_STORE as their store, because a TCPStore accepts commands from anyone who can reach
    its port. Ranks of several hosts use torchrun's TCPStore on the first host."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    file = os.environ.get("DORA_STORE")
    if file is None or int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size:
        store: Any = next(rendezvous("env://"))[0]
    else:
        store = FileStore(file, world_size)
    store.set_timeout(COLLECTIVE_TIMEOUT)
    group = PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    return store.clone(), store.clone()  # a connection each: one that waits holds its lock


def _stop_listening() -> None:
    """Close gloo's listening ports once all ranks are connected: gloo accepts any connection and never closes one."""
    dist.barrier()
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            with socket.socket() as inert:  # gloo keeps the descriptor and will close it
                os.dup2(inert.fileno(), connection.fd, inheritable=False)


def _publisher(
    order: Configure, end: TrainerEnd, policy: Policy, words: Store, fail: Callable[[BaseException], None]
) -> Publisher:
    if dist.get_rank() == 0:
        words.set("writers", os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))
    return Publisher(
        VersionStore(
            memory_root=Path(order.memory_root), durable_root=Path(order.durable_root), fence=_fence_of(order)
        ),
        policy=policy,
        model_path=Path(order.model_path),
        dtype=order.settings.publish_dtype,
        serves_adapters=order.settings.serves_adapters,
        words=words,
        # Only the ranks of rank 0's host can write into its folders, and one copy of the weights is enough.
        writers=min(int(words.get("writers")), policy.sharding.size()),
        report=end.send,
        on_failure=fail,
    )


def _saver(
    order: Configure, end: TrainerEnd, policy: Policy, words: Store, fail: Callable[[BaseException], None]
) -> Saver:
    rank, size, fence = dist.get_rank(), dist.get_world_size(), _fence_of(order)
    storage = Storage(
        parent=Path(order.checkpoints),
        here=order.ranks_here or tuple(range(size)),
        arrangement=Arrangement(policy.sharding.size(), order.settings.expert_ranks, order.settings.tensor_ranks),
        divided=policy.may_be_divided,
        device=policy.device,
        meeting=Meeting(words, rank=rank, size=size, fence=fence),
        fence=fence,
    )
    return Saver(storage, report=end.send, on_failure=fail)


def _fence_of(order: Configure) -> Callable[[], None]:
    return partial(pass_fence, Path(order.fence), epoch=order.epoch, incarnation=order.incarnation)


def _fail(end: TrainerEnd, err: BaseException) -> NoReturn:
    """Exit without waiting for other threads: where one that writes has failed, the main thread may be waiting for a
    message; and where the main thread has, those that write may be waiting for ranks that are gone."""
    _report_failure(end, int(os.environ["RANK"]), err)
    end.close()
    sys.stdout.flush()
    os._exit(1)


def _report_failure(end: TrainerEnd, rank: int, err: BaseException) -> None:
    """Print the whole error to this process's log, and send it to the controller as one line."""
    whole = str(err) if isinstance(err, DoraError) else repr(err)
    print_error(f"rank {rank}: {' '.join(whole.split())}")
    end.try_send(TrainerFailed(rank=rank, reason=reason_of(err), is_final=_is_final(err)))


def _is_final(err: BaseException) -> bool:
    """Return whether a restart of the ranks would not help: for invalid input, a full disk, too little memory or a
    message that breaks the protocol. It may help after the failure of another process, or an unexpected error."""
    is_of_others = isinstance(err, RemoteError | StaleEpoch) and not isinstance(err, ProtocolError)
    return isinstance(err, DoraError) and not is_of_others


def reason_of(err: BaseException) -> str:
    """Return one line for a user. Errors of gloo and NCCL only mention sockets, so they are replaced."""
    if isinstance(err, DoraError):
        return " ".join(str(err).split())
    if isinstance(err, RuntimeError) and any(name in str(err) for name in ("gloo", "NCCL")):
        return "a collective with another rank failed: that rank ended or hangs; see the trainer's log"
    return " ".join(repr(err).split())


def _environment(*names: str) -> dict[str, str]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(f"{missing[0]} is not set; start ranks with torchrun, with DORA_CONTROLLER and DORA_TOKEN")
    return {name: os.environ[name] for name in names}


if __name__ == "__main__":
    main()
