"""Inputs that once broke a parser: each gave another exception, several lines, or did not end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import msgspec
import pytest

from dora.config.load import load
from dora.errors import ConfigError, one_line
from dora.tasks.pool import GradingFailed, outcome_of
from dora.weights.checkpoints import MANIFEST, rank_file, read_manifest
from tests.fuzz.__main__ import PARSERS
from tests.fuzz.test_messages import packed
from tests.observe.builders import resumed

DEEP: Final = b"[" * 100_000
DEEP_MAP: Final = b"\x81\xa1a" * 100_000
SHAPE: Final = msgspec.msgpack.encode(
    {
        **{"type": "TrainerData", "epoch": 1, "id": 1},
        "message": {
            **{"type": "MicroBatch", "step": 0, "index": 0, "last": True},
            "tokens": ["<i4", [2**63 - 1] * 100_000],
        },
    }
)
EVALUATION: Final = {"kind": "evaluation", "name": "a", "version": 1, "mean": 0.5, "pass_at_n": 0.5, "num_samples": 4}
RECORDED: Final = b'[lengths]\nregime = "recorded"\nprompts = [5]\nanswers = [[]]\nrewards = [[]]\n'

FOUND: Final = [
    ("stream", b'data: {"meta_info":{"output_token_logprobs":[[-0.5,7,' + DEEP + b"\n"),
    ("stream", b'data: {"error":"one\\ntwo\\u001b[31m"}\n'),
    ("http", b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {"error":"one\\ntwo"}\n'),
    ("loads", b'{"loads":[],"other":' + DEEP),
    ("server info", b'{"tp_size":null}'),
    ("server info", b'{"max_req_input_len":"long"}'),
    ("status", b'{"other":' + DEEP),
    ("status", b'{"run_id":"\xff"}'),
    ("said", b'{"said":"\xff"}'),
    ("said", b'{"other":' + DEEP),
    ("trainer frame", packed([DEEP_MAP])),
    ("trainer frame", packed([SHAPE])),
    ("sender", b"a warning of a library\n"),
    ("request", b'{"text":"\xff"}'),
    ("request", b'{"sampling_params":' + DEEP),
    ("record", DEEP_MAP),
    ("header", b"\x82\xa4type\xa6Header\xa6format" + DEEP_MAP),
    ("kept trajectories", b'{"prompt":"\xff"}\n'),
    ("kept trajectories", b'{"one\\ntwo":1}\n'),
    ("version manifest", DEEP),
    ("version manifest", b'{"version": 3, "files": [], "num_bytes": 0}'),
    ("version manifest", b'{"version": 3, "files": {"../v000003/config.json": ""}, "num_bytes": 2}'),
    ("version manifest", b'{"version": 4, "files": {}, "num_bytes": 0}'),
    ("config", b"[run]\nseed = " + DEEP),
    ("config", b"[run]\nseed = " + b"9" * 5_000),
    ("config", b"[run]\nseed = 0x" + b"f" * 9_000),
    ("config", b"a" + b".a" * 90_000 + b" = 1"),
    ("set", b"run.seed=" + DEEP),
    ("set", b"run.seed=" + b"9" * 5_000),
    ("set", b"run" + b".a" * 90_000 + b"=1"),
    ("workload", b"[job]\nsteps = " + DEEP),
    ("workload", b"[job]\nsteps = " + b"9" * 5_000),
    ("workload", b"[job]\nsteps = -" + b"9" * 400),
    ("workload", b"[fleet]\npush_fixed_s = nan"),
    ("workload", RECORDED),
    ("workload set", b"job.steps=" + b"9" * 4_000),
    ("workload set", b"job.without=\xff"),
    ("jsonl", b'{"prompt":' + DEEP + b"\n"),
    ("jsonl", b'{"one\\ntwo": 1}\n'),
    ("jsonl", b'{"' + b"x" * 5_000 + b'": 1}\n'),
    ("parquet", b"PAR1" + b"\0" * 30 + b"PAR1"),
    ("parquet", PARSERS["parquet"].samples[0].replace(b"1+1=", b"\xff\xff\xff\xff")),
]


@pytest.mark.parametrize(("name", "data"), FOUND, ids=[f"{name} {number}" for number, (name, _) in enumerate(FOUND)])
def test_an_input_that_once_broke_a_parser_is_refused_in_one_line(name: str, data: bytes, tmp_path: Path) -> None:
    assert not PARSERS[name].check(data, tmp_path)


def test_the_reason_of_a_grader_is_one_line() -> None:
    assert outcome_of({"error": "ValueError: one\ntwo\x1b[31m"}) == GradingFailed(
        "error: ValueError: one two\ufffd[31m"
    )


HOLES: Final = {
    "step": 1,
    "world_size": 1,
    "chain": "",
    "state_checksums": [],
    "num_bytes": [5],
    "file_checksums": ["ef"],
}


@pytest.mark.parametrize("content", [b"", b"{}", b"null", DEEP, json.dumps(HOLES).encode()])
def test_a_checkpoint_with_a_damaged_manifest_is_ignored(content: bytes, tmp_path: Path) -> None:
    rank_file(tmp_path, 0).write_bytes(b"12345")
    (tmp_path / MANIFEST).write_bytes(content)
    assert read_manifest(tmp_path) is None


def test_a_torn_last_row_of_metrics_is_left_out(tmp_path: Path) -> None:
    whole = json.dumps(EVALUATION).encode() + b"\n"
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(whole + whole[:30])
    assert [score.version for score in resumed(path).facts.scores] == [1]


@pytest.mark.parametrize(
    "row",
    [
        b'{"kind": "st{"kind": "step"}',
        b"[]",
        DEEP,
        b"\xff",
        b'{"kind": "evaluation"}',
        json.dumps({**EVALUATION, "mean": "half"}).encode(),
    ],
)
def test_a_damaged_row_of_metrics_is_skipped(row: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(row + b"\n" + json.dumps(EVALUATION).encode() + b"\n")
    assert [score.version for score in resumed(path).facts.scores] == [1]


def test_a_quoted_value_cannot_look_like_another_problem() -> None:
    assert str(ConfigError("a: one\ntwo", "b: \x1b[2Jthree")) == "a: one two\nb: \ufffd[2Jthree"
    assert len(one_line("x" * 10**6)) == 1_000


def test_a_setting_that_is_not_text_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"^--set run\.name=.: not UTF-8 text$"):
        load(None, ["run.name=\udcff"], environ={})
