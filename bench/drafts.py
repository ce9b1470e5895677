"""Drafts of the embedded engine: tokens a second with few answers at a time, and the same tokens as without.

Run: python bench/drafts.py [--full]. The policy is the last version of a default job, which is run first; the prompts
are those of its trajectories, with 8 answers each. Ceiling: the same engine without drafts, in the same process, taking
turns; ratios are medians of 5 turns, of tokens per CPU second.
  1 at a time    the last of 8 siblings, as in the tail of a step: 7 answers are there.
  8 at a time    8 siblings, begun together.
  64 at a time   8 prompts, begun together.
  same tokens    100,000 sampled tokens (a million in the full profile). An answer that differs from that without drafts
                 must differ first where the noise is within 1e-4 of the boundary between the two tokens, by a plain
                 forward pass in float64; then nothing but rounding decides.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from default_job import run_dora
from result import Report, parser
from transformers import AutoModelForCausalLM

from dora.embedded.batcher import Batcher
from dora.embedded.decoder import CausalDecoder
from dora.embedded.generation import Generation, SamplingParams
from dora.embedded.sampling import uniform
from dora.journal.run_folder import RunFolder

SIBLINGS = 8
TURNS = 5
DRAFT_TOKENS = 4
NEW_TOKENS = 160
TOKENS = {False: 100_000, True: 1_000_000}
TIE = 1e-4


@dataclass(frozen=True)
class Policy:
    folder: Path
    prompts: Sequence[Sequence[int]]


def trained(home: Path) -> Policy:
    """Run the default job."""
    run_dora("run", "--set", f"run.folder={home}", "--set", "status.port=0")
    [root] = home.iterdir()
    folder = RunFolder.open(root)
    rows = (json.loads(line) for line in folder.trajectories.read_text().splitlines())
    prompts = {tuple(row["prompt_tokens"]): None for row in rows if row["step"] >= 0}
    return Policy(max(folder.versions.glob("v*")), list(prompts))


class Engine:
    """A decoder and its batcher, without HTTP."""

    def __init__(self, policy: Policy, *, draft_tokens: int) -> None:
        self._decoder = CausalDecoder(
            policy.folder, slots=64, kv_tokens=2**17, device="cpu", dtype="float32", threads=1
        )
        self._batcher = Batcher(self._decoder, slots=64, kv_tokens=2**17, draft_tokens=draft_tokens)
        self._loop = asyncio.create_task(self._batcher.run())

    def request(self, prompt: Sequence[int], *, seed: int) -> Generation:
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, seed=seed, stop_ids=self._decoder.eos_token_ids)
        return Generation(rid=f"{seed}", prompt_ids=list(prompt), sampling=sampling)

    async def answer(self, asked: Sequence[Generation]) -> float:
        """Return the CPU seconds until all are answered."""
        begun = time.process_time()
        for one in asked:
            self._batcher.submit(one)
        for one in asked:
            while not one.done:
                await one.next_news()
        return time.process_time() - begun

    async def close(self) -> None:
        self._loop.cancel()
        await asyncio.wait({self._loop})
        self._batcher.close()


def num_tokens(asked: Sequence[Generation]) -> int:
    return sum(len(one.output_ids) for one in asked)


async def rate(engine: Engine, prompts: Sequence[Sequence[int]], *, at_once: int, turn: int) -> tuple[float, float]:
    """Return tokens per CPU second, and tokens per step of a request."""
    seconds, tokens, steps = 0.0, 0, 0
    width = max(1, at_once // SIBLINGS)
    for first in range(0, len(prompts), width):
        asked = [
            engine.request(prompt, seed=SIBLINGS * (1000 * turn + first + place) + sibling)
            for place, prompt in enumerate(prompts[first : first + width])
            for sibling in range(SIBLINGS)
        ]
        if at_once == 1:
            await engine.answer(asked[1:])
            asked = asked[:1]
        seconds += await engine.answer(asked)
        tokens += num_tokens(asked)
        steps += sum(one.num_steps or len(one.output_ids) for one in asked)
    return tokens / seconds, tokens / steps


async def compare(report: Report, policy: Policy) -> None:
    engines = {length: Engine(policy, draft_tokens=length) for length in (0, DRAFT_TOKENS)}
    for at_once, bar in ((1, "ratio >= 1.5"), (8, "ratio >= 0.98"), (64, "ratio >= 0.98")):
        ratios, rates, per_step = [], [], []
        for turn in range(TURNS + 1):  # the first warms up, and the engine learns what pays
            found = {
                length: await rate(engine, policy.prompts, at_once=at_once, turn=turn)
                for length, engine in sorted(engines.items(), reverse=bool(turn % 2))
            }
            if turn:
                ratios.append(found[DRAFT_TOKENS][0] / found[0][0])
                rates.append(found[DRAFT_TOKENS][0])
                per_step.append(found[DRAFT_TOKENS][1])
        report.row(
            f"{at_once} at a time",
            statistics.median(rates),
            "tokens per CPU second",
            against=f"without drafts; {statistics.median(per_step):.2f} tokens a step; "
            f"ratios {min(ratios):.2f} to {max(ratios):.2f}",
            ratio=statistics.median(ratios),
            bar=bar,
        )
    for engine in engines.values():
        await engine.close()


async def same_tokens(report: Report, policy: Policy, *, tokens: int) -> None:
    plain, drafting = Engine(policy, draft_tokens=0), Engine(policy, draft_tokens=DRAFT_TOKENS)
    model = AutoModelForCausalLM.from_pretrained(policy.folder, dtype=torch.float64).eval()
    compared, differing, ties, drafted, largest = 0, 0, 0, 0, 0.0
    for turn, at_once in enumerate(turns()):
        if compared >= tokens:
            break
        prompts = [policy.prompts[(turn + place) % len(policy.prompts)] for place in range(max(1, at_once // SIBLINGS))]
        pairs = []
        for engine in (plain, drafting):
            asked = [
                engine.request(prompt, seed=turn * 1000 + place * SIBLINGS + sibling)
                for place, prompt in enumerate(prompts)
                for sibling in range(SIBLINGS)
            ]
            if at_once == 1:
                for one in asked:
                    await engine.answer([one])
            else:
                await engine.answer(asked)
            pairs.append(asked)
        for one, other in zip(*pairs, strict=True):
            compared += len(one.output_ids)
            drafted += other.num_drafted
            if one.output_ids != other.output_ids:
                differing += 1
                ties += is_tie(model, one, other)
            else:
                gaps = (abs(a - b) for a, b in zip(one.output_logprobs, other.output_logprobs, strict=True))
                largest = max(largest, *gaps)
    report.row("tokens compared", compared, "tokens", against=f"{drafted:,} drafted")
    report.row(
        "answers that differ and are no tie", differing - ties, "answers", against=f"{ties} ties", bar="figure <= 0"
    )
    report.row("largest difference of a log-prob", largest, "", bar="figure <= 1e-4")
    for engine in (plain, drafting):
        await engine.close()


def turns() -> Iterator[int]:
    while True:
        yield from (64, 1, 8, 1, 1, 1, 1)


@torch.inference_mode()
def is_tie(model: torch.nn.Module, one: Generation, other: Generation) -> bool:
    """Whether nothing but rounding decides between the tokens at the first place where two answers differ."""
    pairs = enumerate(zip(one.output_ids, other.output_ids, strict=False))
    at, (left, right) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    text = [*one.prompt_ids, *one.output_ids[:at]]
    cdf_V = model(torch.tensor([text])).logits[0, -1].softmax(-1).cumsum(-1)
    point = float(uniform(torch.tensor([one.sampling.seed]), torch.tensor([len(text)]))[0])
    boundary = float(cdf_V[min(left, right)])
    print(f"  {text[-4:]}: {left} or {right}, noise {point:.8f}, boundary {boundary:.8f}", file=sys.stderr)
    return abs(left - right) == 1 and abs(point - boundary) < TIE


async def measure(report: Report, policy: Policy, *, full: bool) -> None:
    await compare(report, policy)
    await same_tokens(report, policy, tokens=TOKENS[full])


def main() -> None:
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        policy = trained(Path(scratch) / "runs")
        sizes = (
            f"{len(policy.prompts)} prompts, {SIBLINGS} answers each, drafts of up to {DRAFT_TOKENS} tokens, 1 thread"
        )
        report = Report(__doc__, full=options.full, sizes=sizes)
        asyncio.run(measure(report, policy, full=options.full))
    report.print()


if __name__ == "__main__":
    main()
