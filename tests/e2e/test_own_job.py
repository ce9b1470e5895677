"""The example of docs/how-to/own-job.md, run as it stands against servers of others: it uses all their slots."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from dora.seed.policy import path as seed_path
from tests.e2e.runs import Run, assert_one_clear_error, run_to_end, settings
from tests.e2e.test_fleet import serving
from tests.hub import conftest as hub
from tests.hub.stub import add

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs/how-to/own-job.md"
SLOTS, KV_TOKENS = 256, 300_000
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The example, with a hub that has a small model under the id that it names, and data where it expects its own."""
    [text] = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    model = tmp_path / "models" / "Qwen3-0.6B"
    shutil.copytree(seed_path(), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "data").mkdir()
    rows = [{"question": f"{number}+7=?", "answer": str(number + 7)} for number in range(50)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "job.toml"
    path.write_text(text)
    with hub.running(tmp_path) as stub:
        published = {file.name: file.read_bytes() for file in model.iterdir() if file.is_file()}
        add(stub.folder, "model", "Qwen/Qwen3-0.6B", published)
        for name, value in stub.environment().items():
            monkeypatch.setenv(name, value)
        yield path


def test_the_example_uses_the_slots_and_the_kv_room_of_its_servers(example: Path) -> None:
    home = example.parent
    with ExitStack() as stack:
        options = ("--slots", str(SLOTS), "--kv-tokens", str(KV_TOKENS), "--dtype", "bfloat16")
        logs = [home / f"server-{number}.log" for number in range(3)]
        urls = [stack.enter_context(serving(home / "models/Qwen3-0.6B", log, *options))[0] for log in logs]
        small = settings(
            engine__urls=json.dumps(urls),
            trainer__device="cpu",
            run__folder=home / "runs",
            rollout__groups_per_step=2,
            rollout__group_size=2,
            rollout__filter_zero_variance=False,
            rollout__max_new_tokens=8,
            status__port=0,
        )
        run = stack.enter_context(Run(str(example), *small, cwd=home))
        instances = run.until_trained(1)["instances"]
        assert [(row["slots"], row["kv_tokens"]) for row in instances] == [(SLOTS, KV_TOKENS)] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_line_says_what_to_change(example: Path) -> None:
    done = run_to_end("run", str(example), cwd=example.parent)
    assert_one_clear_error(done, code=2, says=r"trainer\.device: 2 ranks need a CUDA device each.* set it to cpu")
