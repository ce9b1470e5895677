"""The shipped policy of the job with a tool: it knows how a call is written, but neither when to call nor what to look
up."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dora.environments.lookup import KEYS, VALUES, Lookup
from dora.environments.renderer import open_renderer
from dora.seed.make_tools import ToolsRecipe, Transcript, as_tokens, build_tokenizer, transcript
from dora.seed.policy import path
from dora.tasks.tokenizer import load_tokenizer

RECIPE = ToolsRecipe()
NUM = 20_000


@pytest.fixture(scope="module")
def corpus() -> list[Transcript]:
    rng = random.Random(RECIPE.seed)
    return [transcript(rng, recipe=RECIPE) for _ in range(NUM)]


def share(found: list[bool]) -> float:
    assert len(found) > 500
    return sum(found) / len(found)


def turns(corpus: list[Transcript]) -> list[tuple[list[str], list[str], tuple[str, str] | None, str]]:
    """(keys in sight, results so far, the call or None, the answer) of every turn."""
    found = []
    for one in corpus:
        for number in range(len(one.calls) + bool(one.answer)):
            results = [result for _, result in one.calls[:number]]
            keys = list(dict.fromkeys([*one.prompt, *(result for result in results if result in KEYS)]))
            found.append((keys, results, one.calls[number] if number < len(one.calls) else None, one.answer))
    return found


def test_a_call_does_not_show_which_key_is_of_use(corpus):
    """The first key at first, and then what the last look-up returned, are called as often as any other key."""
    first = [(len(keys), call[0] == keys[0]) for keys, results, call, _ in turns(corpus) if call and not results]
    for size in range(2, RECIPE.max_keys + 1):
        assert share([right for among, right in first if among == size]) == pytest.approx(1 / size, abs=0.03)
    later = [(len(keys), call[0] == results[-1]) for keys, results, call, _ in turns(corpus)
             if call and results and results[-1] == keys[-1]]  # fmt: skip
    for size in range(3, RECIPE.max_keys + 2):
        assert share([right for among, right in later if among == size]) == pytest.approx(1 / size, abs=0.04)


def test_whether_a_turn_calls_does_not_depend_on_what_is_known(corpus):
    known = [(bool(set(results) & set(VALUES)), call is not None) for _, results, call, _ in turns(corpus)]
    for is_known in (False, True):
        calls = share([calls for value, calls in known if value == is_known])
        assert calls == pytest.approx(RECIPE.call_share, abs=0.02)


def test_what_a_look_up_returns_does_not_depend_on_the_key(corpus):
    calls = [call for one in corpus for call in one.calls]
    assert share([result in KEYS for _, result in calls]) == pytest.approx(0.5, abs=0.02)
    by_key = [[result for key, result in calls if key == one] for one in KEYS]
    assert all(abs(sum(result in KEYS for result in found) / len(found) - 0.5) < 0.06 for found in by_key)


def test_an_answer_is_any_value_in_sight(corpus):
    """The last one, which is right in a live episode, is no more frequent than another."""
    answers = [([result for result in results if result in VALUES], answer)
               for _, results, call, answer in turns(corpus) if call is None]  # fmt: skip
    last = [answer == values[-1] for values, answer in answers if len(values) == len(set(values)) == 2]
    assert share(last) == pytest.approx(0.5, abs=0.06)


def test_transcripts_have_the_tokens_of_live_episodes():
    tokenizer = load_tokenizer(path("seed-tools"))
    renderer = open_renderer(tokenizer)
    assert renderer.family == "qwen3"
    tokens, _ = as_tokens(Transcript(("k1", "k2"), (("k1", "k30"),), "v7"), build_tokenizer())
    reset = Lookup().schemas()
    prompt = renderer.render([{"role": "user", "content": "k1 k2"}], tools=reset)
    call = tokens[len(prompt) : len(prompt) + 6]
    (parsed,) = renderer.parse(call, prompt=prompt, tools=reset).calls
    assert (parsed.name, parsed.arguments) == ("look_up", {"key": "k1"})
    result = [{"role": "tool", "tool_call_id": parsed.id, "name": "look_up", "content": "k30"}]
    observed = renderer.bridge(prompt, call, result, tools=reset)
    assert observed is not None
    answer = [tokenizer.token_id("v7"), tokenizer.token_id("<|im_end|>")]
    assert tokens == [*prompt, *call, *observed, *answer]
    assert len(prompt) <= 30


def test_the_shipped_tokenizer_is_that_of_the_script_and_spells_other_text():
    shipped = AutoTokenizer.from_pretrained(path("seed-tools"))
    assert shipped.get_vocab() == build_tokenizer().get_vocab()
    for word in (*KEYS, *VALUES, "<|im_start|>", "<|im_end|>", "<tool_call>", "user", "assistant"):
        assert len(shipped.encode(word, add_special_tokens=False)) == 1
    text = 'Other text, {"with": [1, 2]}\nand lines.'
    assert shipped.decode(shipped.encode(text, add_special_tokens=False)) == text


def test_the_weights_are_small():
    (weights,) = path("seed-tools").glob("*.safetensors")
    assert weights.stat().st_size <= 2_000_000


def test_its_first_turn_is_a_call_of_either_key_or_a_guess():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path("seed-tools"))
    tokenizer = load_tokenizer(path("seed-tools"))
    renderer = open_renderer(tokenizer)
    called, guessed = [], []
    for seed in range(16):
        reset = Lookup(named=2).reset({"seed": seed})
        prompt = renderer.render(reset.messages, tools=reset.tools)
        inputs = torch.tensor([prompt]).expand(32, -1)
        outputs = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=True, top_k=0,
                                 max_new_tokens=8)  # fmt: skip
        for row in outputs[:, len(prompt) :].tolist():
            stop = next((place for place, token in enumerate(row) if token in renderer.stop_ids), len(row))
            turn = renderer.parse(row[: stop + 1], prompt=prompt, tools=reset.tools)
            if turn.calls and turn.calls[0].arguments:
                called.append(reset.messages[0]["content"].split()[0] == turn.calls[0].arguments.get("key"))
            else:
                guessed.append(turn.content in VALUES)
    assert share([*called, *called]) == pytest.approx(0.5, abs=0.15)
    assert sum(guessed) > 0.9 * len(guessed) > 60


@pytest.mark.deep
def test_a_folder_is_made_by_the_command(tmp_path):
    code = "from dora.seed.make_tools import *; make(Path(sys.argv[1]), recipe=ToolsRecipe(steps=2))"
    subprocess.run([sys.executable, "-c", "import sys\n" + code, str(tmp_path / "made")], check=True)
    assert {file.name for file in (tmp_path / "made").iterdir()} == {file.name for file in path("seed-tools").iterdir()}
