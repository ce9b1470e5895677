"""`dora plan`: what it asks, what it prints, and what it writes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dora.app.estimate import Shapes, kv_bytes_per_token
from dora.app.plan import ask
from dora.cli.app import app
from dora.config.load import load
from dora.errors import ConfigError
from dora.seed.policy import model_folder
from dora.sim.plan import splits_of
from dora.sim.recorded import read_run
from dora.sim.workload import load as load_workload
from tests.sim.test_recorded import record
from tests.sim.worlds import workload

ROOT = Path(__file__).parents[2]
SMALL = """
[job]
max_staleness = 1
groups_per_step = 8
group_size = 4
[lengths]
regime = "D"
scale = 0.05
cap = 1500
[fleet]
devices = 6
rollout_devices = 4
weight_bytes = 4e9
device_bytes = 10e9
[fleet.server]
slots = 8
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def plan(*words: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, words), "--processes", "1"])


def test_drafts_that_the_file_does_not_have_are_in_the_plan(small: Path, tmp_path: Path) -> None:
    written, acceptance = tmp_path / "planned.toml", "fleet.server.speculation.acceptance"
    done = plan(small, "--k", 1, "--widths", 1, "--set", f"{acceptance}=0.5", "--write", written)
    assert done.exit_code == 0, done.output
    assert f"    {acceptance} = 0.5" in done.stdout.splitlines()
    speculation = load_workload(written).fleet.server.speculation
    assert speculation is not None
    assert speculation.acceptance == 0.5


def test_a_fleet_that_has_no_room_for_the_split_of_the_file_is_planned(small: Path) -> None:
    """The split of a plan is searched; that of the file is not kept."""
    done = plan(small, "--widths", 1, "--set", "fleet.devices=2", "--set", "job.max_staleness=0")
    assert done.exit_code == 0, done.output
    assert "    fleet.rollout_devices = 1" in done.stdout.splitlines()


def test_the_best_are_printed_with_the_lines_to_set(small: Path) -> None:
    done = plan(small)
    assert done.exit_code == 0, done.output
    _, head, *rows = done.stdout.splitlines()
    assert head.split("  ")[0] == "plan"
    plans = rows[: next(i for i, row in enumerate(rows) if row.startswith("step s:"))]
    assert [row.split()[0] for row in plans] == ["1", "2", "3"][: len(plans)]
    assert len(plans) > 1
    assert "plan 1: set" in rows
    assert any(row.startswith("    fleet.devices_per_instance = ") for row in rows)


def test_the_plan_that_is_written_is_the_first_one(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "best.toml"
    done = plan(small, "--widths", "1,2", "--write", out)
    assert done.exit_code == 0, done.output
    found = load_workload(out)
    row = done.stdout.splitlines()[2].split()
    assert [found.job.max_staleness, found.fleet.devices_per_instance, found.num_instances] == [*map(int, row[1:4])]
    again = plan(small, "--write", out)
    assert isinstance(again.exception, ConfigError)
    assert str(again.exception) == f"--write {out}: exists; --force replaces it"


def test_a_list_of_the_plan_is_written_as_one(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "best.toml"
    done = plan(small, "--k", 1, "--widths", 1, "--set", "fleet.widths=[1,2]", "--write", out)
    assert done.exit_code == 0, done.output
    assert "    fleet.widths = [1, 2]" in done.stdout.splitlines()
    assert load_workload(out).fleet.widths == (1, 2)


def test_a_configuration_gets_its_own_settings(tmp_path: Path) -> None:
    config = ROOT / "launch/configs/arithmetic-cpu.toml"
    out = tmp_path / "best.toml"
    done = plan(config, "--set", "engine.instances=4", "--set", "rollout.max_staleness=1", "--k", "1", "--write", out)
    assert done.exit_code == 0, done.output
    written, given = load(out, environ={}), load(config, environ={})
    assert written.num_managed + written.trainer.ranks == 4 + given.trainer.ranks
    assert written.rollout.max_staleness == 1
    assert written.task == given.task
    assert set(tomllib.loads(out.read_text())) == set(tomllib.loads(config.read_text()))


def test_the_gpus_of_a_configuration_need_not_be_here(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text(
        '[engine]\nkind = "sglang"\ndevice = "cuda"\ninstances = 4\nslots = 64\n'
        '[trainer]\ndevice = "cuda"\nranks = 4\n[rollout]\nmax_staleness = 1\n'
    )
    question = ask(config, None, gpus="8x80GB", overrides=["model.path=seed"])
    fleet = question.workload.fleet
    assert (fleet.devices, fleet.devices_per_instance) == (8, 1)
    assert fleet.server.decode.base_s > fleet.fixed_step_s > 0
    planned = question.workload.with_width(2).with_changes(fleet={"rollout_devices": 6})
    assert question.fits(planned)
    assert question.changes(planned) == {
        "engine.instances": 3,
        "engine.tensor_parallel": 2,
        "trainer.ranks": 2,
        "engine.slots": planned.fleet.server.slots,
    }


def test_a_plan_for_an_adapter_says_whether_servers_hold_it(tmp_path: Path) -> None:
    config = ROOT / "launch/configs/arithmetic-cpu.toml"
    question = ask(config, None, gpus=None, overrides=["trainer.lora.rank=8"])
    assert (question.workload.adapters.use, question.uses) == ("merged", ())
    served = question.given.with_changes(adapters={"use": "served"})
    assert question.changes(served) == {"engine.adapters": True}
    assert tomllib.loads(question.text(served))["engine"]["adapters"] is True
    assert question.changes(question.given) == {}
    given = ask(config, None, gpus=None, overrides=["trainer.lora.rank=8", "engine.adapters=true"])
    assert given.workload.adapters.use == "served"
    assert ask(config, None, gpus=None, overrides=[]).workload.adapters.use == "none"


@pytest.mark.parametrize("kv_tokens", [150_000, 10**9], ids=["fitting", "too many"])
def test_slots_and_kv_are_those_of_a_server_as_it_is_configured(tmp_path: Path, kv_tokens: int) -> None:
    config = tmp_path / "job.toml"
    config.write_text(GPU_JOB)
    chosen = ["model.path=seed", "engine.tensor_parallel=2", "engine.slots=64", f"engine.kv_tokens={kv_tokens}"]
    question = ask(config, None, gpus="16x1GB", overrides=chosen)
    shapes = Shapes.read(model_folder("seed"))
    each = kv_bytes_per_token(shapes, dtype_bytes=4)
    for width, slots in ((1, 32), (2, 64), (4, 128)):
        fleet = question.workload.with_width(width).fleet
        assert fleet.server.slots == slots
        assert fleet.server.kv_tokens * each + 4 * shapes.parameters <= 0.9 * 2**30 * width
    [server] = {question.workload.with_width(2).fleet.server}
    changed = question.changes(question.workload)
    assert (server.kv_tokens == kv_tokens) is ("engine.kv_tokens" not in changed) is (kv_tokens == 150_000)
    assert changed.get("engine.kv_tokens", kv_tokens) == server.kv_tokens


@pytest.mark.parametrize("override", ["weights.transfer=distributed", "rollout.strategy=partial_sync"])
def test_servers_that_cannot_hold_adapters_are_not_planned_with_them(override: str) -> None:
    config = ROOT / "launch/configs/arithmetic-cpu.toml"
    question = ask(config, None, gpus=None, overrides=["trainer.lora.rank=8", override])
    assert question.uses == ("merged",)


def test_ranks_that_do_not_fit_are_not_planned(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text('[engine]\ndevice = "cuda"\n[trainer]\ndevice = "cuda"\n')
    question = ask(config, None, gpus="8x1GB", overrides=["model.path=seed"])
    wide = question.workload.with_changes(train={"micro_batch_tokens": 4_000_000})
    assert question.fits(question.workload)
    assert not question.fits(wide)


GPU_JOB = (
    '[engine]\nkind = "sglang"\ndevice = "cuda"\ninstances = 4\n[rollout]\nmax_staleness = 1\n'
    '[trainer]\ndevice = "cuda"\nranks = 4\n'
)


def test_a_plan_that_the_run_would_refuse_is_left_out(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text(f"{GPU_JOB}[trainer.parallel]\nreplicate = 2\n")
    question = ask(config, None, gpus="8x80GB", overrides=["model.path=seed"])
    splits, problem = splits_of(question.workload, origin="plan", why_not=question.why_not)
    assert [split.train_devices for split in splits] == [6, 4, 2]
    assert problem == "plan: trainer.parallel.replicate: 1 trainer.ranks cannot be divided into 2 equal groups"


def test_the_micro_batch_of_a_plan_is_that_of_one_rank(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text(f"{GPU_JOB}micro_batch_tokens = 8192\n[trainer.parallel]\ncontext = 2\n")
    question = ask(config, None, gpus="8x80GB", overrides=["model.path=seed"])
    assert question.workload.train.micro_batch_tokens == 16_384
    halved = question.workload.with_changes(train={"micro_batch_tokens": 8192})
    assert question.changes(halved) == {"trainer.micro_batch_tokens": 4096}


def test_a_plan_for_another_strategy_sets_it() -> None:
    question = ask(ROOT / "launch/configs/arithmetic-cpu.toml", None, gpus=None, overrides=[])
    other = question.given.with_changes(job={"strategy": "partial"})
    assert question.changes(other) == {"rollout.strategy": "partial"}


@pytest.mark.parametrize(("train", "of_train"), [('"auto"', {}), ("1", {"nodes.train": 2})])
def test_a_plan_for_more_nodes_sets_their_number(tmp_path: Path, train: str, of_train: dict[str, int]) -> None:
    config = tmp_path / "job.toml"
    job = GPU_JOB.replace("instances = 4\n", "").replace("ranks = 4", "ranks = 8")
    config.write_text(f"{job}[nodes]\nexpected = 2\ngpus = 8\ntrain = {train}\n")
    question = ask(config, None, gpus="32x80GB", overrides=["model.path=seed"])
    planned = question.workload.with_changes(fleet={"rollout_devices": 16})
    assert question.why_not(planned) == ""
    assert question.changes(planned) == {"trainer.ranks": 16, "nodes.expected": 4, **of_train}
    assert load(tomllib.loads(question.text(planned)), environ={}).num_managed == 16


def test_a_finished_run_is_planned_with_the_gpus_of_its_servers(tmp_path: Path) -> None:
    folder, _ = record(workload("dora", k=1), tmp_path)
    text = '[engine]\nkind = "sglang"\ntensor_parallel = 2\ninstances = 8\n[rollout]\nmax_staleness = 1\n'
    folder.config.write_text(f"{text}[trainer]\nranks = 8\n[trainer.parallel]\ncontext = 2\n")
    question = ask(None, folder.root, gpus=None, overrides=[])
    planned = question.workload
    assert (planned.fleet.devices, planned.fleet.rollout_devices, planned.fleet.widths) == (24, 16, (2,))
    assert (planned.num_instances, planned.num_ranks) == (8, 4)
    assert planned.rank_tokens_s == pytest.approx(read_run(folder.root)[0].rank_tokens_s)
    assert question.changes(planned) == {}
    folder.config.write_text('[engine]\nurls = ["http://a:1", "http://b:1"]\n[rollout]\nmax_staleness = 1\n')
    with pytest.raises(ConfigError, match="only if the run starts its servers"):
        ask(None, folder.root, gpus=None, overrides=[])


def test_a_finished_run_is_planned_as_its_configuration(tmp_path: Path) -> None:
    folder, _ = record(workload("dora", k=1), tmp_path)
    folder.config.write_text("[engine]\ninstances = 8\n[trainer]\nranks = 4\n[rollout]\nmax_staleness = 1\n")
    out = tmp_path / "best.toml"
    done = plan("--from", folder.root, "--set", "fleet.devices=6", "--k", "1", "--write", out)
    assert done.exit_code == 0, done.output
    written = load(out, environ={})
    assert written.num_managed + written.trainer.ranks == 6
    assert f"    engine.instances = {written.num_managed}" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("launch/configs/gpu-8.toml",), "a plan for GPUs needs their number and memory, such as --gpus 8x80GB"),
        (("launch/workloads/tail-bound.toml", "--gpus", "8x80GB"), "--gpus 8x80GB: is for configurations"),
        (("--from", "nowhere", "launch/workloads/tail-bound.toml"), "a finished run needs no file and no --gpus"),
        (("launch/workloads/tail-bound.toml", "--k", "-1"), "--k: must be at least 0"),
        (("launch/workloads/tail-bound.toml", "--k", "x"), "--k x: expected integers separated by commas"),
        (("launch/workloads/tail-bound.toml", "--strategy", "best"), "job.strategy: 'best' is not simulated"),
        (
            ("launch/workloads/tail-bound.toml", "--write", "/no/such/plan.toml"),
            "is not a folder that you may write to",
        ),
        (
            (
                "launch/configs/arithmetic-cpu.toml",
                "--set",
                'engine.urls=["http://a:1"]',
                "--set",
                "rollout.max_staleness=0",
            ),
            "only if the run starts",
        ),
        (
            ("launch/configs/arithmetic-cpu.toml", "--gpus", "8x80GB"),
            "needs engine.device and trainer.device to be cuda",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(ROOT)
    done = plan(*words)
    assert isinstance(done.exception, ConfigError), done.output
    assert says in str(done.exception)
