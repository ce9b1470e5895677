"""Entry of a trainer rank: `torchrun ... -m dora.trainer.main`.

The controller is found by DORA_CONTROLLER (its address) and DORA_TOKEN; rank and world size come from torchrun. All
else arrives in Configure. Whatever ends a rank before Stop is sent as TrainerFailed, and the exit code is 1; torchrun
then ends the other ranks.

Main loop: consumes messages of the controller in order; produces trained steps; waits for the next message;
unblocked by it, ended by Stop.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from dora.errors import ConfigError, DoraError, ProtocolError
from dora.trainer.model import Policy, make_mesh, require_device
from dora.trainer.publish import Publisher
from dora.trainer.step import Trainer
from dora.transport.messages import Configure, MicroBatch, SaveCheckpoint, Stop, TrainerFailed
from dora.transport.trainer_end import TrainerEnd
from dora.weights.store import VersionStore

CONNECT_TIMEOUT_S = 120.0  # ranks may be started before the controller
MESSAGE_TIMEOUT_S = 24 * 3600.0  # rollout may be slow; the controller watches its own progress
COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # a rank that hangs must not hold the others for ever


def main() -> None:
    """Run one rank until Stop."""
    try:
        environment = _environment("DORA_CONTROLLER", "DORA_TOKEN", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    except ConfigError as err:
        raise SystemExit(f"dora trainer: {err}") from None
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    end = TrainerEnd(
        address=environment["DORA_CONTROLLER"], token=environment["DORA_TOKEN"], rank=rank, world_size=world_size
    )
    try:
        end.connect(CONNECT_TIMEOUT_S)
        run(end, local_rank=int(environment["LOCAL_RANK"]))
    except Exception as err:
        _report_failure(end, rank, err)
        if isinstance(err, DoraError):
            raise SystemExit(1) from err
        raise  # a bug: torchrun shows the traceback
    finally:
        end.close()


def run(end: TrainerEnd, *, local_rank: int) -> None:
    """From Configure to Stop."""
    order = end.receive(MESSAGE_TIMEOUT_S)
    if not isinstance(order, Configure):
        raise ProtocolError(f"the first message is {type(order).__name__}, expected Configure")
    settings = order.settings
    torch.set_num_threads(settings.threads)
    require_device(settings.device, index=local_rank)
    if settings.device == "cuda":
        torch.cuda.set_device(local_rank)
    _join("nccl" if settings.device == "cuda" else "gloo")
    policy = Policy(Path(order.model_path), mesh=make_mesh(settings.device), dtype=getattr(torch, settings.dtype))
    publisher = _publisher(order, end) if dist.get_rank() == 0 else None
    trainer = Trainer(order, end=end, policy=policy, publisher=publisher)
    trainer.start()
    while not isinstance(message := end.receive(MESSAGE_TIMEOUT_S), Stop):
        match message:
            case MicroBatch():
                trainer.train(message)
            case SaveCheckpoint():
                trainer.save_checkpoint()
            case Configure():
                raise ProtocolError("a second Configure")
    if publisher is not None:
        publisher.close()
    dist.destroy_process_group()


def _join(backend: str) -> None:
    """The process group of all ranks, by torchrun's environment. Where they meet on loopback, their store listens there
    alone: `env://` opens it on every interface, to anybody (torch's TCPStore asks for no password)."""
    address, is_served = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_served or address != "127.0.0.1":
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        return
    port, rank, world_size = (int(os.environ[name]) for name in ("MASTER_PORT", "RANK", "WORLD_SIZE"))
    listener = socket.create_server((address, port)).detach() if rank == 0 else None  # the store's from here on
    store = TCPStore(
        address, port, world_size, is_master=rank == 0, timeout=COLLECTIVE_TIMEOUT, master_listen_fd=listener
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)


def _publisher(order: Configure, end: TrainerEnd) -> Publisher:
    def fail(err: BaseException) -> None:
        """The main thread may be waiting for work that will never come, so the process ends from here."""
        _report_failure(end, 0, err)
        end.close()
        os._exit(1)

    return Publisher(
        VersionStore(memory_root=Path(order.memory_root), durable_root=Path(order.durable_root)),
        model_path=Path(order.model_path),
        dtype=order.settings.publish_dtype,
        report=end.send,
        on_failure=fail,
    )


def _report_failure(end: TrainerEnd, rank: int, err: BaseException) -> None:
    """In full into this process's log, as one line to the controller."""
    print(f"dora trainer rank {rank}: {' '.join(repr(err).split())}", file=sys.stderr)  # noqa: T201
    end.try_send(TrainerFailed(rank=rank, reason=reason_of(err)))


def reason_of(err: BaseException) -> str:
    """One line for a user; the backends of collectives tell of their sockets."""
    if isinstance(err, DoraError):
        return " ".join(str(err).split())
    if isinstance(err, RuntimeError) and any(name in str(err) for name in ("gloo", "NCCL")):
        return "a collective with another rank failed; that rank ended or hangs, the trainer's log says more"
    return " ".join(repr(err).split())


def _environment(*names: str) -> dict[str, str]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(f"{missing[0]} is not set; start ranks by torchrun, with DORA_CONTROLLER and DORA_TOKEN")
    return {name: os.environ[name] for name in names}


if __name__ == "__main__":
    main()
