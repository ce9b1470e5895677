"""The built-in task with a tool: find where a key leads, in a table that the policy cannot see.

The prompt names a key, "k19". It leads to another key, and that one to a value; the policy is to answer with the value.
Only the tool `look_up` tells where a key leads, so the policy learns the second key from its first look-up. With
`named` = 2, "k19 k4", the prompt has another key, whose value is not asked for. `hops` is the number of look-ups.

Values are drawn independently of everything in the prompt, so a policy that looks nothing up is right once in
`len(VALUES)` prompts, whatever it answers. With `shuffled` the tool answers from another table, drawn from the same
seed; then every policy is right only that often.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar, Final

from dora.environments.api import End, Observation, Reset, ToolEnvironment, Turn, tool

KEYS: Final = tuple(f"k{number}" for number in range(32))
VALUES: Final = tuple(f"v{number}" for number in range(20))


class Lookup(ToolEnvironment):
    """One episode. `named` keys are in the prompt, and the first is asked for; its value is `hops` look-ups away."""

    can_replay: ClassVar = True

    def __init__(self, named: int = 1, hops: int = 2, shuffled: bool = False) -> None:
        if named < 1 or hops < 2 or named * hops > len(KEYS):
            raise ValueError(f"needs named >= 1, hops >= 2 and named * hops <= {len(KEYS)}, got {named} and {hops}")
        self._named, self._hops, self._shuffled = named, hops, shuffled

    def reset(self, row: dict[str, Any]) -> Reset:
        """Draw the table from the row's seed."""
        rng = random.Random(row["seed"])
        keys = rng.sample(KEYS, self._named * self._hops)
        self._table = self._draw_table(keys, rng)
        self.answer = self._walk(keys[0])
        if self._shuffled:
            self._table = self._draw_table(keys, rng)
        prompt = " ".join(keys[: self._named])
        return Reset([{"role": "user", "content": prompt}], tools=self.schemas())

    async def step(self, turn: Turn) -> Observation | End:
        """End the episode with a turn without a call, which must be the value."""
        if turn.calls:
            return await super().step(turn)
        return End(reward=float(turn.content.strip() == self.answer))

    @tool
    def look_up(self, key: str) -> str:
        "Look a key up."
        return self._table.get(key, "none")

    def _draw_table(self, keys: list[str], rng: random.Random) -> dict[str, str]:
        """Chains that begin at the named keys (the first ones in `keys`), pass through all other keys, and end at a
        value each."""
        table: dict[str, str] = {}
        level, rest = keys[: self._named], keys[self._named :]
        rng.shuffle(rest)
        for _ in range(self._hops - 1):
            following, rest = rest[: self._named], rest[self._named :]
            table |= dict(zip(level, following, strict=True))
            level = following
        return table | {key: rng.choice(VALUES) for key in level}

    def _walk(self, key: str) -> str:
        while key in self._table:
            key = self._table[key]
        return key
