"""The text of answers: whole characters, no matched stop token, and deltas that add up to the whole."""

from __future__ import annotations

from dora.embedded.generation import Generation, SamplingParams
from dora.embedded.text import Text


class Bytes:
    """A byte-level tokenizer: token n is byte n."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")


class ByteFallback(Bytes):
    """Bytes that are no whole character are a replacement character each, as in vocabularies of SentencePiece."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        whole = bytes(token_ids).decode(errors="ignore")
        return whole + "\ufffd" * (len(token_ids) - len(whole.encode()))


def generation(text: str) -> Generation:
    return Generation(rid="a", prompt_ids=[1], sampling=SamplingParams(), output_ids=list(text.encode()))


async def test_cumulative_text_is_the_whole_text_so_far() -> None:
    text = Text(generation("añb"), Bytes())
    assert [text.upto(end, incremental=False) for end in range(5)] == ["", "a", "a\ufffd", "añ", "añb"]


async def test_incremental_text_holds_a_character_back_until_it_is_whole() -> None:
    text = Text(generation("añb€"), Bytes())
    assert [text.upto(end, incremental=True) for end in range(8)] == ["", "a", "", "ñ", "b", "", "", "€"]


async def test_no_byte_of_a_character_is_sent_before_the_last() -> None:
    text = Text(generation("a€b"), ByteFallback())
    assert [text.upto(end, incremental=True) for end in range(6)] == ["", "a", "", "", "€", "b"]


async def test_an_incomplete_character_is_sent_at_the_end() -> None:
    one = Generation(rid="a", prompt_ids=[1], sampling=SamplingParams(), output_ids=[97, 0xC3])
    text = Text(one, Bytes())
    assert text.upto(2, incremental=True) == "a"
    one.finish_reason, one.done = {"type": "length", "length": 2}, True
    assert text.upto(2, incremental=True) == "\ufffd"


async def test_a_matched_stop_token_is_not_in_the_text() -> None:
    one = generation("ab")
    one.finish_reason, one.done = {"type": "stop", "matched": 98}, True
    assert Text(one, Bytes()).upto(2, incremental=False) == "a"
