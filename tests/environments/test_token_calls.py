"""Requests of a session with token ids, and the rows of an episode whose conversations are tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dora.environments.api import Turn
from dora.environments.chat import ChatRefused
from dora.environments.episode import Episode
from dora.environments.renderer import RenderingFailed, open_renderer
from dora.environments.token_calls import TokenReply, read_continue, read_generate
from dora.seed.policy import path as seed_path
from dora.tasks.tokenizer import load_tokenizer
from tests.environments.token_agent import ASK

END = 98


def encoded(**body: Any) -> bytes:
    return json.dumps(body).encode()


def test_a_reply_has_the_ids_that_were_sampled_and_their_logprobs() -> None:
    turn = Turn("hm", token_ids=(5, 98), logprobs=(-0.5, float("-inf")))
    asked = read_generate(encoded(token_ids=[1, 2], model="m", sampling_params={"temperature": 0.1, "max_tokens": 3}))
    assert (asked.left_aside, asked.max_tokens) == (("temperature",), 3)
    found = json.loads(TokenReply("7-1", asked, turn).whole())
    assert found["prompt_token_ids"] == [1, 2]
    [choice] = found["choices"]
    assert choice["token_ids"] == [5, 98]
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == ["token_id:5", "token_id:98"]
    assert content[0]["logprob"] == -0.5
    assert content[1]["logprob"] < -1e38
    found = json.loads(TokenReply("7-2", read_continue(encoded(prompt=[1, 2, 3])), turn).whole())
    assert (found["object"], found["choices"][0]["token_ids"]) == ("text_completion", [5, 98])
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@pytest.mark.parametrize(
    ("read", "body", "says"),
    [
        (read_continue, {"prompt": "2+2"}, "prompt: must be the token ids"),
        (read_continue, {"prompt": [[1], [2]]}, "prompt: must be the token ids of one conversation"),
        (read_continue, {}, "prompt: must be the token ids"),
        (read_continue, {"prompt": []}, "prompt: must be .* length >= 1"),
        (read_continue, {"prompt": [-1]}, "prompt: must be .*Expected `int` >= 0"),
        (read_continue, {"prompt": [1], "stream": True}, "stream: is served by /v1/chat/completions only"),
        (read_continue, {"prompt": [1], "best_of": 2}, "best_of: "),
        (read_continue, {"prompt": [1], "n": 2}, "n: a session samples one answer at a time, not 2"),
        (read_generate, {}, "missing required field `token_ids`"),
        (read_generate, {"token_ids": [2**31]}, "Expected `int` <"),
        (read_generate, {"token_ids": [1], "sampling_params": {"logit_bias": {"1": 1}}}, "logit_bias: "),
    ],
)
def test_what_is_not_served_is_refused(read: Any, body: dict[str, Any], says: str) -> None:
    with pytest.raises(ChatRefused, match=says):
        read(encoded(**body))


def sampled(episode: Episode, *tokens: int) -> None:
    episode.append(tokens, [-0.5] * len(tokens))
    episode.end_turn("stop")


@pytest.fixture
def episode() -> Episode:
    renderer = open_renderer(load_tokenizer(seed_path("seed-tools")))
    return Episode(renderer, [], max_tokens=100, prompt=ASK)


def test_a_conversation_that_continues_a_row_extends_it(episode: Episode) -> None:
    sampled(episode, 5, 6, END)
    episode.continue_from([*ASK, 5, 6, END, 95, 97])
    sampled(episode, 7, END)
    assert not episode.forks
    assert episode.context() == [*ASK, 5, 6, END, 95, 97, 7, END]
    assert [*episode.mask] == [1, 1, 1, 0, 0, 1, 1]


def test_one_that_differs_forks_after_what_both_have(episode: Episode) -> None:
    sampled(episode, 5, 6, END)
    episode.continue_from([*ASK, 5, 9, 9])
    sampled(episode, 7, END)
    episode.continue_from([*ASK, 5, 6, END, 95])  # back to the first row
    sampled(episode, 8, END)
    assert [(fork.parent, fork.keep) for fork in episode.forks] == [(0, len(ASK) + 1), (0, len(ASK) + 3)]
    assert episode.fork_causes == ["rewritten", "branched"]
    assert episode.context() == [*ASK, 5, 6, END, 95, 8, END]
    assert [*episode.mask].count(1) == 3 + 2 + 2


def test_the_same_conversation_once_more_is_another_sample(episode: Episode) -> None:
    sampled(episode, 5, END)
    episode.continue_from(ASK)
    sampled(episode, 6, END)
    assert episode.context() == [*ASK, 6, END]
    assert episode.fork_causes == ["resampled"]


def test_a_token_that_the_model_has_not_is_refused(episode: Episode) -> None:
    sampled(episode, 5, END)
    with pytest.raises(RenderingFailed, match="token 500 is none of the 165 tokens"):
        episode.continue_from([*ASK, 500])
