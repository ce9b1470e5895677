"""Input of the user: configuration, --set, workloads, rows of data."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow
import pytest
from pyarrow import parquet

from dora.config.load import dump, load
from dora.config.schema import Config, SourceConfig, TaskConfig
from dora.sim.workload import Workload, with_overrides
from dora.sim.workload import load as load_workload
from dora.tasks.prompts import open_stream
from dora.tasks.tokenizer import Tokenizer, load_tokenizer
from tests.fuzz.parsers import LONG, Parser, drive, require_robust, require_samples

ROOT: Final = Path(__file__).parent.parent.parent
LAUNCH: Final = ROOT / "launch"
SEED: Final = ROOT / "dora" / "seed" / "checkpoint"


def written(scratch: Path, data: bytes) -> Path:
    path = scratch / "file"
    path.write_bytes(data)
    return path


def text_of(data: bytes) -> str:
    """`data` as a command-line argument in Python."""
    return data.decode(errors="surrogateescape").replace("\0", "")


def require_stable(config: Config, scratch: Path) -> None:
    """Check that a configuration is the same after writing and loading it."""
    assert load(written(scratch, dump(config).encode()), environ={}) == config


def parse_config(data: bytes, scratch: Path) -> None:
    require_stable(load(written(scratch, data), environ={}), scratch)


def parse_set(data: bytes, scratch: Path) -> None:
    require_stable(load(None, [text_of(one) for one in data.split(b"\n")], environ={}), scratch)


def require_usable(workload: Workload) -> None:
    settings = workload.settings()
    assert settings.steps >= 2
    assert workload.num_instances >= 1
    assert workload.push_s >= 0
    assert workload.publish_s >= 0
    assert workload.rank_tokens_s > 0
    assert msgspec.convert(msgspec.to_builtins(workload), Workload) == workload


def parse_workload(data: bytes, scratch: Path) -> None:
    require_usable(load_workload(written(scratch, data)))


def parse_workload_set(data: bytes, _scratch: Path) -> None:
    require_usable(with_overrides(Workload(), [text_of(one) for one in data.split(b"\n")]))


@cache
def tokenizer() -> Tokenizer:
    """The seed policy's tokenizer, with a chat template."""
    with tempfile.TemporaryDirectory() as parent:
        folder = shutil.copytree(SEED, Path(parent) / "model", ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        )
        return load_tokenizer(folder)


def rows_of(kind: Any, **columns: Any) -> Callable[[bytes, Path], None]:
    def parse(data: bytes, scratch: Path) -> None:
        source = SourceConfig(kind=kind, path=written(scratch, data), **columns)
        task = TaskConfig(sources=(source,), chat_template=bool(columns), epochs=1)
        stream = open_stream(task, tokenizer=tokenizer(), seed=0)
        assert stream.num_prompts is not None
        for position in range(min(3, stream.num_prompts)):
            prompt = stream.at(position)
            assert prompt is not None
            assert prompt.tokens
            assert isinstance(prompt.answer, str)
            json.dumps(prompt.metadata)

    return parse


def json_rows() -> list[bytes]:
    rows = [{"prompt": "1+1=", "answer": 2, "level": 1, "tags": ["a", {"b": None}]}, {"prompt": "é", "answer": "x"}]
    return [b"".join(json.dumps(row).encode() + b"\n" for row in rows), json.dumps(rows[0]).encode()]


def chat_rows() -> list[bytes]:
    row = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}], "answer": "2"}
    return [json.dumps(row).encode() + b"\n"]


def parquet_rows() -> list[bytes]:
    table = pyarrow.table({"prompt": ["1+1=", "2+2="], "answer": ["2", None], "level": [1.5, 2.5]})
    nested = pyarrow.table({"prompt": ["a"], "answer": [[1, 2]], "more": [{"b": b"bytes", "at": 5}]})
    found = []
    for one, compression in ((table, "none"), (nested, "none"), (table, "snappy")):
        file = io.BytesIO()
        parquet.write_table(one, file, compression=compression)
        found.append(file.getvalue())
    return found


def files(folder: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((LAUNCH / folder).glob("*.toml"))]


SETS: Final = [
    b'run.name=plain\ntrainer.learning_rate=3e-4\nengine.urls=["http://a:1", "http://b:1", "http://c:1"]',
    b"task.sources.0.weight=2\ntask.sources.1.kind=arithmetic\nrollout.max_staleness=2",
    b'engine.path_map={"/a" = "/b"}\ntask.sources.0.options={max_digits = 3}',
]
WORKLOAD_SETS: Final = [b"job.steps=5\nlengths.cap=900\nfleet.server.slots=8", b"tools.calls=[1, 2.5]\njob.without=[]"]
RECORDED: Final = (
    b'[job]\ngroup_size = 2\n[lengths]\nregime = "recorded"\ncap = 50\nprompts = [5]\nanswers = [[9, 8]]\n'
    b"rewards = [[1.0, 0.0]]\n"
)

PARSERS: Final = [
    Parser("config", lambda: files("configs"), parse_config, many_lines=True),
    Parser("set", lambda: SETS, parse_set, many_lines=True),
    Parser("workload", lambda: [RECORDED, *files("workloads")], parse_workload, many_lines=True),
    Parser("workload set", lambda: WORKLOAD_SETS, parse_workload_set, many_lines=True),
    Parser("jsonl", json_rows, rows_of("jsonl")),
    Parser("chats", chat_rows, rows_of("jsonl", prompt="messages")),
    Parser("parquet", parquet_rows, rows_of("parquet")),
]


@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_any_input_is_accepted_or_refused_with_one_line_per_problem(parser: Parser, tmp_path: Path) -> None:
    require_samples(parser, tmp_path)
    require_robust(parser, tmp_path)


@pytest.mark.deep
@pytest.mark.timeout(0 if LONG else 120)
@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_many_more_inputs_are_accepted_or_refused(parser: Parser, tmp_path: Path) -> None:
    drive(parser, tmp_path)
