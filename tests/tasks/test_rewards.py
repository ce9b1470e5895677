import json
import math
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest

from dora.config.schema import RewardConfig, SourceConfig
from dora.errors import ConfigError
from dora.tasks.rewards import GradeRequest, RewardFailed, build_scorer, total
from dora.tasks.sources import open_source


def score(response: str, answer: str = "", *, metadata=None, **reward) -> float:
    scorer = build_scorer([RewardConfig(**reward)], field="task.rewards", http_timeout_s=5)
    return total(scorer(GradeRequest(prompt="", response=response, answer=answer, metadata=metadata or {})))


@pytest.mark.parametrize(
    ("answer", "response", "equal"),
    [
        ("1/2", "The answer is .5", True),
        (".5", "\\boxed{\\frac{1}{2}}", True),
        ("\\frac{1}{2}", "\\boxed{2/4}", True),
        ("50\\%", "\\boxed{0.5}", True),
        ("1/3", "\\boxed{0.333333}", True),
        ("1/3", "\\boxed{0.33}", False),
        ("1000", "1,000", True),
        ("5", f"First \\boxed{{3}}. {'But is it? ' * 8} No: \\boxed{{5}}.", True),
        ("3", f"First \\boxed{{3}}. {'But is it? ' * 8} No: \\boxed{{5}}.", False),
        ("3", "\\boxed{3} or \\boxed{5}", False),
        ("5", "\\boxed{5} out of 7", True),
        ("5", "\\boxed{5\\text{ cm}}", True),
        ("x=5", "\\boxed{5}", True),
        ("3\\sqrt{2}", "$\\sqrt{18}$", True),
        ("\\{1,2\\}", "\\boxed{2,1}", True),
        ("(1,2)", "\\boxed{(2,1)}", False),
        ("\\boxed{7}", "3+4=7", True),
        ("7", "", False),
        ("7", "\\frac{{{", False),
        ("In May 48/2 = <<48/2=24>>24, in all 48+24 = <<48+24=72>>72.\n#### 72", "\\boxed{72}", True),  # GSM8K
        ("In May 48/2 = <<48/2=24>>24, in all 48+24 = <<48+24=72>>72.\n#### 72", "\\boxed{24}", False),
    ],
)
def test_math_compares_values_by_the_stated_conventions(answer, response, equal):
    assert score(response, answer, kind="math") == equal


def test_math_without_a_readable_reference_is_an_error_and_not_a_wrong_answer():
    with pytest.raises(RewardFailed, match=r"0 \(math\): ValueError: reference answer '' is not a mathematical expr"):
        score("5", "", kind="math")


def test_exact_ignores_white_space_around_the_answer_only():
    assert score(" four \n", "four", kind="exact") == 1
    assert score("fo ur", "four", kind="exact") == 0


def test_regex_compares_its_first_group():
    for response, reward in [("3+4=7 ", 1), ("3+4=8", 0), ("7", 0)]:
        assert score(response, "7", kind="regex", pattern=r"=(\d+)\s*$") == reward
    assert score("no", "7", kind="regex", pattern=r"(yes)|no") == 0


def test_terms_are_summed_with_their_weights():
    rewards = [RewardConfig(kind="exact", weight=2), RewardConfig(kind="regex", pattern="(a)", weight=-0.5)]
    scorer = build_scorer(rewards, field="task.rewards", http_timeout_s=5)
    assert total(scorer(GradeRequest("", "a", "a", {}))) == 1.5
    assert total(scorer(GradeRequest("", "b", "b", {}))) == 2


def test_reasoning_gym_scores_with_the_entry_that_the_prompt_was_made_from():
    config = SourceConfig(kind="reasoning_gym", name="countdown", options={"min_numbers": 3, "max_numbers": 3})
    row = open_source(config, field="f", seed=1, split="train").row(
        701
    )  # many right answers: only its own scorer knows
    metadata = {name: row[name] for name in ("dataset", "options", "seed", "index")}
    assert score(row["answer"], metadata=metadata, kind="reasoning_gym") == 1
    assert score("1 + 1", metadata=metadata, kind="reasoning_gym") < 0.5
    with pytest.raises(RewardFailed, match=r"ValueError: .*needs prompts of a reasoning_gym source"):
        score("1", kind="reasoning_gym")


class Endpoint(BaseHTTPRequestHandler):
    seen: ClassVar[dict] = {}

    def do_POST(self):
        Endpoint.seen = request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["response"] == "fail":
            self.send_error(500)
            return
        body = {"reward": 0.25, "seen": request} if request["metadata"] else {"verdict": "good"}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint():
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/grade"
        server.shutdown()
        thread.join()


def test_an_endpoint_gives_the_reward_and_its_failures_are_errors(endpoint):
    assert score("x", metadata={"level": 3}, kind="http", url=endpoint) == 0.25
    with pytest.raises(RewardFailed, match=r'ValueError: .*must answer \{"reward": number\}'):
        score("x", kind="http", url=endpoint)
    with pytest.raises(RewardFailed, match="HTTPError: HTTP Error 500"):
        score("fail", kind="http", url=endpoint)


OWN_REWARDS = """
def shorter(*, prompt, response, answer, metadata):
    return metadata['limit'] - len(response)
def budget(finish, num_tokens, max_tokens=None, source="", scale=2):
    return scale * (max_tokens - num_tokens) if (finish, source) == ("length", "hard") else 0
def everything(**asked):
    return len(asked)
def wrong(text):
    return 1.0
def nameless(prompt, /):
    return 1.0
def says(metadata):
    return metadata["value"]
"""


@pytest.fixture
def own_rewards(tmp_path, monkeypatch) -> None:
    (tmp_path / "own_rewards.py").write_text(OWN_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_rewards")
def test_a_function_gets_what_its_signature_names():
    request = GradeRequest("p", "abc", "a", {"limit": 10}, num_tokens=3, max_tokens=5, finish="length", source="hard")
    for name, expected in [("shorter", 7.0), ("budget", 4.0), ("everything", 9.0)]:
        term = RewardConfig(kind="function", name=f"own_rewards:{name}")
        assert total(build_scorer([term], field="task.rewards", http_timeout_s=5)(request)) == expected


@pytest.mark.usefixtures("own_rewards")
@pytest.mark.parametrize(("name", "what"), [("wrong", "takes text"), ("nameless", r"cannot be called \(.*\)")])
def test_a_function_that_asks_for_something_else_is_refused(name, what):
    says = rf"task.rewards.0.name: own_rewards:{name} {what}; a reward may only take prompt, .*, turns, each by name"
    with pytest.raises(ConfigError, match=says):
        score("abc", kind="function", name=f"own_rewards:{name}")


@pytest.mark.usefixtures("own_rewards")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0.5", "TypeError: it returned '0.5' (str), expected a number"),
        (None, "TypeError: it returned 'None' (NoneType), expected a number"),
        ([1.0], "TypeError: it returned '[1.0]' (list), expected a number"),
        (math.nan, "ValueError: it is nan, expected a finite number of 32 bits"),
        (-math.inf, "ValueError: it is -inf, expected a finite number of 32 bits"),
        (1e39, "ValueError: it is 1e+39, expected a finite number of 32 bits"),
    ],
)
def test_what_is_no_number_is_named_and_no_reward(value, said):
    with pytest.raises(RewardFailed) as caught:
        score("", metadata={"value": value}, kind="function", name="own_rewards:says")
    assert str(caught.value) == f"task.rewards.0 (function own_rewards:says): {said}"


@pytest.mark.usefixtures("own_rewards")
def test_a_number_of_any_type_is_a_reward():
    for value, expected in [(True, 1.0), (3, 3.0), (np.float32(0.5), 0.5), (np.True_, 1.0)]:
        assert score("", metadata={"value": value}, kind="function", name="own_rewards:says") == expected


def test_an_endpoint_gets_everything(endpoint):
    request = GradeRequest("p", "r", "a", {"n": 1}, num_tokens=3, max_tokens=5, finish="length", source="hard")
    term = RewardConfig(kind="http", url=endpoint)
    assert total(build_scorer([term], field="task.rewards", http_timeout_s=5)(request)) == 0.25
    assert Endpoint.seen == {
        "prompt": "p", "response": "r", "answer": "a", "metadata": {"n": 1}, "num_tokens": 3, "max_tokens": 5,
        "finish": "length", "source": "hard", "turns": [{"role": "policy", "text": "r"}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("num_tokens", "reward"), [(1, 0), (16_384, 0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1)]
)
def test_the_overlong_penalty_falls_linearly_over_its_buffer(num_tokens, reward):
    """DAPO (arXiv 2503.14476), equation 13, with its lengths."""
    scorer = build_scorer([RewardConfig(kind="overlong", buffer=4096)], field="task.rewards", http_timeout_s=5)
    request = GradeRequest("p", "r", num_tokens=num_tokens, max_tokens=20_480)
    assert total(scorer(request)) == pytest.approx(reward, abs=1e-12)


def test_the_length_penalty_is_the_share_of_the_budget():
    scorer = build_scorer([RewardConfig(kind="length", weight=0.5)], field="task.rewards", http_timeout_s=5)
    assert total(scorer(GradeRequest("p", "r", num_tokens=25, max_tokens=100))) == -0.125


def test_a_term_scores_its_sources_only():
    terms = [RewardConfig(kind="exact"), RewardConfig(kind="regex", pattern="(a)", sources=("easy",), weight=10)]
    scorer = build_scorer(terms, field="task.rewards", http_timeout_s=5)
    assert total(scorer(GradeRequest("", "a", "a", source="easy"))) == 11
    assert total(scorer(GradeRequest("", "a", "a", source="hard"))) == 1


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"kind": "regex", "pattern": "("}, r"task.rewards.0.pattern: '\(' is not a regular expression"),
        ({"kind": "regex", "pattern": "a"}, r"task.rewards.0.pattern: 'a' has no group"),
        ({"kind": "http", "url": "file:///etc/passwd"}, r"task.rewards.0.url: .* is not an http:// or https://"),
        ({"kind": "function"}, r"task.rewards.0.name: expected FILE.py:function or module:function, got ''"),
        ({"kind": "function", "name": "no_such_module:f"}, r"task.rewards.0.name: cannot import 'no_such_module'"),
        ({"kind": "function", "name": "sys:no_such"}, r"task.rewards.0.name: sys has no function 'no_such'"),
        ({"kind": "function", "name": "builtins:max"}, r"task.rewards.0.name: the arguments of builtins:max are unkn"),
    ],
)
def test_a_term_that_cannot_work_is_named(reward, message):
    with pytest.raises(ConfigError, match=message):
        score("", **reward)


def test_the_scorer_of_an_extra_asks_for_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    says = r"^task\.rewards\.0\.kind: reasoning-gym is not installed; run pip install 'dora-rl\[reasoning-gym\]'$"
    with pytest.raises(ConfigError, match=says):
        build_scorer([RewardConfig(kind="reasoning_gym")], field="task.rewards", http_timeout_s=1.0)


def test_a_task_without_rewards_is_refused():
    with pytest.raises(ConfigError, match=r"task\.rewards: at least one reward"):
        build_scorer([], field="task.rewards", http_timeout_s=5)


def test_an_exception_names_its_term_and_says_what_a_traceback_ends_with_and_where(tmp_path, monkeypatch):
    (tmp_path / "raising_reward.py").write_text("def score(**asked):\n    raise KeyError(asked['response'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    terms = [RewardConfig(kind="exact"), RewardConfig(kind="function", name="raising_reward:score")]
    scorer = build_scorer(terms, field="task.rewards", http_timeout_s=5)
    said = r"^task\.rewards\.1 \(function raising_reward:score\): KeyError: 'x' \(raising_reward\.py:2\)$"
    with pytest.raises(RewardFailed, match=said):
        scorer(GradeRequest("p", "x", "x", {}))
