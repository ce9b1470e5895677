"""Agents that do anything, against a checker of its own: what they were told is what the token store has, once.

The checker reads the files by their description and imports nothing of what wrote them.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checker import check
from tests.chaos.recorded import CHUNK, FORKED, MASKED, SAMPLED, read_frames, unpack
from tests.e2e.runs import run_to_end, settings

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "tests" / "environments" / "random_agent.py"
GROUPS, SIBLINGS, STEPS, K = 12, 8, 4, 2
#: Ends of a session that its agent does not choose.
LIMITS = ("409", "the session has ended")


def answers(path: Path) -> dict[int, list[tuple[int, int]]]:
    """Return (token, mask) of each trajectory, in order."""
    found: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # with the attempt
    for record in read_frames(path).records:
        kind, id, _, attempt, start, count = CHUNK.unpack_from(record)
        if kind not in (SAMPLED, MASKED, FORKED):
            continue
        newest, tokens = found.get(id, (0, []))
        if attempt < newest:
            continue
        ids = struct.unpack_from(f"<{count}i", record, CHUNK.size)
        mask = [1] * count if kind == SAMPLED else list(record[CHUNK.size + 8 * count : CHUNK.size + 9 * count])
        assert start <= len(tokens), "tokens are missing"
        found[id] = attempt, tokens[:start] + list(zip(ids, mask, strict=True))
    return {id: tokens for id, (_, tokens) in found.items()}


def turns(tokens: list[tuple[int, int]]) -> list[list[int]]:
    """Return the sampled tokens, turn by turn."""
    found: list[list[int]] = [[]]
    for token, mask in tokens:
        if mask:
            found[-1].append(token)
        elif found[-1]:
            found.append([])
    return [turn for turn in found if turn]


def events(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    for record in map(unpack, read_frames(folder / "journal.msgpack").records):
        if record["type"] == "Handled":
            for fact in (record["event"], *record["commands"]):
                if fact["type"] == kind:
                    yield fact


def test_what_agents_were_told_is_what_was_sampled_each_token_once(tmp_path: Path) -> None:
    log = tmp_path / "told.jsonl"
    options = f"{{command = {json.dumps([sys.executable, str(AGENT), str(log)])}, warm = true}}"
    values = {
        **{"run__folder": tmp_path / "runs", "status__port": 0, "run__steps": STEPS, "eval__sets": "[]"},
        **{"rollout__groups_per_step": GROUPS, "rollout__group_size": SIBLINGS, "rollout__max_staleness": K},
        **{"rollout__filter_zero_variance": False, "rollout__max_new_tokens": 160, "engine__instances": 3},
        **{"environment__options": options, "trainer__micro_batch_tokens": 4096, "trainer__learning_rate": 1e-4},
    }
    result = run_to_end("run", "launch/configs/agent-cpu.toml", *settings(**values), cwd=ROOT, timeout_s=500)
    assert result.returncode == 0, result.stderr
    [folder] = (tmp_path / "runs").iterdir()
    assert check(folder).violations == []

    finished = list(events(folder, "CallFinished"))
    failed = [event["failed"] for event in finished if event["failed"]]
    assert [why for why in failed if not any(limit in why for limit in LIMITS)] == []
    stored = {id: turns(tokens) for id, tokens in answers(folder / "tokens.bin").items() if id >= 0}
    rewards = {event["reward"]: event["trajectory"] for event in finished if event["ended"] and event["graded"]}
    told = [line for line in map(json.loads, log.read_text().splitlines()) if line.get("reward") in rewards]
    assert len(told) >= 0.8 * GROUPS * SIBLINGS * STEPS
    seen: Counter[int] = Counter()
    for line in told:
        sampled = stored[rewards[line["reward"]]]
        for number, ids in line["told"]:
            assert ids == sampled[number - 1], (line, sampled)
        seen[len(line["told"])] += 1
    assert len(seen) >= 4, seen
    forks = [event for event in finished if event.get("repeated")]
    assert forks
    versions = {order["trajectory"]: set() for order in events(folder, "Generate")}
    for order in events(folder, "Generate"):
        versions[order["trajectory"]].add(order["version"])
    assert all(len(of_one) == 1 for of_one in versions.values())
    audit = run_to_end("audit", str(folder))
    assert audit.returncode == 0, audit.stdout
