"""Scoring functions, from one answer to one number for each term.

Invariant: a scorer is a function of one request. It has no state, does not retry, and never turns a failure into a
reward: if it cannot judge an answer it raises an exception, which the pool reports as `grading_failed`. `build_scorer`
runs in grader processes (`grader`); the controller imports only `GradeRequest`. The packages that a scorer needs are
imported when it is built, to keep the start of a grader fast.

Conventions of `math` (math-verify 0.9, tested in tests/tasks/test_rewards.py): values count, not notation, so .5, 0.5,
1/2, 2/4 and \\frac{1}{2} are equal, and so are 50\\% and 0.5; floats agree to 6 decimals; 1,000 is a thousand; units
and a leading `x =` are ignored; sets ignore order, tuples do not. The last \\boxed{} of an answer is judged (boxes less
than 70 characters apart may be read as one set), or else the last formula or number.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from dora.errors import ConfigError
from dora.extras import require_extra
from dora.functions import describe, load_function

if TYPE_CHECKING:
    from dora.config.schema import RewardConfig

#: Largest size of a reward: the trainer receives 32 bits.
LARGEST_REWARD: Final = 3.4028234663852886e38
#: Where the score is in the text of a judge.
SCORE: Final = r"(?i)\bscore:\s*\**\s*([-+]?\d+(?:\.\d+)?)"
#: Size limit of an endpoint's answer, which is one number.
_MAX_HTTP_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """The input of a reward. A function of the user gets the fields that its signature names."""

    prompt: str  # as the model read it
    response: str  # decoded, without special tokens
    answer: str = ""  # reference answer, "" if there is none
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the prompt's other columns
    num_tokens: int = 0  # length of the response, stop token included
    max_tokens: int = 1  # token budget of a response
    finish: Literal["stop", "length"] = "stop"  # length: the response reached its budget
    source: str = ""  # label of the prompt's source
    turns: Sequence[Mapping[str, str]] = ()  # {"role": "policy" or "environment", "text": ...}, as in the response
    verdicts: Sequence[str] = ()  # of judges, one for each term, "" for other terms; not for functions of the user

    def __post_init__(self) -> None:
        if not self.turns:
            object.__setattr__(self, "turns", ({"role": "policy", "text": self.response},))


def given(request: GradeRequest) -> dict[str, Any]:
    """Return what code of the user gets of a request."""
    return {each.name: getattr(request, each.name) for each in fields(request) if each.name != "verdicts"}


Scorer = Callable[[GradeRequest], float]
#: The weighted reward of each term: (kind, or name of the function; reward).
Terms = list[tuple[str, float]]


class RewardFailed(Exception):
    """A term raised an exception; the message names the term, the exception and, for a function, file and line."""

    def __init__(self, term: str, err: Exception) -> None:
        super().__init__(f"{term}: {describe(err)}")


def total(terms: Terms) -> float:
    """Return the reward."""
    return math.fsum(value for _, value in terms)


def build_scorer(
    rewards: Sequence[RewardConfig], *, field: str, http_timeout_s: float
) -> Callable[[GradeRequest], Terms]:
    """Return a function that computes the weighted terms for a request: those that apply to its source. `ConfigError`
    names a term (`field`.i) that cannot be built."""
    if not rewards:
        raise ConfigError(f"{field}: at least one reward is needed")
    terms = [
        (reward, _named(reward, index=index, field=f"{field}.{index}", http_timeout_s=http_timeout_s))
        for index, reward in enumerate(rewards)
    ]

    def score(request: GradeRequest) -> Terms:
        own = [(reward, term) for reward, term in terms if reward.applies_to(request.source)]
        return [(reward.name or reward.kind, reward.weight * term(request)) for reward, term in own]

    return score


def term_name(reward: RewardConfig, *, field: str) -> str:
    """Return the name of a term for messages: `task.rewards.0 (function rewards:score)`."""
    return f"{field} ({' '.join(word for word in (reward.kind, reward.name or reward.url) if word)})"


def _named(reward: RewardConfig, *, index: int, field: str, http_timeout_s: float) -> Scorer:
    """Return a term whose exceptions name it."""
    term = _build_term(reward, index=index, field=field, http_timeout_s=http_timeout_s)
    name = term_name(reward, field=field)

    def score(request: GradeRequest) -> float:
        try:
            reward = term(request)
            if not abs(reward) <= LARGEST_REWARD:
                raise ValueError(f"it is {reward:g}, expected a finite number of 32 bits")
            return reward
        except Exception as err:  # user code may raise anything
            raise RewardFailed(name, err) from err

    return score


def _build_term(reward: RewardConfig, *, index: int, field: str, http_timeout_s: float) -> Scorer:
    match reward.kind:
        case "exact":
            return score_exact
        case "math":
            return _build_math()
        case "regex":
            return _build_regex(reward.pattern, field=field)
        case "overlong":
            return partial(score_overlong, buffer=reward.buffer)
        case "length":
            return score_length
        case "reasoning_gym":
            require_extra("reasoning_gym", field=f"{field}.kind")
            return score_reasoning_gym
        case "http":
            return _build_http(reward.url, field=field, timeout_s=http_timeout_s)
        case "function":
            return _build_function(reward.name, field=f"{field}.name")
        case "judge":
            return _build_judge(reward, index=index, field=field)


def score_exact(request: GradeRequest) -> float:
    """Return 1 if the answer equals the reference, ignoring white space around both, else 0."""
    return float(request.response.strip() == request.answer.strip())


def score_overlong(request: GradeRequest, *, buffer: int) -> float:
    """Return DAPO's soft overlong penalty (arXiv 2503.14476, section 3.4): 0 while at least `buffer` tokens of the
    budget are left, then linear to -1."""
    return min(0.0, (request.max_tokens - buffer - request.num_tokens) / buffer)


def score_length(request: GradeRequest) -> float:
    """Return -1 for a response of the whole token budget, and in proportion for a shorter one."""
    return -request.num_tokens / request.max_tokens


def _compile(pattern: str, *, field: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as err:
        raise ConfigError(f"{field}.pattern: {pattern!r} is not a regular expression ({err})") from err
    if not compiled.groups:
        raise ConfigError(f"{field}.pattern: {pattern!r} has no group; put the part that counts in parentheses")
    return compiled


def _build_regex(pattern: str, *, field: str) -> Scorer:
    compiled = _compile(pattern, field=field)

    def score_regex(request: GradeRequest) -> float:
        found = compiled.search(request.response)
        return float(found is not None and (found[1] or "").strip() == request.answer.strip())

    return score_regex


def _build_math() -> Scorer:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeout is off
    # Its timeout is off because it would score the answer as wrong; the pool kills the process and reports `timeout`.
    read = partial(parse, parsing_timeout=None)

    def score_math(request: GradeRequest) -> float:
        gold = read(request.answer if "\\boxed" in request.answer else f"\\boxed{{{request.answer}}}")
        if not gold:
            raise ValueError(f"reference answer {request.answer!r} is not a mathematical expression")
        return float(verify(gold, read(request.response), timeout_seconds=None))

    return score_math


def score_reasoning_gym(request: GradeRequest) -> float:
    """Score with the data set's own scorer, on the complete entry, recreated from its seed."""
    from dora.tasks.sources import reasoning_gym_dataset

    source = request.metadata
    if "dataset" not in source:
        raise ValueError("reward 'reasoning_gym' needs prompts of a reasoning_gym source")
    dataset = reasoning_gym_dataset(dataset=source["dataset"], options=source["options"], seed=source["seed"])
    return float(dataset.score_answer(request.response.strip(), dataset[source["index"]]))


def _build_http(url: str, *, field: str, timeout_s: float) -> Scorer:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{field}.url: {url!r} is not an http:// or https:// address")

    def score_http(request: GradeRequest) -> float:
        body = json.dumps(given(request)).encode()
        call = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(call, timeout=timeout_s) as reply:
            answer = json.loads(reply.read(_MAX_HTTP_ANSWER_BYTES))
        if not isinstance(answer, dict) or not isinstance(answer.get("reward"), int | float):
            raise ValueError(f'{url} must answer {{"reward": number}}, got {str(answer)[:100]}')
        return float(answer["reward"])

    return score_http


def _build_judge(reward: RewardConfig, *, index: int, field: str) -> Scorer:
    """Return a scorer that reads the score in what a judge said of the answer (judge.py)."""
    compiled = _compile(reward.pattern or SCORE, field=field)

    def score_judge(request: GradeRequest) -> float:
        said = request.verdicts[index]
        score = None
        for score in compiled.finditer(said):  # noqa: B007  the last one counts: judges reason first
            pass
        if score is None:
            raise ValueError(f"no score in {said[-200:]!r}")
        value = float(score[1] or "nan")
        if not 0.0 <= value <= reward.max_score:
            raise ValueError(f"the score {value:g} is not from 0 to {reward.max_score:g}")
        return value / reward.max_score

    return score_judge


def _build_function(spec: str, *, field: str) -> Scorer:
    """Return a scorer that calls the function with the fields of the request that its signature names (`**name`:
    all)."""
    function = load_function(spec, field=field)
    known = [*given(GradeRequest("", ""))]
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    passed = known if takes_all else [each.name for each in parameters if each.name in known]
    try:
        inspect.signature(function).bind(**dict.fromkeys(passed))
    except TypeError as err:
        unknown = [each.name for each in parameters if each.name not in known and each.default is each.empty]
        what = f"takes {unknown[0]}" if unknown else f"cannot be called ({err})"
        raise ConfigError(f"{field}: {spec} {what}; a reward may only take {', '.join(known)}, each by name") from err

    def score_function(request: GradeRequest) -> float:
        result = function(**{name: getattr(request, name) for name in passed})
        if not hasattr(result, "__float__"):  # refuses text, which float() would parse
            raise TypeError(f"it returned {str(result)[:100]!r} ({type(result).__name__}), expected a number")
        return float(result)

    return score_function
