"""A model folder that somebody else made: one clear line, in bounded time and memory, nothing outside it read."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from dora.app.inputs import model_digest, open_inputs
from dora.config.load import load
from dora.errors import ConfigError
from dora.model_files import require_sound
from dora.seed.policy import model_folder

#: Most memory that a refusal may take, in KiB.
ROOM = 100 * 1024
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(model_folder("seed"), tmp_path / "model")
    return tmp_path / "model"


def refusal(folder: Path) -> str:
    """The line of the refusal of a run, which took little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError) as caught:
        open_inputs(load(None, [f"model.path={folder}"], environ={}))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < ROOM
    line = str(caught.value)
    assert "\n" not in line
    assert "trust" not in line
    return line


def change(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | changes))


# ---- files ----------------------------------------------------------------------------------------------------------

FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
    "model.safetensors", INDEX, "merges.txt", "tokenizer.model",
)  # fmt: skip


def link_outside(path: Path) -> None:
    outside = path.parent.parent / "outside"
    outside.write_text("{}")
    path.symlink_to(outside)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def sparse_giant(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def subfolder(path: Path) -> None:
    path.mkdir()


KINDS = {
    link_outside: "leads out of the folder", link_to_a_device: "leads out of the folder",
    link_to_itself: r"no config\.json|no such file|Too many levels|No such file",
    pipe: r"is a pipe|no config\.json", sparse_giant: r"expected at most|is not a safetensors file",
    subfolder: r"is a folder|no config\.json",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_named_and_not_read(folder: Path, name: str, kind: Callable[[Path], None]) -> None:
    (folder / name).unlink(missing_ok=True)
    kind(folder / name)
    line = refusal(folder)
    assert str(folder) in line
    with pytest.raises(ConfigError, match=KINDS[kind]):
        require_sound(folder)


def test_a_link_to_a_file_that_is_none_of_a_model_leads_out_too(folder: Path) -> None:
    """It would be copied into version 0."""
    (folder / "README").symlink_to("/etc/hostname")
    assert "README is a link that leads out of the folder; put the file itself there" in refusal(folder)


def test_the_cache_of_a_hub_is_a_folder_of_links(tmp_path: Path, folder: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0a1b", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        path.rename(blobs / f"hash-of-{path.name}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"hash-of-{path.name}"))
    open_inputs(load(None, [f"model.path={snapshot}"], environ={}))
    assert model_digest(snapshot)
    (tmp_path / "hub" / "secret").write_text("{}")
    (snapshot / "extra.json").symlink_to(Path("..", "..", "secret"))
    assert "extra.json is a link that leads out of the folder" in refusal(snapshot)


def test_a_link_within_the_folder_is_fine(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "model.safetensors").symlink_to("weights.safetensors")
    open_inputs(load(None, [f"model.path={folder}"], environ={}))


def test_the_folder_of_a_reference_is_checked_too(tmp_path: Path, folder: Path) -> None:
    link_to_a_device(folder / "merges.txt")
    with pytest.raises(ConfigError, match=r"^objective\.kl_reference: .*merges\.txt is a link that leads out"):
        open_inputs(load(None, ["objective.kl_coefficient=0.1", f"objective.kl_reference={folder}"], environ={}))


def test_an_adapter_would_load_a_model_from_elsewhere(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/somewhere"}))
    assert "is an adapter of another model; merge it into that model first" in refusal(folder)


# ---- weights --------------------------------------------------------------------------------------------------------


def mapping(file: object) -> str:
    return json.dumps({"weight_map": {"model.norm.weight": file}})


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("[]", "is not an index of safetensors files"),
        ("{}", "is not an index of safetensors files"),
        ("7", "is not an index of safetensors files"),
        ('{"weight_map": []}', "is not an index of safetensors files"),
        ('{"weight_map"', "is not an index of safetensors files"),
        ('{"metadata": ' + 100_000 * "[", "is not an index of safetensors files"),
        (mapping(None), "is not an index of safetensors files"),
        (mapping("../outside.safetensors"), "names '../outside.safetensors', which is not a safetensors file in its"),
        (mapping("/etc/passwd"), "names '/etc/passwd', which is not a safetensors file in its folder"),
        (mapping("/outside.safetensors"), "names '/outside.safetensors', which is not a safetensors file in its"),
        (mapping("tokenizer.json"), "names 'tokenizer.json', which is not a safetensors file in its folder"),
    ],
)
def test_an_index_that_is_none_or_leads_elsewhere(folder: Path, index: str, says: str) -> None:
    (folder / INDEX).write_text(index)
    line = refusal(folder)
    assert f"{folder / INDEX} {says}" in line


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", struct.pack("<Q", 2**60), struct.pack("<Q", 100) + b"{}", struct.pack("<Q", 2**63) + 99 * b"{"],
)
def test_a_safetensors_file_that_was_cut(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors: is not a safetensors file, or is truncated; it was not read" in refusal(folder)


def test_a_header_that_is_longer_than_any_models(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 2**36))
        file.truncate(2**37)
    assert "model.safetensors: is not a safetensors file, or is truncated; it was not read" in refusal(folder)


# ---- config.json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "must contain a JSON object"),
        ("null", "must contain a JSON object"),
        ('"qwen3"', "must contain a JSON object"),
        ("", "is not JSON"),
        ("\xff", "is not JSON"),
        (100_000 * "[", "is not JSON"),
        (100_000 * '{"a":', "is not JSON"),
        ('{"vocab_size": ' + 5_000 * "9" + "}", "is not JSON"),
        ("{}", "model_type is None, expected the name"),
        ('{"model_type": 7}', "model_type is 7, expected the name"),
        ('{"model_type": ["qwen3"]}', r"model_type is \['qwen3'\], expected"),
        ('{"model_type": "no-such\\u001b[31m\\n"}', r"has no model_type 'no-such\\x1b\[31m\\n'$"),
    ],
)
def test_a_config_that_is_none(folder: Path, text: str, says: str) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    line = refusal(folder)
    assert "config.json" in line
    assert re.search(says, line)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", [[[1]], {"a": 1}, "1", [1, None], True, 1.5, 10**30])
def test_end_tokens_that_are_no_ids(folder: Path, name: str, ids: object) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_bytes()) | {"eos_token_id": ids}))
    assert refusal(folder).endswith(f"eos_token_id in {folder / name} is not a token id, or a list of them; correct it")


def test_code_that_a_folder_brings_is_not_run(folder: Path, tmp_path: Path) -> None:
    own = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    change(folder, **own)
    open_inputs(load(None, [f"model.path={folder}"], environ={}))  # transformers has this kind itself
    change(folder, **own, model_type="evil")
    assert "has no model_type 'evil', and code in the folder is never run" in refusal(folder)
    change(folder, auto_map={"AutoConfig": "somebody/else--evil.Config"}, model_type="evil")
    assert "has no model_type 'evil', and code in the folder is never run" in refusal(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["num_hidden_layers", "text_config"])
def test_a_config_of_endless_layers_is_refused_before_it_is_built(folder: Path, key: str) -> None:
    change(folder, **{key: 10**9 if key == "num_hidden_layers" else {"num_hidden_layers": 10**9}})
    assert "num_hidden_layers is 1000000000; no model has more than 10,000 layers" in refusal(folder)


def test_a_number_of_layers_that_fits_no_float_is_refused(folder: Path) -> None:
    change(folder, num_hidden_layers=10**400)
    assert "num_hidden_layers is huge; no model has more than 10,000 layers" in refusal(folder)


def test_a_config_that_takes_endless_memory_or_time_costs_a_process_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora.model_config.CHILD_S", 3)
    change(folder, num_labels=10**12)  # transformers draws up a name of each
    assert "config.json cannot be read by transformers: it took more than 3 s of CPU time or 2 GB" in refusal(folder)
