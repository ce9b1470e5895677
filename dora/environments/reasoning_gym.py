"""Rows of a `reasoning_gym` source (task.sources) as episodes: a wrong answer may be tried again.

    [environment]
    name = "dora.environments.reasoning_gym:ReasoningGym"
    options = {attempts = 3}

Its host needs the packages reasoning-gym and msgspec.
"""

from __future__ import annotations

from typing import Any

from dora.environments.api import End, Environment, Observation, Reset, Turn
from dora.tasks.sources import reasoning_gym_dataset


class ReasoningGym(Environment):
    """The data set scores each answer. The episode ends when an answer gets the full score (1), or after `attempts`
    turns with the score of the last answer. After any other answer the policy sees `feedback`."""

    can_replay = True

    def __init__(self, attempts: int = 2, feedback: str = "That is not correct. Try again.") -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {attempts}")
        self._attempts = attempts
        self._feedback = feedback

    def reset(self, row: dict[str, Any]) -> Reset:
        self._dataset = reasoning_gym_dataset(dataset=row["dataset"], options=row["options"], seed=row["seed"])
        self._entry = self._dataset[row["index"]]
        return Reset([{"role": "user", "content": row["prompt"]}])

    def step(self, turn: Turn) -> Observation | End:
        self._attempts -= 1
        score = float(self._dataset.score_answer(turn.content.strip(), self._entry))
        if score >= 1 or not self._attempts:
            return End(score)
        return Observation([{"role": "user", "content": self._feedback}])
