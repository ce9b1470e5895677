"""A program that renders conversations by itself: two requests with token ids; the second continues the first."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

#: `<|im_start|>user k0<|im_end|> <|im_start|>assistant` of the shipped policy with tools, without its spaces.
ASK = [97, 106, 95, 108, 98, 95, 97, 107, 95]


def post(path: str, body: object) -> Any:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(os.environ["DORA_SESSION"] + path, data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.loads(reply.read())["choices"][0]


def main() -> None:
    sys.stdin.readline()
    first = post("/inference/v1/generate", {"token_ids": ASK, "sampling_params": {"temperature": 0.5, "logprobs": 1}})
    assert len(first["logprobs"]["content"]) == len(first["token_ids"])
    second = post("/v1/completions", {"prompt": [*ASK, *first["token_ids"], 95, *ASK]})
    sys.stdout.write(f"{sum(first['token_ids'] + second['token_ids']) % 2}\n")


if __name__ == "__main__":
    main()
