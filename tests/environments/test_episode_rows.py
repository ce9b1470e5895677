"""Rows of episodes whose conversation goes on, is cut, is rewritten, goes back: exact tokens, exact masks."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from dora.environments import episode as episode_module
from dora.environments.episode import Episode, sampled_turns
from dora.environments.renderer import Message, RenderingFailed, open_renderer
from dora.environments.shapes import MessageShape, shapes_of
from tests.environments.recorded_engine import TOOLS, RecordedEngine
from tests.environments.test_token_identity import Seen
from tests.environments.tokenizers_of_families import family_tokenizer

QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is k?"}]
#: Two spaces become one token when encoded, so that encoding this again would give other tokens.
CALL = '<tool_call>\n{"name":  "look_up",\n "arguments": {"key": "k"}}\n</tool_call><|im_end|>'


class Chat:
    """An episode of Qwen3's small tokenizer in which text is said letter by letter."""

    def __init__(self, tokenizer: Any, *, max_tokens: int = 100_000, **settings: Any) -> None:
        self.tokenizer = tokenizer
        self.renderer = open_renderer(tokenizer, settings={"name": "qwen3", **settings})
        self.episode = Episode(self.renderer, QUESTION, max_tokens=max_tokens, tools=TOOLS)
        self.said: list[list[int]] = []

    def spell(self, text: str) -> list[int]:
        """Return the tokens of single bytes, and of special tokens, of a text."""
        ids = self.tokenizer.encode(text, special_tokens=False)
        names = [self.tokenizer._codec.id_to_token(token) for token in ids]
        return [
            self.tokenizer.token_id(piece)
            for name in names
            for piece in ([name] if name.startswith(("<", "</")) and len(name) > 3 else name)
        ]

    def say(self, text: str, finish: str = "stop"):
        ids = self.spell(text)
        self.episode.append(ids, [-0.5] * len(ids))
        self.said.append(ids)
        return self.episode.end_turn(finish)

    def text(self, ids: Any) -> str:
        return self.tokenizer.decode(list(ids), special_tokens=True)

    def trained(self) -> list[list[int]]:
        """Return the tokens with mask 1 of each row."""
        return [[t for t, m in zip(row.ids, row.mask, strict=True) if m] for row in self.episode.rows()]


@pytest.fixture
def chat(qwen3) -> Chat:
    return Chat(qwen3)


def result(content: str, call: str = "call_0") -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call, "content": content}]


def test_an_episode_that_only_grows_is_one_row(chat):
    prompt = chat.renderer.render(QUESTION, tools=TOOLS)
    assert chat.episode.context() == prompt
    turn = chat.say(CALL)
    assert (turn.calls[0].name, turn.calls[0].arguments) == ("look_up", {"key": "k"})
    assert chat.episode.observe(result("7")) == len(chat.episode.tokens)
    between = chat.episode.context()[len(prompt) + len(chat.said[0]) :]
    assert chat.text(between) == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    turn = chat.say("it is 7<|im_end|>")
    assert (turn.content, turn.calls) == ("it is 7", ())
    (row,) = chat.episode.rows()
    assert row.ids.tolist() == [*prompt, *chat.said[0], *between, *chat.said[1]]
    assert list(row.mask) == [0] * len(prompt) + [1] * len(chat.said[0]) + [0] * len(between) + [1] * len(chat.said[1])
    assert [logprob == -0.5 for logprob in row.logprobs] == [mask == 1 for mask in row.mask]
    assert not chat.episode.forks


def test_a_sampled_end_token_is_trained_and_the_same_token_of_a_template_is_not(qwen3):
    end = qwen3.token_id("<|im_end|>")
    sampled, template = Chat(qwen3), Chat(qwen3)
    sampled.say("so<|im_end|>")
    template.say("so")  # ended by a stop string
    for chat in (sampled, template):
        chat.episode.observe([{"role": "user", "content": "go on"}])
        chat.say("yes<|im_end|>")
    (left,), (right,) = sampled.episode.rows(), template.episode.rows()
    assert left.ids == right.ids
    place = len(sampled.episode.prompt) + 2
    assert left.ids[place] == end
    assert (left.mask[place], right.mask[place]) == (1, 0)
    assert (left.logprobs[place], right.logprobs[place]) == (-0.5, 0)
    assert [i for i, (a, b) in enumerate(zip(left.mask, right.mask, strict=True)) if a != b] == [place]


def test_the_shapes_of_earlier_messages_are_found_once(chat, monkeypatch):
    looked_at: list[int] = []
    given: list[list[MessageShape]] = []
    expected: list[list[MessageShape]] = []

    def counting(messages: list[Message]) -> list[MessageShape]:
        looked_at.append(len(messages))
        return shapes_of(messages)

    def noted(shapes: list[MessageShape], **_: Any) -> None:
        given.append(shapes)

    monkeypatch.setattr(episode_module, "shapes_of", counting)
    monkeypatch.setattr(chat.renderer, "require_shapes", noted)
    for number in range(12):
        chat.say((CALL, CALL.replace("look_up", "look_up("), "no<|im_end|>")[number % 3])
        added = result(f"{number}") * (1 + number % 2)
        if number == 7:
            chat.episode.rewrite([*chat.episode.messages, {"role": "user", "content": "again"}])
        else:
            chat.episode.observe(added)
        expected.append(shapes_of(chat.episode.messages))
    assert given == expected
    assert sum(looked_at) <= 2 * len(chat.episode.messages) + len(expected[7])


def test_the_tokens_of_a_row_become_numbers_once_when_a_turn_is_bridged(chat):
    passed = 0

    class Counted(Sequence):
        def __init__(self, ids: list[int]) -> None:
            self.ids = ids

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, at: Any) -> Any:
            nonlocal passed
            passed += 1
            return self.ids[at]

    chat.say("so<|im_end|>")
    row, start = chat.episode.context(), len(chat.episode.prompt)
    added = chat.renderer.bridge(Counted(row[:start]), Counted(row[start:]), QUESTION[1:], tools=TOOLS)
    assert added == chat.renderer.bridge(row[:start], row[start:], QUESTION[1:], tools=TOOLS)
    assert passed <= len(row) + 2  # and the end of each


def test_a_turn_that_was_cut_off_is_closed_by_the_template(chat):
    chat.say("it i", "length")
    before = chat.episode.context()
    chat.episode.observe([{"role": "user", "content": "go on"}])
    added = chat.episode.context()[len(before) :]
    assert chat.text(added) == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_tokens_may_come_in_parts(chat):
    ids = chat.spell(CALL)
    for token in ids:
        chat.episode.append([token], [-1.0])
    assert chat.episode.end_turn("stop").calls[0].arguments == {"key": "k"}
    assert chat.episode.tokens.tolist() == ids


def test_thinking_is_kept_when_the_user_goes_on(chat):
    chat.say("<think>\nhard\n</think>\n\n7<|im_end|>")
    chat.episode.observe([{"role": "user", "content": "sure?"}])
    assert not chat.episode.forks
    assert "hard" in chat.text(chat.episode.context())


def test_a_template_that_drops_thinking_forks_and_both_rows_are_right(qwen3):
    chat = Chat(qwen3, thinking_retention="tool_cycle")
    prompt = chat.episode.context()
    chat.say("<think>\nhard\n</think>\n\n7<|im_end|>")
    assert chat.episode.messages[-1]["reasoning_content"] == "hard"
    question = {"role": "user", "content": "sure?"}
    chat.episode.observe([question])
    rendered = chat.renderer.render([*QUESTION, {"role": "assistant", "content": "7"}, question], tools=TOOLS)
    assert chat.episode.context() == rendered
    assert "hard" not in chat.text(rendered)
    chat.say("yes<|im_end|>")
    first, second = chat.episode.rows()
    assert first.ids.tolist() == [*prompt, *chat.said[0]]
    assert list(first.mask) == [0] * len(prompt) + [1] * len(chat.said[0])
    assert second.ids.tolist() == [*rendered, *chat.said[1]]
    assert list(second.mask) == [0] * len(rendered) + [1] * len(chat.said[1])
    (fork,) = chat.episode.forks
    assert rendered[: fork.keep] == prompt[: fork.keep]
    assert (fork.start, fork.parent, fork.keep) == (len(chat.said[0]), 0, len(prompt))


def test_a_turn_is_parsed_after_what_its_prompt_opened(tmp_path):
    tokenizer = family_tokenizer(tmp_path, "qwen3.5")
    renderer = open_renderer(tokenizer, settings={"name": "qwen3.5"})
    episode = Episode(renderer, QUESTION, max_tokens=1000)
    sampled = tokenizer.encode("hard\n</think>\n\n7<|im_end|>", special_tokens=False)
    episode.append(sampled, [-1.0] * len(sampled))
    assert episode.end_turn("stop").reasoning == "hard"


def test_a_turn_that_ended_within_its_reasoning_forks(chat):
    chat.say("<think>\nhard<|im_end|>")
    chat.episode.observe([{"role": "user", "content": "well?"}])
    assert chat.episode.fork_causes == ["unbridged"]
    chat.say("7<|im_end|>")
    assert chat.trained() == chat.said


def test_a_conversation_that_comes_back_in_other_words_of_the_protocol_is_the_same(chat):
    chat.say("<think>\nhard\n</think>\n\nso\n" + CALL)
    before = chat.episode.context()
    returned = [
        {**QUESTION[0], "cache": True},
        {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "k?"}]},
        {
            "role": "assistant",
            "content": "so",
            "refusal": None,
            "tool_calls": [{"id": "other", "function": {"name": "look_up", "arguments": '{ "key":"k" }'}, "index": 0}],
        },
        {"role": "tool", "tool_call_id": "other", "content": "7"},
    ]
    chat.episode.rewrite(returned)
    assert not chat.episode.forks
    assert chat.episode.context()[: len(before)] == before


@pytest.mark.parametrize(
    "change",
    [
        {"content": "so!"},
        {"tool_calls": []},
        {"tool_calls": [{"id": "call_0", "function": {"name": "look_up", "arguments": {"key": "j"}}}]},
        {"tool_calls": [{"id": "call_0", "function": {"name": "look", "arguments": {"key": "k"}}}]},
        {"role": "user"},
    ],
    ids=["content", "no call", "arguments", "name", "role"],
)
def test_an_edited_turn_forks(chat, change):
    chat.say("so\n" + CALL)
    first = chat.episode.context()
    edited = [*QUESTION, {**chat.episode.messages[-1], **change}, {"role": "user", "content": "and?"}]
    chat.episode.rewrite(edited)
    assert chat.episode.fork_causes == ["rewritten"]
    rendered = chat.renderer.render(edited, tools=TOOLS)
    assert chat.episode.context() == rendered
    chat.say("7<|im_end|>")
    rows = chat.episode.rows()
    assert rows[0].ids.tolist() == first
    assert rows[1].ids[: len(rendered)].tolist() == rendered
    assert chat.trained() == chat.said


def test_a_conversation_that_was_summarized_shares_only_the_equal_prefix(chat):
    chat.say(CALL)
    chat.episode.observe(result("7"))
    chat.say("it is 7<|im_end|>")
    summary = [QUESTION[0], {"role": "user", "content": "k is 7; what is j?"}]
    chat.episode.rewrite(summary)
    (fork,) = chat.episode.forks
    rendered = chat.renderer.render(summary, tools=TOOLS)
    prompt = chat.episode.prompt.tolist()
    assert rendered[: fork.keep] == prompt[: fork.keep]
    assert rendered[fork.keep] != prompt[fork.keep]
    assert chat.episode.context() == rendered
    chat.say("<|im_end|>")
    assert chat.trained() == [[*chat.said[0], *chat.said[1]], chat.said[2]]


def test_going_back_continues_the_sampled_tokens_themselves(chat):
    prompt = chat.episode.context()
    chat.say(CALL)
    first = list(chat.episode.messages)
    chat.episode.observe(result("7"))
    chat.say("it is 7<|im_end|>")
    chat.episode.rewrite([*first, *result("8")])
    assert chat.episode.fork_causes == ["branched"]
    assert chat.text(chat.said[0]).count("  ") == 1
    assert chat.spell(CALL) != chat.tokenizer.encode(CALL, special_tokens=False)
    context = chat.episode.context()
    assert context[: len(prompt) + len(chat.said[0])] == [*prompt, *chat.said[0]]
    assert chat.text(context).endswith("\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    chat.say("it is 8<|im_end|>")
    assert chat.trained() == [[*chat.said[0], *chat.said[1]], chat.said[2]]
    assert chat.episode.rows()[1].mask[: len(prompt) + len(chat.said[0])].count(1) == 0


def test_going_back_to_the_beginning_of_an_observation_continues_the_sampled_tokens_too(chat):
    prompt = chat.episode.context()
    chat.say(CALL)
    first = [*chat.episode.messages, *result("7")]
    chat.episode.observe([*result("7"), {"role": "user", "content": "hurry"}])
    chat.say("it is 6<|im_end|>")
    chat.episode.rewrite(first)
    assert chat.episode.fork_causes == ["branched"]
    assert chat.episode.context()[: len(prompt) + len(chat.said[0])] == [*prompt, *chat.said[0]]
    assert chat.text(chat.episode.context()).endswith("\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_a_turn_may_be_sampled_again(chat):
    chat.say(CALL)
    chat.episode.observe(result("7"))
    asked = chat.episode.context()
    chat.say("it is 6<|im_end|>")
    chat.episode.rewrite([*chat.episode.messages[:-1]])
    assert chat.episode.fork_causes == ["resampled"]
    assert chat.episode.context() == asked
    chat.say("it is 7<|im_end|>")
    assert chat.trained() == [[*chat.said[0], *chat.said[1]], chat.said[2]]
    assert [row.ids[: len(asked)].tolist() for row in chat.episode.rows()] == [asked, asked]


@pytest.mark.parametrize("family", ["qwen3", "glm-4.5", "kimi-k2"])
def test_two_observations_without_a_turn_between_them_are_one(family, tmp_path):
    tokenizer = family_tokenizer(tmp_path, family)
    renderer = open_renderer(tokenizer, settings={"name": family})
    engine = RecordedEngine(renderer, tokenizer, seed=1)
    episodes = [Episode(renderer, QUESTION, max_tokens=10_000, tools=TOOLS) for _ in range(2)]
    ids = engine.written(episodes[0].context(), QUESTION, [("look_up", {"key": "k"})])
    for episode in episodes:
        episode.append(ids, [-1.0] * len(ids))
        call = episode.end_turn("stop").calls[0].id
    both = [*result("7", call), {"role": "user", "content": "hurry"}]
    for observation in both:
        episodes[0].observe([observation])
    episodes[1].observe(both)
    assert episodes[0].context() == episodes[1].context()
    assert (len(episodes[0].forks), len(episodes[1].forks)) == (1, 0)


def test_an_older_row_may_go_on_after_a_fork(chat):
    chat.say(CALL)
    chat.episode.observe(result("7"))
    chat.say("it is 7<|im_end|>")
    first = list(chat.episode.messages)
    whole = chat.episode.context()
    chat.episode.rewrite([{"role": "user", "content": "a subtask"}])
    chat.say("done<|im_end|>")
    chat.episode.rewrite([*first, {"role": "user", "content": "the subtask is done"}])
    assert chat.episode.context()[: len(whole)] == whole
    chat.say("good<|im_end|>")
    assert [fork.parent for fork in chat.episode.forks] == [0, 0]
    assert chat.trained() == [[*chat.said[0], *chat.said[1]], chat.said[2], chat.said[3]]


def test_rows_follow_from_the_answer_its_mask_and_the_forks(chat):
    test_an_older_row_may_go_on_after_a_fork(chat)
    episode = chat.episode
    rows = [episode.prompt]
    ends = [*(fork.start for fork in episode.forks), len(episode.tokens)]
    rows = [episode.prompt + episode.tokens[: ends[0]]]
    for fork, end in zip(episode.forks, ends[1:], strict=True):
        rows.append(rows[fork.parent][: fork.keep] + episode.tokens[fork.start : end])
    assert [row.ids for row in episode.rows()] == rows


def test_a_row_without_a_sampled_token_is_not_trained_and_rows_end_with_one(chat):
    assert chat.episode.rows() == []
    chat.say(CALL)
    prompt = len(chat.episode.prompt)
    chat.episode.observe(result("7"))
    (row,) = chat.episode.rows()
    assert len(row.ids) == prompt + len(chat.said[0])
    chat.episode.rewrite([{"role": "user", "content": "other"}])
    assert len(chat.episode.forks) == 1
    assert len(chat.episode.rows()) == 1


@pytest.mark.parametrize("room", [0, 1, 30, 31])
def test_an_observation_is_cut_so_that_one_token_can_follow(qwen3, room):
    whole = Chat(qwen3)
    whole.say(CALL)
    whole.episode.observe(result("7"))
    size = len(whole.episode.tokens) - len(whole.said[0])
    chat = Chat(qwen3, max_tokens=len(whole.said[0]) + room + 1)
    chat.say(CALL)
    added = chat.episode.observe(result("7")) - len(chat.said[0])
    assert added == min(room, size)
    assert chat.episode.truncated == (room < size)
    assert chat.episode.tokens == whole.episode.tokens[: len(chat.episode.tokens)]
    chat.episode.append([5], [-1.0])
    assert len(chat.episode.tokens) <= chat.episode.max_tokens


def test_an_observation_that_fits_exactly_is_not_cut(qwen3):
    whole = Chat(qwen3)
    whole.say(CALL)
    size = whole.episode.observe(result("7"))
    chat = Chat(qwen3, max_tokens=size + 1)
    chat.say(CALL)
    assert chat.episode.observe(result("7")) == size
    assert not chat.episode.truncated


def test_a_fork_is_cut_too(qwen3):
    chat = Chat(qwen3, max_tokens=200)
    chat.say(CALL)
    assert chat.episode.rewrite([{"role": "user", "content": "words " * 500}]) == 199
    assert chat.episode.truncated
    assert len(chat.episode.context()) <= len(chat.episode.prompt) + 199


def test_results_of_an_invalid_call_reach_the_policy(chat):
    turn = chat.say("<tool_call>{</tool_call><|im_end|>")
    assert turn.calls[0].arguments is None
    chat.episode.observe(result("no valid call", turn.calls[0].id))
    assert "<tool_response>\nno valid call\n" in chat.text(chat.episode.context())
    assert chat.episode.messages[2] == {"role": "assistant", "content": "{"}
    chat.episode.rewrite(
        [*chat.episode.messages[:2], {"role": "assistant", "content": "x"}, *chat.episode.messages[3:]]
    )
    assert chat.text(chat.episode.context()).endswith("user\nno valid call<|im_end|>\n<|im_start|>assistant\n")


def test_an_episode_can_be_repeated_from_its_recorded_tokens(chat):
    observations = [result("7"), [{"role": "user", "content": "sure?"}]]
    for text, observation in zip((CALL, "it is 7<|im_end|>"), observations, strict=True):
        chat.say(text)
        chat.episode.observe(observation)
    chat.episode.append(chat.spell("I am"), [-0.5] * 4)  # a turn under way
    first = chat.episode
    again = Episode(chat.renderer, QUESTION, max_tokens=100_000, tools=TOOLS, prompt=first.prompt)
    *ended, (start, end) = sampled_turns(first.mask)
    for turn, observation in zip(ended, observations, strict=True):
        again.append(first.tokens[slice(*turn)], first.logprobs[slice(*turn)])
        again.end_turn("stop")
        again.observe(observation)
    assert len(again.tokens) == start
    again.append(first.tokens[start:end], first.logprobs[start:end])
    assert (again.tokens, again.mask, again.logprobs) == (first.tokens, first.mask, first.logprobs)
    assert again.context() == first.context()


def test_a_first_prompt_that_cannot_be_rendered_is_an_error(chat):
    for messages in ([], [{"role": "user", "content": 7}], [{"role": "user", "content": "\ud800"}]):
        with pytest.raises(RenderingFailed):
            Episode(chat.renderer, messages, max_tokens=10)


def test_calls_are_numbered_through_the_episode(chat):
    assert [call.id for call in chat.say(CALL[: -len("<|im_end|>")] + CALL).calls] == ["call_0", "call_1"]
    chat.episode.observe([*result("7"), *result("8", "call_1")])
    assert [message.get("name") for message in chat.episode.messages[-2:]] == ["look_up", "look_up"]
    assert [call.id for call in chat.say(CALL).calls] == ["call_2"]
    chat.episode.observe(result("9", "call_2"))
    assert [call.id for call in chat.say(CALL).calls] == ["call_3"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "must end with one that the policy can answer"),
        ([{"role": "assistant", "content": "me"}], "must end with one that the policy can answer"),
        ([{"content": "no role"}], "missing required field `role`"),
        ([{"role": "tool", "content": 7}], "Expected `str | array | null`, got `int`"),
        ([{"role": "robot", "content": "beep"}], "Invalid enum value 'robot'"),
        (["text"], "Expected `object`, got `str`"),
        ([{"role": "user", "content": "\ud800"}], "renderer qwen3 rejected the messages"),
        ([{"role": "tool", "content": "no call"}, {"role": "assistant", "tool_calls": [{"id": "a"}]}], "`function`"),
    ],
    ids=range(8),
)
def test_messages_that_are_no_conversation_are_an_error_and_change_nothing(chat, messages, reason):
    chat.say(CALL)
    before = chat.episode.context(), list(chat.episode.messages), list(chat.episode.forks)
    with pytest.raises(RenderingFailed, match=reason.replace("|", r"\|")):
        chat.episode.rewrite(messages)
    assert (chat.episode.context(), list(chat.episode.messages), list(chat.episode.forks)) == before


def _changed(rng: random.Random, messages: list[Any], engine: RecordedEngine) -> list[Any]:
    """Return a conversation as an agent may send it next."""
    user = {"role": "user", "content": engine.text()}
    kind = rng.choice(("on", "on", "on", "back", "again", "edit", "drop", "summary"))
    place = rng.randrange(len(messages))
    if kind == "back":
        return [*messages[: place + 1], user]
    if kind == "again":
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return messages[: rng.choice(turns)]
    if kind == "edit":
        return [*messages[:place], {**messages[place], "content": engine.text()}, *messages[place + 1 :], user]
    if kind == "drop" and messages[place]["role"] == "user":
        return [*messages[:place], *messages[place + 1 :], user]
    if kind == "summary":
        return [{"role": "user", "content": engine.text(words=20)}]
    return [*messages, user]


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "glm-4.5", "minimax-m2", "nemotron-3"])
def test_each_sampled_token_is_trained_once_after_what_it_saw_however_the_conversation_changes(family, tmp_path):
    tokenizer = family_tokenizer(tmp_path, family)
    renderer = open_renderer(tokenizer, settings={"name": family})
    num_forks = 0
    for seed in range(25):
        engine, rng, seen = RecordedEngine(renderer, tokenizer, seed=seed), random.Random(seed), Seen()
        episode = Episode(renderer, QUESTION, max_tokens=100_000, tools=TOOLS)
        answer = array("i")
        for _ in range(8):
            sampled = engine.turn(episode.context(), episode.messages)
            seen.sample(episode, sampled.ids, parts=7)
            episode.end_turn(sampled.finish)
            episode.rewrite(_changed(rng, list(episode.messages), engine))
            assert episode.tokens[: len(answer)] == answer
            answer = episode.tokens[:]
        seen.check(episode)
        num_forks += len(episode.forks)
    assert num_forks > 25
