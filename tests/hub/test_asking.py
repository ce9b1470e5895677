"""What is asked of the hub, which bytes are fetched, and the line for each thing that can go wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.hub.conftest import CARD, DATA, MODEL, ROWS, HubStub, data_files, lines, model_files
from tests.hub.stub import add

pytestmark = pytest.mark.timeout(600)

#: Processor time, after imports, in which the user has the line if there is nothing to be had. Wall-clock time is
#: bounded too, but loosely: other work may share the machine. `load_dataset` takes 23 s at a refused port.
LINE_BUSY_S = 1.5
LINE_WALL_S = 10.0
MB = 2**20


def model(name: str = MODEL, **more: str) -> list[str]:
    return [f'model.path="{name}"', *(f'model.{key}="{value}"' for key, value in more.items())]


def data(name: str = DATA, **more: str) -> list[str]:
    keys = {"kind": "datasets", "path": name, "subset": "main", **more}
    changes = [f'task.sources.0.{key}="{value}"' for key, value in keys.items()]
    return [*changes, "task.sources.0.options={}", 'task.rewards=[{kind="exact"}]', "eval.sets=[]"]


def case(do: str, *settings: list[str]) -> dict[str, Any]:
    return {"do": do, "set": [one for some in settings for one in some]}


def files_asked(stub: HubStub) -> set[str]:
    """The files whose bytes were asked for."""
    return {one["path"].partition("/resolve/")[2].partition("/")[2] for one in stub.asked()
            if one["method"] == "GET" and "/resolve/" in one["path"]}  # fmt: skip


def test_only_what_is_used_is_downloaded(filled: HubStub) -> None:
    used = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    [looked] = filled.ask(case("look", model(), data()))
    assert files_asked(filled) == {*used, "README.md"}, "a check downloads what it needs to say how much there is"
    assert "1.7 MB in 1 files (4 more are here)" in looked["needed"][0]
    [fetched] = filled.ask(case("rows", model(), data()))
    assert files_asked(filled) == {"model.safetensors", "main/train-0.jsonl"}
    assert fetched["rows"] == ROWS
    assert fetched["model"] == looked["revision"]


def test_nothing_is_asked_of_a_commit_that_is_here(filled: HubStub) -> None:
    [fetched] = filled.ask(case("rows", model(), data()))
    filled.asked()
    pinned = (model(revision=fetched["model"]), data(revision=fetched["revision"]))
    offline, online = (filled.ask(case("rows", *pinned), HF_HUB_OFFLINE=flag)[0] for flag in ("1", "0"))
    assert offline["rows"] == online["rows"] == ROWS
    assert filled.asked() == []


def test_of_a_commit_of_which_another_program_downloaded_a_part_the_rest_is_fetched(filled: HubStub) -> None:
    [looked] = filled.ask(case("fetch", model(), data()))
    pinned = (model(revision=looked["revision"]), data(revision=looked["data"]))
    part = f"""from huggingface_hub import hf_hub_download
hf_hub_download({MODEL!r}, "config.json", revision={looked["revision"]!r})
hf_hub_download({DATA!r}, "README.md", revision={looked["data"]!r}, repo_type="dataset")"""
    environment = filled.environment(HF_HOME=str(filled.home.with_name("other")))
    subprocess.run([sys.executable, "-c", part], env=environment, check=True, timeout=60)
    [fetched] = filled.ask(case("rows", *pinned), HF_HOME=environment["HF_HOME"])
    assert fetched["rows"] == ROWS


def test_a_branch_is_resolved_once_and_its_commit_is_kept_when_it_moves_on(filled: HubStub) -> None:
    [first] = filled.ask(case("fetch", model(), data()))
    filled.asked()
    newer = add(filled.folder, "model", MODEL, {**model_files(), "generation_config.json": b"{}"})
    again, moved = filled.ask(
        case("fetch", model(revision=first["revision"]), data(revision=first["data"])), case("fetch", model())
    )
    assert again["revision"] == first["revision"] != newer == moved["revision"]
    assert files_asked(filled) == {"generation_config.json"}, "files that have not changed are not fetched again"


def test_what_the_hub_refuses_is_said_in_one_line_each(filled: HubStub) -> None:
    url = filled.url
    add(filled.folder, "model", "someone/gated", model_files())
    add(filled.folder, "model", "someone/bin", {"config.json": b"{}", "pytorch_model.bin": b""})
    add(filled.folder, "model", "someone/empty", {"README.md": b""})
    add(filled.folder, "dataset", "someone/script", {"script.py": b"", "data/train.jsonl": lines(ROWS)})
    add(filled.folder, "dataset", "someone/several", {**data_files(), "README.md": CARD})
    add(filled.folder, "dataset", "someone/outside", {"README.md": CARD.replace(b"main/train-*", b"/etc/passwd")})
    add(filled.folder, "dataset", "someone/url", {"README.md": CARD.replace(b"main/train-*", b"http://127.0.0.1:9/a")})
    bomb = b"---\na: &a [x]\nb: &b [*a,*a]\nconfigs: [*b, *b]\n---\n"
    add(filled.folder, "dataset", "someone/alias", {"README.md": bomb})
    add(filled.folder, "dataset", "someone/none", {"README.md": b"nothing"})
    for form in ("tar", "h5"):
        add(filled.folder, "dataset", f"someone/{form}", {f"train-0.{form}": b""})
    filled.fail(gated=["someone/gated"])
    source = "task.sources.0"
    script = (
        f"{source}.path: someone/script is made by a script of its own (script.py), which is not executed; use a data "
        f'set that consists of files or, if it has this branch, {source}.revision = "refs/convert/parquet"'
    )
    said = [
        (model("someone/gated"), f"model.path: someone/gated is gated: accept its terms at {url}/someone/gated, then "
         "run hf auth login or set HF_TOKEN"),
        (model("someone/missing"), f"model.path: someone/missing is neither a path here nor a model at {url}; correct "
         "it or, if it is private, run hf auth login or set HF_TOKEN"),
        (model(revision="v9"), f"model.path: {MODEL} has no revision 'v9'; give a branch, a tag or a commit"),
        (model(revision="0" * 40), f"has no revision '{'0' * 40}'; give a branch, a tag or a commit"),
        (model("someone/bin"), "has no *.safetensors, the only form of weights that is read"),
        (model("someone/empty"), "has no config.json, so it is no model that can be trained"),
        (data("someone/missing"), f"{source}.path: someone/missing is neither a path here nor a data set at {url}; "
         "correct it or, if it is private, run hf auth login or set HF_TOKEN"),
        (data(split="dev"), f"{source}.path: {DATA} has no split 'dev'; set {source}.split to one of test, train"),
        (data(subset="Main"), f"{source}.path: {DATA} has no subset 'Main'; set {source}.subset to one of main, other"),
        (data("someone/several", subset=""), f"{source}.path: someone/several has several subsets; set {source}.subset "
         "to one of main, other"),
        (data("someone/script", subset=""), script),
        (data("someone/outside"), "README.md names /etc/passwd, which is not a file of the data set"),
        (data("someone/url"), "README.md names http://127.0.0.1:9/a, which is not a file of the data set"),
        (data("someone/alias"), "README.md has YAML aliases, which are not followed"),
        (data("someone/tar", subset=""), "someone/tar has files of the kind 'webdataset', which are not read: some of "
         "their forms hold Python objects; write .jsonl, .csv or .parquet"),
        (data("someone/h5", subset=""), "someone/h5 has files of the kind 'hdf5', which are not read"),
        (data("someone/none", subset=""), "cannot tell which files its rows are in (EmptyDatasetError: "),
    ]  # fmt: skip
    found = filled.ask(*(case("look", settings) for settings, _ in said))
    for (_, line), answer in zip(said, found, strict=True):
        assert line in answer["error"]
        assert "\n" not in answer["error"]
    [allowed] = filled.ask(case("look", model("someone/gated")), HF_TOKEN="good")
    assert allowed["revision"]


def test_a_hub_that_is_not_to_be_reached_is_one_line_in_time(filled: HubStub, tmp_path: Path) -> None:
    filled.ask(case("look", model()))
    both = (case("look", model()), case("look", data()))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never answers
        port = silent.getsockname()[1]
        unanswering = filled.ask(*both, is_patient=False, HF_ENDPOINT=f"http://127.0.0.1:{port}")
    refused = filled.ask(*both, is_patient=False, HF_ENDPOINT=f"http://127.0.0.1:{port}")
    unknown = filled.ask(*both, is_patient=False, HF_ENDPOINT="http://no-such-host.invalid")
    require_lines(
        {
            "did not answer within 0.8 s": unanswering,
            "cannot be reached ([Errno 111] Connection refused)": refused,
            "no-such-host.invalid ": unknown,
        }
    )


def test_a_hub_that_is_slow_or_unwell_is_one_line_in_time(filled: HubStub) -> None:
    filled.ask(case("look", model()))
    both = (case("look", model()), case("look", data()))
    filled.fail(answer_after_s=1.0)
    slow = filled.ask(*both, is_patient=False)
    filled.fail(wrong_status=503)
    unwell = filled.ask(*both)
    require_lines({"did not answer within 0.8 s": slow, "answers with status 503": unwell})


def test_a_slow_hub_is_waited_for_if_the_user_says_so(filled: HubStub) -> None:
    filled.fail(answer_after_s=1.0)
    [patient] = filled.ask(case("look", model()))
    assert patient["needed"]


def require_lines(says: dict[str, list[dict[str, Any]]]) -> None:
    """Each line was said of a model that is in the cache and of data that are not, and in time."""
    for line, answers in says.items():
        for answer in answers:
            assert line in answer["error"]
            assert answer["busy_s"] < LINE_BUSY_S
            assert answer["wall_s"] < LINE_WALL_S
        assert "set HF_HUB_OFFLINE=1 to use what is in the cache" in answers[0]["error"]
        assert "it is not in the cache either" in answers[1]["error"]


def test_offline_the_line_says_what_the_cache_lacks(filled: HubStub) -> None:
    none = filled.ask(case("fetch", model()), case("fetch", data()), HF_HUB_OFFLINE="1")
    assert [answer["error"].partition(" is not a path here, nor in the cache of the hub (")[0] for answer in none] == [
        f"model.path: {MODEL}",
        f"task.sources.0.path: {DATA}",
    ]
    assert all("unset HF_HUB_OFFLINE" in answer["error"] for answer in none)
    filled.ask(case("look", model()))
    [incomplete] = filled.ask(case("fetch", model()), HF_HUB_OFFLINE="1")
    assert "lacks model.safetensors of someone/small@" in incomplete["error"]


def test_offline_the_cache_is_used(filled: HubStub) -> None:
    filled.ask(case("fetch", model(), data()))
    filled.asked()
    [whole] = filled.ask(case("rows", model(), data()), HF_HUB_OFFLINE="1")
    assert whole["rows"] == ROWS
    assert filled.asked() == []


def test_a_download_that_is_cut_off_goes_on_where_it_was(filled: HubStub) -> None:
    weights = {
        "model.safetensors": b"\x08\x00\x00\x00\x00\x00\x00\x00{}      " + bytes(25 * MB)
    }  # stored 10 MB at a time
    add(filled.folder, "model", "someone/cut", {**model_files(), **weights})
    filled.fail(cut={"model.safetensors": 12 * MB})
    [fetched] = filled.ask(case("fetch", model("someone/cut")))
    assert "error" not in fetched
    ranges = [one["range"] for one in filled.asked() if "model.safetensors" in one["path"] and one["method"] == "GET"]
    assert ranges == ["", f"bytes={10 * MB}-", f"bytes={20 * MB}-"]
    [stored] = filled.home.rglob("snapshots/*/model.safetensors")
    assert stored.read_bytes() == weights["model.safetensors"]


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_rows_are_the_same_in_each_form_and_a_part_of_a_split_can_be_asked_for(filled: HubStub, form: str) -> None:
    content = {
        "jsonl": lines(ROWS),
        "csv": "\n".join(["prompt,answer", *(f"{row['prompt']},{row['answer']}" for row in ROWS)]).encode(),
    }
    if form == "parquet":
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink)
        content[form] = sink.getvalue().to_pybytes()
    card = CARD
    if form == "csv":  # whose answers would be numbers
        text = b"dtype: string"
        card = b"---\ndataset_info: {features: [{name: prompt, %b}, {name: answer, %b}]}\n---\n" % (text, text)
    files = {"README.md": card, f"main/train-0.{form}": content[form]}
    add(filled.folder, "dataset", "someone/form", files)
    subset = "" if form == "csv" else "main"
    if form != "csv":
        files |= {f"main/test-0.{form}": content[form], f"other/train-0.{form}": content[form]}
        add(filled.folder, "dataset", "someone/form", files)
    whole, part = filled.ask(
        case("rows", data("someone/form", subset=subset)),
        case("rows", data("someone/form", subset=subset, split="train[2:4]")),
    )
    assert whole["rows"] == ROWS
    assert part["rows"] == ROWS[2:4]


def test_a_folder_in_the_form_of_the_hub_is_read_without_the_hub(filled: HubStub, tmp_path: Path) -> None:
    local = tmp_path / "sums"
    for name, content in data_files().items():
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_bytes(content)
    rows, refused, missing = filled.ask(
        case("rows", data(str(local))),
        case("rows", data(str(local), revision="main")),
        case("rows", data(str(tmp_path / "nowhere"))),
    )
    assert rows["rows"] == ROWS
    assert filled.asked() == []
    assert refused["error"] == f"task.sources.0.revision: {local} is here, and no id on the hub; remove the revision"
    assert missing["error"] == f"task.sources.0.path: {tmp_path}/nowhere is neither a folder nor an id on the hub"


def test_few_lines_that_cannot_be_read_are_skipped_and_many_are_refused(filled: HubStub) -> None:
    rows = [{"prompt": f"a{i % 10}b2=", "answer": str(i)} for i in range(200)]
    good = lines(rows).splitlines(keepends=True)
    add(filled.folder, "dataset", "someone/torn", {"train.jsonl": b"".join([*good[:50], b"{torn\n", *good[50:]])})
    add(filled.folder, "dataset", "someone/worse", {"train.jsonl": b"".join([*good[:50], b"{torn\n" * 3, *good[50:]])})
    few, many = filled.ask(*(case("fetch", data(name, subset="")) for name in ("someone/torn", "someone/worse")))
    assert few["data"]
    assert many["data"], "only reading finds it"
    [refused] = filled.ask(case("rows", data("someone/worse", subset="")))
    assert "train.jsonl:51: not a JSON object" in refused["error"]
    assert "(3 of 203 rows cannot be used; at most 1 % may be left out)" in refused["error"]


def test_the_hub_cannot_name_files_outside_of_its_folder(filled: HubStub) -> None:
    [first] = filled.ask(case("fetch", data()))
    [tree] = filled.home.rglob("trees/*.json")
    listed = json.loads(tree.read_text())
    listed["files"]["../../../outside.jsonl"] = listed["files"]["README.md"]
    tree.write_text(json.dumps(listed))
    [refused] = filled.ask(case("fetch", data(revision=first["data"])))
    assert refused["error"].endswith("has a file '../../../outside.jsonl', which is no path in a folder")


def test_a_full_disk_is_one_line_and_what_was_complete_is_kept(filled: HubStub) -> None:
    small = filled.ask(case("look", model()))
    [full] = filled.ask(case("fetch", model()), largest_file=1_000_000)
    assert "needed" in small[0]
    assert f"model.path: cannot store {MODEL}@" in full["error"]
    assert "free space, or set HF_HUB_CACHE" in full["error"]
    filled.asked()
    [again] = filled.ask(case("fetch", model()))
    assert "error" not in again
    assert files_asked(filled) == {"model.safetensors"}


def test_a_node_fetches_the_models_alone_and_a_plan_for_gpus_only_their_small_files(filled: HubStub) -> None:
    add(filled.folder, "model", "someone/reference", {**model_files(), "generation_config.json": b"{}"})
    both = [*model(), 'objective.kl_reference="someone/reference"', "objective.kl_coefficient=0.1"]
    small, models = filled.ask(case("small", both, data()), case("models", both, data()))
    asked = [one["path"] for one in filled.asked()]
    assert not any("datasets" in path for path in asked)
    assert sum(path.endswith("/model.safetensors") for path in asked) == 4, "HEAD and GET of each"
    [first, second] = models["folders"]
    assert f"models--someone--small/snapshots/{small['revision']}" in first
    assert "models--someone--reference/snapshots/" in second
