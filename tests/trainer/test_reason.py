"""What a failing rank tells the user: one line, without the internals of a library."""

from __future__ import annotations

import os
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


#: Its main thread fails while a thread that writes waits for another rank.
FAILS = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from dora.errors import RunFailed
from dora.trainer import main

class End:
    def connect(self, timeout_s): pass
    def try_send(self, message): print(message.reason, flush=True)
    def close(self): pass

def run(end, *, local_rank):
    ThreadPoolExecutor(1).submit(time.sleep, 60.0)
    raise {"bug": KeyError("x"), "known": RunFailed("no more")}[sys.argv[1]]

main.TrainerEnd = lambda **_: End()
main.run = run
main.main()
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


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "reason"), [("bug", "KeyError('x')"), ("known", "no more")])
def test_a_rank_that_fails_does_not_wait_for_its_other_threads(kind: str, reason: str) -> None:
    ranks = {"DORA_CONTROLLER": "", "DORA_TOKEN": "", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", FAILS, kind], capture_output=True, text=True, timeout=45, env={**os.environ, **ranks}
    )
    assert done.returncode == 1
    assert done.stdout.strip() == reason
    assert ("Traceback" in done.stderr) == (kind == "bug")
