"""Adapter folders made elsewhere: what cannot be trained further is refused in one line, before anything starts."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dora.adapter_files import CONFIG, UNSUPPORTED, WEIGHTS, require_adapter
from dora.app.inputs import open_inputs, weights_digest
from dora.app.prepare import prepare
from dora.app.settings import RankPaths, configure_message
from dora.config.load import load
from dora.config.schema import Config
from dora.errors import ConfigError

TARGETS = ("q_proj", "v_proj")
PLAIN = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"], "lora_dropout": 0.05,
    "bias": "none", "task_type": "CAUSAL_LM", "fan_in_fan_out": True, "init_lora_weights": True, "use_rslora": False,
    "base_model_name_or_path": "/elsewhere", "rank_pattern": {}, "modules_to_save": None, "use_dora": False,
    "qalora_group_size": 16, "megatron_core": "megatron.core", "peft_version": "0.21.2", "of_the_future": None,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(PLAIN))
    (folder / WEIGHTS).write_bytes((2).to_bytes(8, "little") + b"{}")  # its matrices are for the trainer
    return folder


def alter(folder: Path, **changes: object) -> None:
    found = {key: value for key, value in (PLAIN | changes).items() if value is not ...}
    (folder / CONFIG).write_text(json.dumps(found))


def require(folder: Path, *, rank: int = 8, alpha: float = 16.0, rslora: bool = False) -> None:
    require_adapter(folder, rank=rank, alpha=alpha, rslora=rslora, targets=TARGETS)


def config(folder: Path, *changes: str) -> Config:
    lora = ("trainer.lora.rank=8", "trainer.lora.alpha=16", "trainer.lora.targets=['q_proj', 'v_proj']")
    return load(None, [f"model.adapter={folder}", *lora, *changes], environ={})


def test_settings_of_peft_without_effect_are_accepted(folder: Path) -> None:
    require(folder)
    alter(folder, init_lora_weights="gaussian", bias=..., use_rslora=..., inference_mode=True)
    require(folder)


def test_effective_scales_are_compared_not_settings(folder: Path) -> None:
    """An exported adapter of rsLoRA has the whole scale in lora_alpha."""
    alter(folder, lora_alpha=16 * math.sqrt(8))
    require(folder, rslora=True)
    with pytest.raises(ConfigError, match=r"scales its product by 5\.656\S*; set it to 45\.254833995\d \(without"):
        require(folder)
    alter(folder, lora_alpha=16, use_rslora=True)
    require(folder, rslora=True)
    require(folder, alpha=45.2548339959)


def test_each_difference_is_a_line_that_says_what_to_set(folder: Path) -> None:
    alter(folder, r=16, target_modules=["o_proj", "q_proj", "q_proj"])
    with pytest.raises(ConfigError) as caught:
        require(folder, alpha=8.0)
    assert str(caught.value).splitlines() == [
        f"trainer.lora.rank: model.adapter {folder} has rank 16; set it to 16",
        f"trainer.lora.alpha: model.adapter {folder} scales its product by 1; set it to 16 (without rslora)",
        f'trainer.lora.targets: model.adapter {folder} adapts other modules; set it to ["o_proj", "q_proj"]',
    ]


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_cannot_be_expressed_is_refused_by_name_with_the_reason(folder: Path, key: str) -> None:
    alter(folder, **{key: "all" if key == "bias" else {"q_proj": 4}})
    with pytest.raises(ConfigError) as caught:
        require(folder)
    assert str(caught.value).endswith(f"{CONFIG} has {key!r}: not supported, because {UNSUPPORTED[key]}")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "IA3"}, "has peft_type 'IA3'; expected LORA"),
        ({"peft_type": ...}, "missing required field `peft_type`"),
        ({"target_modules": ".*_proj"}, r"has target_modules '\.\*_proj', an expression; list the names"),
        ({"target_modules": [1]}, r"Expected `str`, got `int` - at `\$.target_modules"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights 'pissa_niter_16', which changes the weights"),
        ({"use_qalora": True}, "has 'use_qalora': not known here"),
        ({"of_the_future": 1}, "has 'of_the_future': not known here, so what it changes would be lost"),
        ({"r": 8.5}, r"Expected `int`, got `float` - at `\$.r`"),
        ({"r": True}, r"Expected `int`, got `bool` - at `\$.r`"),
        ({"r": 0}, r"Expected `int` >= 1 - at `\$.r`"),
        ({"r": 10**400}, "is not the configuration of an adapter"),
        ({"lora_alpha": -1}, r"Expected `float` > 0\.0 - at `\$.lora_alpha`"),
        ({"lora_alpha": "16"}, r"Expected `int \| float`|`float`, got `str` - at `\$.lora_alpha`"),
        ({"use_rslora": 1}, r"Expected `bool`, got `int` - at `\$.use_rslora`"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_other_configurations_are_refused(folder: Path, changes: dict[str, object], says: str) -> None:
    alter(folder, **changes)
    with pytest.raises(ConfigError, match=rf"^model\.adapter: .*{says}") as caught:
        require(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"r": NaN}', '"\\ud800"'], ids=lambda text: text[:6])
def test_what_is_no_object_is_refused(folder: Path, text: str) -> None:
    (folder / CONFIG).write_text(text)
    with pytest.raises(ConfigError, match=r"is not the configuration of an adapter"):
        require(folder)


def link_outside(path: Path) -> None:
    (path.parent.parent / "outside").write_text("{}")
    path.symlink_to(path.parent.parent / "outside")


def giant(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


KINDS: dict[str, Callable[[Path], None]] = {
    "leads out of the folder": link_outside,
    "is a pipe": os.mkfifo,
    "is a folder": Path.mkdir,
    "was not read": giant,
}


@pytest.mark.parametrize("says", KINDS)
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_file_of_another_kind_is_named_and_not_read(folder: Path, name: str, says: str) -> None:
    (folder / name).unlink()
    KINDS[says](folder / name)
    with pytest.raises(ConfigError, match=rf"^model\.adapter: .*{name}.*{says}"):
        require(folder)


def test_a_folder_without_values_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(
        ConfigError, match=r"has no adapter_model\.safetensors, the only form of its values that is read"
    ):
        require(folder)


def test_a_run_refuses_it_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    for name in (tmp_path, "someone/adapter", "x" * 300):  # the last one is longer than a name may be
        with pytest.raises(ConfigError, match=rf"^model\.adapter: {name} has no adapter_config\.json; give the folder"):
            open_inputs(config(Path(name)))
    with pytest.raises(ConfigError, match=r"^trainer\.lora\.rank: .* has rank 8; set it to 8"):
        open_inputs(config(folder, "trainer.lora.rank=4"))


def test_its_files_are_part_of_what_training_starts_from(folder: Path, tmp_path: Path) -> None:
    found = weights_digest(open_inputs(config(folder)))
    assert found == weights_digest(open_inputs(config(Path(shutil.copytree(folder, tmp_path / "copy")))))
    assert found != weights_digest(open_inputs(load(None, environ={})))
    (folder / "README.md").write_text("unread")
    assert found == weights_digest(open_inputs(config(folder)))
    with (folder / WEIGHTS).open("ab") as file:
        file.write(bytes(1 << 22))
    changed = weights_digest(open_inputs(config(folder)))
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(1 << 21)  # not in the first MiB
        file.write(b"1")
    assert len({found, changed, weights_digest(open_inputs(config(folder)))}) == 3


@pytest.mark.parametrize("how", ["rollout-only", "evaluation"])
def test_without_a_trainer_nothing_would_add_it_to_the_weights(folder: Path, how: str) -> None:
    chosen = config(folder, *(["run.steps=0"] if how == "evaluation" else []))
    with pytest.raises(ConfigError, match=r"^model\.adapter: without a trainer, nothing adds it to the weights; give"):
        prepare(chosen, open_inputs(chosen), rollout_only=how == "rollout-only")


def test_a_rank_gets_the_folder_of_its_host(folder: Path) -> None:
    paths = RankPaths(
        model=Path("/m"), reference=None, adapter=Path("/there"), memory_root=Path("/v"), durable_root=Path("/v"),
        checkpoints=Path("/c"), fence=Path("/f"),
    )  # fmt: skip
    order = configure_message(
        config(folder), paths, run_id="r", may_start_over=True, chain="", epoch=0, max_staleness=2
    )  # fmt: skip
    assert order.settings.lora is not None
    assert order.settings.lora.begins_with == "/there"
