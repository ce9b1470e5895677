"""What passing over rows that teach nothing changes: groups sampled and left out, tokens, held-out reward.

    PYTHONPATH=.:bench python bench/sweeps/difficulty.py [--table] [SEED ...]

Two finite tasks in the lag harness (K = 1), each with every row taken (`all`), with `task.revisit_share = 0.25`
(`equal`), and with a rule that DORA does not have (`graded`): a row is taken at the share max(0.25, 4p(1 - p)) of its
visits, where p is the mean reward of its last group. Rows are chosen one to two steps ahead, as in a run. Results are
appended to bench/results/difficulty.jsonl; those that are there are not measured again. `--table` prints the table of
docs/DATA.md.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import msgspec  # noqa: E402
from learning import harness  # noqa: E402
from learning.cells import TASKS  # noqa: E402
from learning.stats import Interval, paired, paired_ratio  # noqa: E402
from result import commit, hardware, today  # noqa: E402

from dora.config.load import load  # noqa: E402
from dora.config.schema import Config  # noqa: E402
from dora.core import commands as cmd  # noqa: E402
from dora.core import events as ev  # noqa: E402
from dora.core.ids import GroupId, StepId, VersionId  # noqa: E402
from dora.core.phases import GroupPhase  # noqa: E402
from dora.learning.learner import OneRank  # noqa: E402
from dora.observe.visits import RowKey, Visits  # noqa: E402
from dora.tasks.arithmetic import LABELS, problem  # noqa: E402
from dora.tasks.prompts import Prompt, PromptStream  # noqa: E402
from dora.tasks.sources import derive_seed  # noqa: E402

RESULTS: Final = ROOT / "bench" / "results" / "difficulty.jsonl"
SEEDS: Final = (0, 1, 2, 3, 4)
RULES: Final = ("all", "equal", "graded")
SHARE: Final = 0.25
STALENESS: Final = 1
#: Most groups of a step, times those that are trained; a job that needs more has nothing left to learn from.
MAX_TOP_UP: Final = 10
#: Rows, and the steps of a job: the rows come about six times.
SIZES: Final = {"mixed": (64, 24), "tail": (64, 20)}
#: Kinds of rows in their cycle: (fewest terms, most terms); None for sums that the policy cannot read.
KINDS: Final[dict[str, tuple[tuple[int, int] | None, ...]]] = {
    "mixed": ((10, 24), (2, 3), (10, 24), None),
    "tail": ((4, 52), (14, 52), (4, 52), (2, 3), (4, 52), (14, 52), (4, 52), (4, 52), (14, 52), (4, 52)),
}
#: Learning rate, times that of the configuration of the same name in launch/configs.
RATES: Final = {"mixed": 1.0, "tail": 8.0}


class Row(msgspec.Struct, frozen=True):
    """One job."""

    task: str
    rule: str
    seed: int
    heldout: list[tuple[int, int, float]]  #: (version, tokens sampled before it, mean reward)
    sampled: int  #: groups
    filtered: int  #: of these
    passed: int  #: visits at which a row was passed over
    seconds: float
    commit: str
    date: str
    machine: str

    @property
    def by_steps(self) -> float:
        """Area under the held-out reward over steps, divided by their number."""
        return _area([(float(version), reward) for version, _, reward in self.heldout])

    def by_tokens(self, end: int) -> float:
        """Area under the held-out reward over the first `end` tokens sampled, divided by their number."""
        return _area(_until([(float(tokens), reward) for _, tokens, reward in self.heldout], end))


def _area(points: Sequence[tuple[float, float]]) -> float:
    return sum((b - a) * (low + high) / 2 for (a, low), (b, high) in itertools.pairwise(points)) / points[-1][0]


def _until(points: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    kept = [point for point in points if point[0] < end]
    (a, low), (b, high) = kept[-1], points[len(kept)]
    return [*kept, (end, low + (high - low) * (end - a) / (b - a))]


# -- the tasks --------------------------------------------------------------------------------------------------------


def rows(*, task: str, size: int, split: str) -> list[dict[str, str]]:
    """Return the rows of a task. Held-out rows are of the kinds that can be learned."""
    kinds = [kind for kind in KINDS[task] if split == "train" or kind not in (None, (2, 3))]
    return [_row(index, kinds[index % len(kinds)], split=split) for index in range(size)]


def _row(index: int, kind: tuple[int, int] | None, *, split: str) -> dict[str, str]:
    if kind is None:  # digits from 5 to 9 are noise to the policy
        terms = [5 + derive_seed("terms", split, index, place) % 5 for place in range(10)]
        prompt = "".join(f"{label}{term}" for label, term in zip(LABELS, terms, strict=False)) + "="
        return {"prompt": prompt, "answer": f"{sum(terms):02d}"}
    fewest, most = kind
    prompt, answer = problem(index, seed=0, split=split, min_terms=fewest, max_terms=most)
    return {"prompt": prompt, "answer": answer}


def configured(task: str, rule: str, seed: int) -> Config:
    """Return the configuration of a job."""
    path = TASKS["sums" if task == "mixed" else "tail"]
    size, steps = SIZES[task]

    def source(split: str, num_rows: int) -> str:
        options = f'{{task="{task}", size={num_rows}, split="{split}"}}'
        return f'{{kind="function", name="{__file__}:rows", options={options}}}'

    rate = RATES[task] * load(path, environ={}).trainer.learning_rate
    return load(
        path,
        [
            f"task.sources=[{source('train', size)}]",
            f'eval.sets=[{{name="heldout", prompts=128, temperature=1.0, source={source("heldout", 128)}}}]',
            'task.rewards=[{kind="regex", pattern="(?:^|\\\\D)(\\\\d\\\\d)$"}]',
            f"task.revisit_share={1.0 if rule == 'all' else SHARE}",
            "rollout.groups_per_step=8",
            f"run.steps={steps}",
            f"run.seed={seed}",
            f"trainer.learning_rate={rate}",
        ],
        environ={},
    )


# -- a job ------------------------------------------------------------------------------------------------------------


class GradedStream(PromptStream):
    """Prompts of which a row is due at a share of its visits that depends on its last mean reward."""

    def __init__(self, plain: PromptStream, *, config: Config, tokenizer: Any) -> None:
        super().__init__(plain._sources, task=config.task, tokenizer=tokenizer, seed=config.run.seed)
        self.shares: dict[RowKey, float] = {}

    def _is_due(self, key: RowKey, number: int) -> bool:
        return derive_seed(self._seed, "visit", *key, number) < self.shares[key] * 2**128


class Rollout(harness.Rollout):
    """Groups of the rows that a rule chooses."""

    def __init__(self, config: Config, *, rule: str) -> None:
        super().__init__(config)
        stream = self.inputs.stream
        self.stream = (
            GradedStream(stream, config=config, tokenizer=self.inputs.tokenizer) if rule == "graded" else stream
        )
        self.visits = Visits()
        self.tokens = self.sampled = self.filtered = 0
        self._step_size = config.rollout.groups_per_step
        self._shares: dict[RowKey, float] = {}  # of rows whose groups ended since prompts were ordered

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at a position, after more were ordered if fewer than a step's are left."""
        if not self.stream.passes_over:
            return super().prompt(position)
        if (left := len(self.visits) - position) < self._step_size:
            self._order(2 * self._step_size - max(0, left))
        key = self.visits.row_of(GroupId(position))
        assert key is not None
        return self.stream.of_visit(position, key)

    def _order(self, count: int) -> None:
        first = GroupId(len(self.visits))
        self.visits.apply(ev.Ticked(0.0), [cmd.FetchPrompts(first, count)])
        if isinstance(self.stream, GradedStream):
            self.stream.shares.update(self._shares)
            self.visits.equal = {key for key, share in self.stream.shares.items() if share < 1}
        found = tuple(self.stream.visit(first, count=count, visits=self.visits))
        self.visits.apply(ev.PromptsArrived(0.0, first, (1,) * len(found), False, found), [])

    def groups(self, positions: Sequence[int], *, version: int) -> list[harness.Group]:
        """Sample groups, and note how they end."""
        found = super().groups(positions, version=version)
        for position, group in zip(positions, found, strict=True):
            self.sampled += 1
            self.tokens += sum(len(answer.tokens) for answer in group.answers)
            is_equal = len(set(group.rewards)) == 1
            self.filtered += is_equal
            id = GroupId(position)
            end: cmd.Command = cmd.CommitGroup(id, VersionId(0), StepId(0))
            if is_equal:
                end = cmd.DropGroup(id, GroupPhase.FILTERED, "zero variance", ())
            self.visits.apply(ev.Ticked(0.0), [end])
            if (key := self.visits.row_of(id)) is not None:
                rate = sum(group.rewards) / len(group.rewards)
                self._shares[key] = max(SHARE, 4 * rate * (1 - rate))
        return found

    def step(self, position: int, *, version: int) -> tuple[list[harness.Group], int]:
        """Return the groups of a step, and the next position."""
        kept: list[harness.Group] = []
        end = position + MAX_TOP_UP * self._step_size
        while len(kept) < self._step_size and position < end:
            count = min(self._step_size - len(kept), end - position)
            found = self.groups(range(position, position + count), version=version)
            kept += [group for group in found if len(set(group.rewards)) > 1]
            position += count
        return kept, position


def run(task: str, rule: str, seed: int) -> Row:
    """Run one job in this process."""
    config = configured(task, rule, seed)
    began = time.monotonic()
    heldout: list[tuple[int, int, float]] = []
    with OneRank():
        rollout = Rollout(config, rule=rule)
        learner = harness.Learner(config, model=rollout.inputs.model, max_staleness=STALENESS)
        position = 0
        for step in range(config.run.steps + 1):
            if step % config.eval.every == 0 or step == config.run.steps:
                rollout.load(learner.versions[step])
                heldout.append((step, rollout.tokens, rollout.heldout()))
            if step == config.run.steps:
                break
            version = max(step - STALENESS, 0)
            rollout.load(learner.versions[version])
            groups, position = rollout.step(position, version=version)
            if len(groups) < config.rollout.groups_per_step:
                raise SystemExit(f"{task}, {rule}, seed {seed}: nothing left to learn from at step {step}")
            learner.step(step, groups)
        rollout.close()
    return Row(
        task, rule, seed, heldout, rollout.sampled, rollout.filtered, rollout.visits.num_passed,
        round(time.monotonic() - began, 1), commit(), today(), hardware(),
    )  # fmt: skip


# -- the results ------------------------------------------------------------------------------------------------------


def recorded() -> list[Row]:
    """Return the jobs that were measured."""
    lines = RESULTS.read_bytes().splitlines() if RESULTS.exists() else []
    return [msgspec.json.decode(line, type=Row) for line in lines]


def table(found: list[Row]) -> Iterator[str]:
    """Yield the lines of the table: means over seeds, and paired differences from `all` with 95 % intervals."""
    heads = ("task", "rows taken", "groups filtered", "groups sampled", "tokens sampled", "reward over steps")
    yield f"| {' | '.join((*heads, 'reward over tokens'))} |"
    yield f"|{'---|' * 7}"
    for task in SIZES:
        base = {row.seed: row for row in found if (row.task, row.rule) == (task, "all")}
        for rule in RULES:
            own = {row.seed: row for row in found if (row.task, row.rule) == (task, rule)}
            both = {seed: row for seed, row in own.items() if seed in base}
            if both:
                yield _line(task, rule, both, base)


def _line(task: str, rule: str, own: Mapping[int, Row], base: Mapping[int, Row]) -> str:
    filtered = {seed: row.filtered / row.sampled for seed, row in own.items()}
    end = {seed: min(own[seed].heldout[-1][1], base[seed].heldout[-1][1]) for seed in own}
    areas = {seed: row.by_steps for seed, row in own.items()}
    over_tokens = {seed: row.by_tokens(end[seed]) for seed, row in own.items()}
    if rule == "all":
        tokens = sum(row.heldout[-1][1] for row in own.values()) / len(own)
        groups = sum(row.sampled for row in own.values()) / len(own)
        shares = [_mean(filtered), f"{groups:.0f}", f"{tokens:,.0f}", _mean(areas), _mean(over_tokens)]
        return f"| {task} | `{rule}` | {' | '.join(shares)} |"
    changes = [
        f"{_mean(filtered)} ({paired(filtered, {s: r.filtered / r.sampled for s, r in base.items()})})",
        _ratio({s: float(r.sampled) for s, r in own.items()}, {s: float(r.sampled) for s, r in base.items()}),
        _ratio({s: float(r.heldout[-1][1]) for s, r in own.items()}, {s: r.heldout[-1][1] for s, r in base.items()}),
        _shown(paired(areas, {s: r.by_steps for s, r in base.items()})),
        _shown(paired(over_tokens, {s: base[s].by_tokens(end[s]) for s in own})),
    ]
    return f"| {task} | `{rule}` | {' | '.join(changes)} |"


def _mean(values: Mapping[int, float]) -> str:
    return f"{sum(values.values()) / len(values):.3f}"


def _ratio(left: Mapping[int, float], right: Mapping[int, float]) -> str:
    return f"x {paired_ratio(left, right).ratio}"


def _shown(found: Interval) -> str:
    return f"**{found}**" if found.is_shown else str(found)


def main() -> None:
    """Run what is missing, and print the table."""
    words = sys.argv[1:]
    seeds = [int(word) for word in words if not word.startswith("-")] or SEEDS
    done = {(row.task, row.rule, row.seed) for row in recorded()}
    for cell in [] if "--table" in words else itertools.product(SIZES, RULES, seeds):
        if cell in done:
            continue
        row = run(*cell)
        with RESULTS.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        end = row.heldout[-1]
        said = {"filtered": f"{row.filtered} of {row.sampled}", "tokens": end[1], "heldout": round(end[2], 3)}
        print(*cell, json.dumps({**said, "passed": row.passed, "seconds": row.seconds}), flush=True)
    print("\n".join(table(recorded())))


if __name__ == "__main__":
    main()
