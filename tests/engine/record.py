"""Records what one release of SGLang answers to the calls that DORA makes: `record.py URL MODEL_FOLDER > RELEASE.json`.

The server is best one of launch/sglang-cpu/serve.py with a tiny model. The last call (an update that flushes under a
running request) ends servers before 0.5.22. Run by hand when a release is added; `test_releases.py` reads the files.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiohttp

#: What is kept of /server_info, which is long and holds paths of the machine.
KEPT = ("version", "incremental_streaming_output", "max_req_input_len", "max_running_requests", "max_total_num_tokens")
PROMPT = [5, 6, 7, 8]
LIMIT_S = 30.0
SILENCE_S = 0.5  # until what a stream held back at a pause has arrived


class Recorder:
    def __init__(self, http: aiohttp.ClientSession, model: str) -> None:
        self._http = http
        self._model = model
        self._news = asyncio.Event()
        self.exchanges: dict[str, dict[str, Any]] = {}

    async def until_events(self, name: str, count: int) -> None:
        """Until a stream has brought so many."""
        async with asyncio.timeout(LIMIT_S):
            while self.exchanges.get(name, {"text": ""})["text"].count("data: ") < count:
                self._news.clear()
                await self._news.wait()

    async def call(self, name: str, method: str, path: str, body: Any = None) -> None:
        """One exchange; `status` is None where the server died of it."""
        exchange: dict[str, Any] = {"method": method, "path": path, "status": None, "text": ""}
        self.exchanges[name] = exchange
        try:
            async with self._http.request(method, path, json=body) as answer:
                exchange["status"] = answer.status
                async for data in answer.content.iter_any():
                    exchange["text"] += data.decode()
                    self._news.set()
        except (aiohttp.ClientError, ConnectionError):
            return
        finally:
            self._news.set()
        if path == "/server_info":
            info = json.loads(exchange["text"])
            exchange["text"] = json.dumps({key: info.get(key) for key in KEPT})
        exchange["text"] = exchange["text"].replace(self._model, "MODEL")

    async def generate(self, name: str, *, rid: str, tokens: int, **sampling: Any) -> None:
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, **sampling}
        body = {"rid": rid, "input_ids": PROMPT, "sampling_params": sampling, "stream": True, "return_logprob": True}
        await self.call(name, "POST", "/generate", body)

    async def update(self, name: str, folder: str, *, label: str, flush: bool) -> None:
        body = {"model_path": folder, "weight_version": label, "flush_cache": flush}
        await self.call(name, "POST", "/update_weights_from_disk", body)


async def record(url: str, model: str) -> dict[str, Any]:
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(force_close=True)) as http:
        recorder = Recorder(http, model)
        for path in ("/server_info", "/v1/loads", "/model_info", "/ready", "/get_load"):
            await recorder.call(path, "GET", path)
        for path in ("/begin_weight_update", "/weights_checker"):
            await recorder.call(f"{path} exists", "DELETE", path)
        await recorder.call("/begin_weight_update", "POST", "/begin_weight_update", {})
        await recorder.call("/end_weight_update", "POST", "/end_weight_update", {})
        await recorder.generate("answer", rid="whole-0", tokens=4)
        await recorder.generate("unknown sampling key", rid="unknown-0", tokens=4, no_such_key=1)
        await _push(recorder, model)
        await _abort_in_a_retract_pause(recorder)
        await _flush_under_a_running_request(recorder, model)
    return recorder.exchanges


async def _push(recorder: Recorder, model: str) -> None:
    await recorder.call("pause", "POST", "/pause_generation", {"mode": "in_place"})
    await recorder.call("flush", "POST", "/flush_cache", {})
    await recorder.update("update", model, label="run/1", flush=False)
    await recorder.call("/model_info after update", "GET", "/model_info")
    await recorder.call("continue", "POST", "/continue_generation", {})
    await recorder.update("update of a missing folder", f"{model}/absent", label="run/2", flush=False)


async def _abort_in_a_retract_pause(recorder: Recorder) -> None:
    name = "answer aborted while retracted"
    async with asyncio.TaskGroup() as group:
        group.create_task(recorder.generate(name, rid="retract-0", tokens=1500))
        await recorder.until_events(name, 3)
        await recorder.call("flush of a busy server", "POST", "/flush_cache", {})
        await recorder.call("pause", "POST", "/pause_generation", {"mode": "retract"})
        await asyncio.sleep(SILENCE_S)
        await recorder.call("flush over a retracted request", "POST", "/flush_cache", {})
        await recorder.call("abort", "POST", "/abort_request", {"rid": "retract-0", "abort_all": False})
    await recorder.call("continue", "POST", "/continue_generation", {})


async def _flush_under_a_running_request(recorder: Recorder, model: str) -> None:
    name = "answer under which weights were to be flushed"
    async with asyncio.TaskGroup() as group:
        group.create_task(recorder.generate(name, rid="in-place-0", tokens=1500))
        await recorder.until_events(name, 3)
        await recorder.call("pause", "POST", "/pause_generation", {"mode": "in_place"})
        await asyncio.sleep(SILENCE_S)
        await recorder.update("update with flush in a pause in place", model, label="run/3", flush=True)
        if recorder.exchanges["update with flush in a pause in place"]["status"] is not None:
            await recorder.call("/model_info after that", "GET", "/model_info")
            await recorder.call("continue", "POST", "/continue_generation", {})
            await recorder.until_events(name, recorder.exchanges[name]["text"].count("data: ") + 3)
            await recorder.call("abort", "POST", "/abort_request", {"rid": "in-place-0", "abort_all": False})


if __name__ == "__main__":
    json.dump(asyncio.run(record(sys.argv[1], sys.argv[2])), sys.stdout, indent=1)
    sys.stdout.write("\n")
