"""`dora check --gpus`: what fits on GPUs that are not here, computed from the configuration of a tiny model alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dora.app.check import Report
from dora.app.gpu_plan import Gpus, check_plan
from dora.app.trainer_check import memory_lines, outline_of
from dora.config.load import load
from dora.errors import ConfigError
from tests.families import make_config

CONFIGS = Path(__file__).parents[2] / "launch" / "configs"
GPU_8 = CONFIGS / "gpu-8.toml"
GB, MB = 2**30, 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json and nothing else; 13 MB of KV for the tokens of gpu-8.toml."""
    folder = tmp_path_factory.mktemp("model")
    make_config("qwen3", max_position_embeddings=4096, tie_word_embeddings=True).save_pretrained(folder)
    return folder


def _into(lines: list[str]) -> Report:
    return lambda topic, text: lines.append(f"{topic}: {text}")


def planned(model: Path, *changes: str, count: int = 8, memory: int = 80 * GB) -> tuple[bool, list[str]]:
    lines: list[str] = []
    config = load(GPU_8, [f"model.path={model}", *changes], environ={})
    fits = check_plan(config, Gpus(count, memory), _into(lines))
    return fits, lines


def line(lines: list[str], start: str) -> str:
    [found] = [line for line in lines if line.startswith(start)]
    return found


@pytest.mark.parametrize(("memory", "fits"), [(80 * GB, True), (5 * MB, False)])
def test_the_ranks_that_are_left_without_a_node_are_forecast_too(model: Path, memory: int, fits: bool) -> None:
    given = ["nodes.expected=3", "nodes.train=2", "trainer.ranks=4", "trainer.min_ranks=2", "rollout.max_staleness=0"]
    config = load(None, [*given, f"model.path={model}"], environ={})
    mode, outline = outline_of(config, model, memory)
    [found] = [
        text for _, text in memory_lines(config, model, outline, mode=mode, memory=memory) if "min_ranks" in text
    ]
    assert found.startswith("one of 2 ranks (trainer.min_ranks): ")
    assert ("DOES NOT FIT: raise trainer.min_ranks" in found) is not fits


def test_ranks_that_divide_sequences_need_memory_for_their_part_only(model: Path) -> None:
    of_pass = re.compile(r"([\d.]+) (MB|GB) for ([\d,]+) of ([\d,]+) tokens of a pass")
    changes = ["trainer.parallel.context=2", "trainer.micro_batch_tokens=64"]
    _, lines = planned(model, *changes)
    found = of_pass.search(line(lines, "memory: one rank"))
    assert found, lines
    _, whole = planned(model, "trainer.micro_batch_tokens=64")
    size, unit = re.search(r"([\d.]+) (MB|GB) for a pass of (\d+) tokens", line(whole, "memory: one rank")).groups()[:2]  # type: ignore[union-attr]
    assert unit == found[2]
    assert float(found[1]) == pytest.approx(float(size) / 2, rel=0.1)
    assert 2 * int(found[3]) == int(found[4])
    limits = [
        int(re.search(r"answers of up to ([\d,]+) tokens", text)[1].replace(",", ""))  # type: ignore[index]
        for text in (line(planned_lines, ": answers of up to") for planned_lines in (lines, whole))
    ]
    assert limits[0] == pytest.approx(2 * limits[1], rel=0.05)


def test_heads_that_the_ranks_cannot_divide_are_refused_without_gpus(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.parallel\.context: Qwen3ForCausalLM has 4 attention heads, so 8"):
        planned(model, "trainer.ranks=8", "trainer.parallel.context=8", count=16)


def test_ranks_servers_and_time_are_forecast_without_gpus_weights_or_data(model: Path) -> None:
    fits, lines = planned(model)
    assert fits
    assert line(lines, "GPUs") == (
        "GPUs: 4 trainer.ranks and 4 engine.instances of engine.tensor_parallel = 1: 8 of 8 GPUs of 80 GB"
    )
    assert re.match(r"memory: one rank: [\d.]+ MB of 80.0 GB \(\d+\.\d GB left\): ", line(lines, "memory: one rank"))
    assert re.fullmatch(
        r"memory: one instance: 0\.\d MB weights \+ 64\.0 MB KV, of 72\.0 GB \(assumed: 90 % of a GPU\), room for "
        r"[\d,]+ tokens of KV",
        line(lines, "memory: one instance"),
    )
    assert "tokens of answers per second" in line(lines, "split")
    assert "assumed, not measured: H100s with 3.35 TB/s" in line(lines, "split")
    assert line(lines, "sample").startswith("sample: none: nothing was started or contacted")


@pytest.mark.parametrize(
    ("count", "changes", "says"),
    [
        (6, (), "need 8 GPUs, and 6 are given; `dora plan CONFIG --gpus 6x80GB` searches the best use of them"),
        (8, ("engine.tensor_parallel=2",), "need 12 GPUs, and 8 are given; `dora plan CONFIG --gpus 8x80GB`"),
        (4, ("engine.gpus=[4,5,6,7]",), "need 8 GPUs, and 4 are given; list other GPUs in engine.gpus"),
    ],
)
def test_a_split_that_needs_more_gpus_is_told_with_what_to_change(
    model: Path, count: int, changes: tuple[str, ...], says: str
) -> None:
    fits, lines = planned(model, *changes, count=count)
    assert not fits
    assert "DOES NOT FIT: 4 trainer.ranks and 4 engine.instances" in line(lines, "GPUs")
    assert says in line(lines, "GPUs")


def test_memory_that_does_not_suffice_is_told_with_what_to_change(model: Path) -> None:
    fits, lines = planned(model, memory=50 * MB)
    assert not fits
    says = r"DOES NOT FIT in 45\.0 MB .*; raise engine.tensor_parallel, or set engine.kv_tokens to at most (\d+)$"
    found = re.search(says, line(lines, "memory: one instance"))
    assert found
    assert planned(model, f"engine.kv_tokens={found[1]}", "trainer.ranks=1", memory=50 * MB)[1]
    fits, lines = planned(model, memory=MB)
    assert line(lines, ": DOES NOT FIT in 1.0 MB")
    assert not fits


def test_engines_that_share_a_gpu_are_added_up_and_no_time_is_forecast(model: Path) -> None:
    embedded = ("engine.kind=embedded", "engine.args=[]")
    fits, lines = planned(model, *embedded, count=4)
    assert fits
    shared = line(lines, "memory: GPU 0")
    assert shared.startswith("memory: GPU 0 is shared by rank 0, instance 0, instance 1, instance 2, instance 3: ")
    assert "not forecast" in line(lines, "split")
    fits, lines = planned(model, *embedded, count=4, memory=250 * MB)
    assert line(lines, "memory: GPU 0").endswith("which DOES NOT FIT: list other GPUs in engine.gpus")
    assert not fits


@pytest.mark.deep
def test_an_adapter_of_8_b_parameters_is_trained_on_one_gpu_beside_its_server(tmp_path: Path) -> None:
    """The shapes are those of Qwen3-8B; all weights would take more than two GPUs."""
    shapes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151_936}
    make_config("qwen3", **shapes, **heads, layer_types=None, max_window_layers=36).save_pretrained(tmp_path)
    found = {}
    for rank in (32, 0):
        lines: list[str] = []
        config = load(CONFIGS / "gpu-1-lora.toml", [f"model.path={tmp_path}", f"trainer.lora.rank={rank}"], environ={})
        fits = check_plan(config, Gpus(1, 80 * GB), _into(lines))
        found[rank] = fits, lines
    fits, lines = found[32]
    assert fits, lines
    assert "shared by rank 0, instance 0" in line(lines, "memory: GPU 0")
    assert "15.3 GB weights" in line(lines, "memory: one instance")  # the adapter is in their sum
    fits, lines = found[0]
    assert not fits
    assert line(lines, "memory: GPU 0").endswith("which DOES NOT FIT: list other GPUs in engine.gpus")


def test_external_servers_are_not_contacted(model: Path) -> None:
    urls = 'engine.urls=["http://a:1", "http://b:1", "http://c:1"]'
    config = load(GPU_8, [f"model.path={model}", urls, "engine.instances=0"], environ={})
    lines: list[str] = []
    assert check_plan(config, Gpus(4, 80 * GB), _into(lines))
    assert line(lines, "GPUs") == "GPUs: 4 trainer.ranks: 4 of 4 GPUs of 80 GB"
    assert "the 3 servers of engine.urls have GPUs of their own" in line(lines, "server")


def test_a_run_without_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--gpus: trainer\.device and engine.device are cpu, so the run uses no GPU"):
        check_plan(load(None, environ={}), Gpus(8, GB), lambda *_: None)


@pytest.mark.parametrize(
    "text", ["8", "0x80GB", "8x80", "8xfooGB", "8x0GB", "-1x80GB", "8x80GBx", "x80GB", "88888x80GB"]
)
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Gpus.parse(text)
    assert str(refused.value) == (f"--gpus {text}: expected the number and the memory of the GPUs, such as 8x80GB")
    assert Gpus.parse("8x80GB") == Gpus(8, 80 * GB)
