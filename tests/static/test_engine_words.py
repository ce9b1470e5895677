"""SGLang's terms appear only in its folder and in the servers that speak its protocol."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dora.engine.api import InferenceEngine
from dora.engine.sglang import launch, protocol

DORA = Path(__file__).parents[2] / "dora"
#: Folders that may use its words, and four files: the table of engines, the options of `dora serve`, what calls the
#: embedded engine in its own process, and the calls of agents that vLLM has under the same names.
FOLDERS = ("engine/sglang/", "embedded/", "paced/", "config/")
FILES = ("engine/engines.py", "cli/processes.py", "learning/sampler.py", "environments/token_calls.py")
MAY_KNOW = (*FOLDERS, *FILES)

#: Routes and flags that are anybody's.
COMMON = {"/health", "/metrics", "/ready", "/v1/models", "--host", "--port", "--device", "--dtype"}
ROUTES = {path for path in vars(protocol).values() if isinstance(path, str) and path.startswith("/")} - COMMON
FLAGS = {word for word in launch.SGLANG if word.startswith("--")} - COMMON
FIELDS = {
    *("rid", "rids", "extra_key", "sampling_params", "sampling_seed", "stop_token_ids", "return_logprob"),
    *("meta_info", "output_token_logprobs", "input_token_logprobs", "weight_version", "weight_versions"),
    *("abort_all", "abort_all_requests", "rank_offset", "per_engine_checksum", "server_info", "model_info"),
    *("max_total_num_tokens", "max_running_requests", "num_running_reqs", "max_req_input_len", "tp_size", "dp_size"),
    *("lora_name", "lora_path", "loaded_adapters", "enable_lora", "max_loras_per_batch", "lora_target_modules"),
    *("flush_cache", "update_weights_from_disk", "update_weights_from_distributed", "init_custom_process_group"),
}
_PATHS_AND_FLAGS = "|".join(map(re.escape, sorted(ROUTES | FLAGS)))
SAID = re.compile(
    rf"sglang|(?<![\w.])(?:{_PATHS_AND_FLAGS})(?![\w-])|\b(?:{'|'.join(sorted(FIELDS))})\b", re.IGNORECASE
)


def sources() -> list[Path]:
    files = [path for path in DORA.rglob("*") if path.suffix in {".py", ".html"}]
    return sorted(path for path in files if not path.relative_to(DORA).as_posix().startswith(MAY_KNOW))


def test_no_word_of_sglang_is_used_outside_its_folder() -> None:
    found = [
        f"{path.relative_to(DORA)}:{number}: {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if SAID.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ['path = "/generate"', '"/v1/loads"', "POST /pause_generation", "rid=name", '"--tp-size", "2"', "as SGLang does"],
)
def test_a_word_of_sglang_is_found(line: str) -> None:
    assert SAID.search(line)


@pytest.mark.parametrize("line", ["request_id", "controller/generate.py", '"/health"', "a grid", "dora/engine/api.py"])
def test_words_of_dora_are_not_reported(line: str) -> None:
    assert not SAID.search(line)


def test_there_are_words_and_files_to_search() -> None:
    assert {"/generate", "/update_weights_from_distributed", "/v1/loads"} <= ROUTES
    assert {"--tp-size", "--skip-tokenizer-init", "--max-running-requests"} <= FLAGS
    assert len(sources()) > 100


def test_the_page_about_engines_names_every_method_of_the_interface() -> None:
    page = (DORA.parent / "docs" / "ENGINES.md").read_text()
    methods = [name for name, member in vars(InferenceEngine).items() if callable(member) and name[0] != "_"]
    assert len(methods) > 5
    assert [name for name in methods if f"`{name}`" not in page] == []
