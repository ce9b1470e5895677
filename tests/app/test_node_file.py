"""`nodes.json` of a run folder, which somebody else may have written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dora.app.opening import read_nodes
from dora.config.schema import MAX_NODES
from dora.errors import ConfigError
from dora.node.places import KnownNode


def test_no_file_means_no_nodes(tmp_path: Path) -> None:
    assert read_nodes(tmp_path / "nodes.json") == {}


def test_what_a_run_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps({"node-1": [0, None, 2], "node-2": [1, 0, 2]}))
    assert read_nodes(path) == {"node-1": KnownNode(0, None, 2), "node-2": KnownNode(1, 0, 2)}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(json.dumps({"n": [10**9, 0, 2]}), id="a place far away"),
        pytest.param(json.dumps({"n": [MAX_NODES, 0, 2]}), id="a place behind the last"),
        pytest.param(json.dumps({"n": [-1, 0, 2]}), id="a place before the first"),
        pytest.param(json.dumps({"n": [0, -5, 2]}), id="an instance before the first"),
        pytest.param(json.dumps({"n": [0, 2**40, 2]}), id="an instance far away"),
        pytest.param(json.dumps({"n": [0, 0, 10**9]}), id="a billion servers"),
        pytest.param(json.dumps({"a": [0, 0, 2], "b": [0, 2, 2]}), id="two nodes in one place"),
        pytest.param(json.dumps({"\x1b[2J": [0, 0, 2]}), id="control characters in a name"),
        pytest.param(json.dumps({"n" * 300: [0, 0, 2]}), id="a long name"),
        pytest.param(json.dumps({"n": {"place": 0}}), id="another form"),
        pytest.param("[" * 100_000, id="nested without end"),
        pytest.param("\udcff", id="no text"),
        pytest.param(" " * (2 << 20), id="too long"),
    ],
)
def test_what_no_run_writes_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"nodes\.json: .*; delete it if all nodes are new") as caught:
        read_nodes(path)
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "nodes.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(ConfigError, match="delete it if all nodes are new"):
        read_nodes(path)
