"""What a failing rank tells the user: one line, without the internals of a library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dora.errors import ConfigError, ProtocolError
from dora.trainer.main import reason_of
from dora.trainer.model import require_device

#: Rank 1 leaves; rank 0 waits for it in a collective.
LEFT_ALONE = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from dora.trainer.main import reason_of
def rank(number, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=number, world_size=2)
    dist.barrier()
    if number == 1:
        os._exit(0)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as err:
        print(reason_of(err), flush=True)
    os._exit(0)
if __name__ == "__main__":
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank, args=(port,), nprocs=2)
"""


def test_doras_own_errors_are_reported_unchanged() -> None:
    assert reason_of(ProtocolError("group 7\nis too old")) == "group 7 is too old"


def test_any_other_error_is_reported_with_its_type() -> None:
    assert reason_of(KeyError("x")) == "KeyError('x')"


def test_a_rank_without_its_own_gpu_says_which_setting_to_lower() -> None:
    with pytest.raises(
        ConfigError, match=r"^trainer.device: torch can use \d+ CUDA devices here, and rank 99 of this host"
    ):
        require_device("cuda", index=99)
    require_device("cpu", index=99)


@pytest.mark.deep
def test_a_rank_left_alone_in_a_collective_says_so(tmp_path) -> None:
    (tmp_path / "ranks.py").write_text(LEFT_ALONE)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "ranks.py")], capture_output=True, text=True, timeout=100, check=True
    )
    said = "a collective with another rank failed: that rank ended or hangs; see the trainer's log"
    assert said in done.stdout
