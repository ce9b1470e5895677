"""Checkpoints are whole or refused with a clear error; one process plays all ranks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Event

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from dora import files
from dora.app.checkpoint_time import checkpoint_bytes
from dora.app.settings import RankPaths, configure_message
from dora.app.trainer_check import outline_of
from dora.config.load import load as load_config
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder
from dora.seed.policy import path as seed_path
from dora.trainer import checkpoint, meeting
from dora.trainer.main import main as rank_main
from dora.trainer.meeting import Meeting
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import Layout
from dora.trainer.resharding import Arrangement
from dora.trainer.step import Trainer
from dora.weights.checkpoints import checkpoints_in
from dora.weights.fence import StaleEpoch, pass_fence, raise_fence
from tests.trainer.publishing import Unpublished, make_saver

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _single_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(3, 2, generator=generator), "exp_avg/w": torch.randn(3, 2, generator=generator)}


CHAIN = "0a1b2c3d4e5f"


def storage(parent, *, fence=lambda: None):
    words = Meeting(HashStore(), rank=0, size=1, fence=fence)
    return checkpoint.Storage(
        parent=parent, here=(0,), arrangement=Arrangement(1), device=CPU, meeting=words, fence=fence
    )


def save(parent, *, step, seed, chain=CHAIN, fence=lambda: None):
    return checkpoint.save(storage(parent, fence=fence), step=step, chain=chain, tensors=state(seed)).folder


def load(*paths, tensors, may_start_over=False):
    return checkpoint.load(storage(paths[0].parent), paths, tensors=tensors, may_start_over=may_start_over)


def test_a_checkpoint_loads_what_was_saved(tmp_path):
    folder = save(tmp_path, step=7, seed=1)
    loaded = state(2)
    assert load(folder, tensors=loaded) == checkpoint.Loaded(7, CHAIN, ())
    torch.testing.assert_close(loaded, state(1), atol=0, rtol=0)


def test_every_byte_of_a_checkpoint_is_on_the_disk_before_it_is_visible(tmp_path):
    done = []
    with files.observed(done.append):
        folder = save(tmp_path, step=7, seed=1)
    renamed = next(i for i, operation in enumerate(done) if operation.kind == "rename")
    before = [(operation.kind, operation.path.name) for operation in done[:renamed]]
    assert [path for kind, path in before if kind == "sync"] == ["rank-0.safetensors", "manifest.json"]
    assert before[-1] == ("sync_folder", f".{folder.name}")
    assert [(operation.kind, operation.path) for operation in done[renamed + 1 :]] == [("sync_folder", tmp_path)]


def test_a_rank_waits_for_the_files_of_another_longer_than_for_other_words(tmp_path, monkeypatch):
    """The other one says that it has written its file after this one has waited as long as for any other word."""
    monkeypatch.setattr(meeting, "PEER_TIMEOUT_S", 0.0)
    words, has_waited = HashStore(), Event()
    own, other = (Meeting(words, rank=rank, size=2, fence=has_waited.set) for rank in range(2))

    def write_slowly():
        other.gather("", what="a look for a checkpoint")
        other.gather(what="the folder of a checkpoint")
        assert has_waited.wait(20)
        other.gather(what="the files of a checkpoint")
        other.gather(what="the end of a checkpoint")

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write_slowly)
        saved = checkpoint.save(replace(storage(tmp_path), meeting=own), step=7, chain=CHAIN, tensors=state(1))
        written.result(20)
    assert load(saved.folder, tensors=state(2)).step == 7


def test_checkpoints_of_two_histories_coexist(tmp_path):
    first = save(tmp_path, step=4, seed=1)
    second = save(tmp_path, step=4, seed=2, chain="another")
    for folder, seed in ((first, 1), (second, 2)):
        loaded = state(3)
        load(folder, tensors=loaded)
        torch.testing.assert_close(loaded, state(seed), atol=0, rtol=0)


def test_a_rank_of_a_replaced_controller_makes_no_checkpoint_visible(tmp_path):
    raise_fence(tmp_path / "epoch", epoch=1)
    fence = partial(pass_fence, tmp_path / "epoch", epoch=0)
    with pytest.raises(StaleEpoch, match=r"1\.0 have taken over the run; this process belongs to 0\.0"):
        save(tmp_path, step=4, seed=1, fence=fence)
    assert checkpoints_in(tmp_path) == []


def test_a_damaged_checkpoint_of_the_same_history_is_written_again(tmp_path):
    folder = save(tmp_path, step=4, seed=1)
    truncate(folder)
    assert save(tmp_path, step=4, seed=1) == folder
    assert load(folder, tensors=state(2)).step == 4


def truncate(folder):
    os.truncate(folder / "rank-0.safetensors", 40)


def flip_a_byte(folder):
    path = folder / "rank-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut_the_header(folder):
    path = folder / "rank-0.safetensors"
    path.write_bytes(bytes(8) + path.read_bytes()[8:])


def lose_a_rank(folder):
    (folder / "rank-0.safetensors").unlink()


def lose_the_manifest(folder):
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "is incomplete"),
        (flip_a_byte, "does not match its checksum"),
        (cut_the_header, "is damaged"),
        (lose_the_manifest, "is incomplete"),
        (lose_a_rank, "is incomplete"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_set_aside(tmp_path, damage, reason):
    older, newer = save(tmp_path, step=1, seed=1), save(tmp_path, step=2, seed=2, chain="newer")
    damage(newer)
    loaded = state(3)
    found = load(newer, older, tensors=loaded)
    assert (found.step, found.chain) == (1, CHAIN)
    assert len(found.skipped) == 1
    assert reason in found.skipped[0]
    torch.testing.assert_close(loaded, state(1), atol=0, rtol=0)
    assert not newer.exists()
    assert [path.name.split("-")[0] for path in tmp_path.iterdir() if path.name.startswith(".")] == [".damaged"]


def test_without_a_whole_checkpoint_training_starts_over_only_if_allowed(tmp_path):
    folder = save(tmp_path, step=1, seed=1)
    flip_a_byte(folder)
    with pytest.raises(ConfigError, match=r"no checkpoint can be loaded: .* does not match its checksum"):
        load(folder, tensors=state(1))
    folder = save(tmp_path, step=1, seed=1)
    flip_a_byte(folder)
    loaded = state(3)
    assert load(folder, tensors=loaded, may_start_over=True).step == 0
    torch.testing.assert_close(loaded, state(3), atol=0, rtol=0)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    folder = save(tmp_path, step=1, seed=1)
    for other in ({**state(1), "b": torch.zeros(1)}, {**state(1), "w": torch.zeros(4, 2)}):
        with pytest.raises(ConfigError, match="belongs to another model"):
            load(folder, tensors=other)


class End:
    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


@pytest.mark.parametrize("settings", [(), ("trainer.optimizer_state=8bit",), ("trainer.optimizer=muon",)])
def test_the_size_of_a_checkpoint_is_forecast(tmp_path, settings):
    config = load_config(None, settings, environ={})
    (tmp_path / "checkpoints").mkdir()
    raise_fence(tmp_path / "epoch", epoch=0)
    paths = RankPaths.here(RunFolder(tmp_path), model=seed_path(), memory_root=tmp_path / "memory")
    order = configure_message(config, paths, run_id="test", may_start_over=True, chain=CHAIN, epoch=0, max_staleness=1)
    policy = Policy(seed_path(), mesh=make_mesh("cpu"), dtype=torch.float32)
    saver = make_saver(order, report=(end := End()).send)
    trainer = Trainer(order, end=end, policy=policy, layout=Layout(), publisher=Unpublished(), saver=saver)
    trainer.save_checkpoint()
    saver.close()
    outline = outline_of(config, seed_path(), None)[1]
    assert end.sent[-1].num_bytes == pytest.approx(checkpoint_bytes(config, outline), rel=0.03)


def test_moments_on_the_host_are_in_a_checkpoint_too():
    on_device, on_host = (
        load_config(None, ["trainer.device=cuda", f"trainer.optimizer_state={where}"], environ={})
        for where in ("device", "host")
    )
    sizes = [checkpoint_bytes(one, outline_of(one, seed_path(), None)[1]) for one in (on_device, on_host)]
    assert sizes[0] == sizes[1]


def test_a_rank_without_its_environment_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DORA_")]:
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit, match=r"^dora trainer: DORA_CONTROLLER is not set"):
        rank_main()
