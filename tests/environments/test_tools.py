"""Functions as tools: schemas, the check of arguments, results as text."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from typing import Annotated, Any, Literal

import pydantic
import pytest
from pydantic import Field

from dora.environments.api import End, Observation, Reset, ToolCall, ToolEnvironment, Turn, tool
from dora.environments.schema import InvalidArguments, as_text, tool_schema


class Unit(enum.Enum):
    METER = "m"
    FOOT = "ft"


class Place(pydantic.BaseModel):
    name: str
    floor: int = 0


def measure(
    length: float,
    copy: bool,
    names: list[str],
    table: dict[str, int],
    *,
    mode: Literal["fast", "exact"] = "fast",
    limit: int | None = None,
    count: Annotated[int, Field(ge=1, description="How often.")] = 3,
    tags: list[str] = ["a"],  # noqa: B006
    unit: Unit = Unit.METER,
) -> str:
    """Measure a length.

    It takes a while.
    """
    return f"{length} {unit}"


def test_types_defaults_and_docstring_become_the_schema():
    assert tool_schema(measure).as_openai() == {
        "type": "function",
        "function": {
            "name": "measure",
            "description": "Measure a length.\n\nIt takes a while.",
            "parameters": {
                "type": "object",
                "properties": {
                    "length": {"type": "number"},
                    "copy": {"type": "boolean"},
                    "names": {"type": "array", "items": {"type": "string"}},
                    "table": {"type": "object", "additionalProperties": {"type": "integer"}},
                    "mode": {"type": "string", "enum": ["fast", "exact"], "default": "fast"},
                    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
                    "count": {"type": "integer", "minimum": 1, "description": "How often.", "default": 3},
                    "tags": {"type": "array", "items": {"type": "string"}, "default": ["a"]},
                    "unit": {"$ref": "#/$defs/Unit", "default": "m"},
                },
                "required": ["length", "copy", "names", "table"],
                "additionalProperties": False,
                "$defs": {"Unit": {"enum": ["m", "ft"], "title": "Unit", "type": "string"}},
            },
        },
    }


def test_arguments_are_converted_and_defaults_are_filled_in():
    checked = tool_schema(measure).check(
        {"length": "2", "copy": True, "names": [], "table": {"a": 1}, "unit": "ft", "limit": 5}
    )
    assert checked == {
        **{"length": 2.0, "copy": True, "names": [], "table": {"a": 1}},
        **{"mode": "fast", "limit": 5, "count": 3, "tags": ["a"], "unit": Unit.FOOT},
    }


def test_a_default_list_is_not_shared_by_calls():
    arguments = {"length": 1, "copy": True, "names": [], "table": {}}
    first, second = (tool_schema(measure).check(arguments)["tags"] for _ in range(2))
    assert first is not second


def test_a_model_as_argument_is_built():
    def go(place: Place, when: datetime.date) -> None:
        """Go."""

    go.__annotations__ = {"place": Place, "when": datetime.date}
    checked = tool_schema(go).check({"place": {"name": "hall"}, "when": "2026-01-31"})
    assert checked == {"place": Place(name="hall"), "when": datetime.date(2026, 1, 31)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"length": "long"}, "length: Input should be a valid number"),
        ({"mode": "slow"}, "mode: Input should be 'fast' or 'exact'"),
        ({"count": 0}, "count: Input should be greater than or equal to 1"),
        ({"names": ["a", 3]}, "names.1: Input should be a valid string"),
        ({"other": 1}, "other: Unexpected keyword argument"),
        ({"self": 1}, "self: Unexpected keyword argument"),
    ],
)
def test_arguments_that_do_not_fit_are_named_for_the_model(change: dict[str, Any], problem: str):
    arguments = {"length": 1, "copy": True, "names": [], "table": {}, **change}
    with pytest.raises(InvalidArguments) as raised:
        tool_schema(measure).check(arguments)
    assert str(raised.value).startswith(problem)


def test_what_is_missing_is_named_for_the_model():
    with pytest.raises(InvalidArguments, match=r"^length: Field required; copy: Field required; names: .*; table: "):
        tool_schema(measure).check({})


def untyped(a: int, b) -> int:
    return a


def star(*numbers: int) -> int:
    return 0


def double_star(**numbers: int) -> int:
    return 0


def positional(a: int, /) -> int:
    return a


class Opaque:
    pass


def odd(a: Opaque) -> int:
    return 0


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (untyped, "tool untyped: parameter 'b' has no type"),
        (star, r"tool star: parameter \*numbers: .* cannot be given by name"),
        (double_star, r"tool double_star: parameter \*\*numbers: .* cannot be given by name"),
        (positional, "tool positional: parameter a: .* cannot be given by name"),
        (odd, "tool odd: Unable to generate pydantic-core schema for "),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_named_with_its_parameter(function, problem: str):
    with pytest.raises(TypeError, match=problem):
        tool_schema(function)


@dataclasses.dataclass
class Pair:
    left: int
    right: datetime.date


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("as it is\n", "as it is\n"),
        (2.5, "2.5"),
        (None, "null"),
        ({"ü": [1, True]}, '{"ü":[1,true]}'),
        (Pair(1, datetime.date(2026, 1, 31)), '{"left":1,"right":"2026-01-31"}'),
        (Place(name="hall"), '{"name":"hall","floor":0}'),
    ],
)
def test_a_result_is_shown_as_text_or_json(result: object, text: str):
    assert as_text(result) == text


# --- ToolEnvironment ------------------------------------------------------------------------------------------------


class Base(ToolEnvironment):
    def __init__(self) -> None:
        self.log: list[str] = []  # the constructor of the base class is not called

    @tool
    def first(self) -> str:
        """First."""
        return "first"

    @tool
    async def second(self, word: str) -> object:
        """Second."""
        self.log.append(word)
        return object() if word == "odd" else None

    def helper(self) -> None:
        raise AssertionError


class Derived(Base):
    def first(self) -> str:  # it stays a tool
        """First, of the derived class."""
        return "derived"

    @tool
    def third(self) -> str:
        """Third."""
        raise OSError("line 1\nline 2")


def test_marked_methods_are_tools_those_of_base_classes_first():
    functions = [each["function"] for each in Derived().schemas()]
    assert [each["name"] for each in functions] == ["first", "second", "third"]
    assert functions[0]["description"] == "First, of the derived class."
    assert functions[0]["parameters"]["properties"] == {}
    assert list(functions[1]["parameters"]["properties"]) == ["word"]


async def answers(environment: ToolEnvironment, *named: tuple[str, dict[str, Any]]) -> list[str]:
    calls = tuple(ToolCall(str(number), name, arguments) for number, (name, arguments) in enumerate(named))
    observation = await environment.step(Turn("", calls=calls))
    assert isinstance(observation, Observation)
    return [message["content"] for message in observation.messages]


async def test_calls_are_answered_in_their_order_and_errors_are_answers():
    environment = Derived()
    found = await answers(environment, ("second", {"word": "a"}), ("first", {}), ("third", {}), ("helper", {}))
    assert found == [
        "null",
        "derived",
        "error: OSError: line 1\nline 2",
        "error: there is no tool 'helper'; there are first, second, third",
    ]
    assert environment.log == ["a"]


async def test_a_result_that_is_not_json_is_an_error_for_the_model():
    (found,) = await answers(Derived(), ("second", {"word": "odd"}))
    assert found.startswith("error: TypeError: a tool must return text or JSON (")


async def test_a_turn_without_calls_ends_the_episode_for_the_rewards_of_the_task():
    assert await Derived().step(Turn("done")) == End(reward=None)


def test_an_episode_begins_with_the_prompt_or_the_messages_of_the_row():
    environment = Derived()
    assert environment.reset({"prompt": "p"}) == Reset([{"role": "user", "content": "p"}], tools=environment.schemas())
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert environment.reset({"prompt": "p", "messages": messages}).messages == messages


def test_an_environment_without_a_tool_begins_no_episode():
    with pytest.raises(TypeError, match=r"^ToolEnvironment has no tool: give it functions, or mark methods with @tool"):
        ToolEnvironment().reset({"prompt": "p"})


# --- reasoning_gym --------------------------------------------------------------------------------------------------


def test_a_wrong_answer_may_be_tried_again_and_is_scored_by_the_data_set():
    from dora.environments.reasoning_gym import ReasoningGym
    from dora.tasks.sources import reasoning_gym_dataset

    row = {"dataset": "chain_sum", "options": "{}", "seed": 3, "index": 5}
    entry = reasoning_gym_dataset(dataset="chain_sum", options="{}", seed=3)[5]
    environment = ReasoningGym(attempts=3, feedback="No.")
    assert environment.reset({"prompt": entry["question"], **row}).messages[0]["content"] == entry["question"]
    assert environment.step(Turn("many")) == Observation([{"role": "user", "content": "No."}])
    assert environment.step(Turn(f" {entry['answer']}\n")) == End(1.0)
    environment = ReasoningGym(attempts=1)
    environment.reset({"prompt": "", **row})
    last = environment.step(Turn("many"))
    assert isinstance(last, End)
    assert last.reward < 1


def test_no_attempt_is_refused():
    from dora.environments.reasoning_gym import ReasoningGym

    with pytest.raises(ValueError, match="at least 1, got 0"):
        ReasoningGym(attempts=0)
