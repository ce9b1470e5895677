"""The trainer against `plain_trainer`, which shares no code with it: weights and metrics, for random legal settings.

    python -m tests.trainer.independent [CASES] [SEED]    100 cases by default
    python -m tests.trainer.independent CASES SEED RANKS  on several ranks
    python -m tests.trainer.independent CASES SEED RANKS SHARD_RANKS  with copies of the weights (0: none)
    python -m tests.trainer.independent CASES SEED RANKS SHARD_RANKS CONTEXT  with rows divided over so many ranks

Each case draws the section `[objective]`, settings of the trainer, a model and a few steps of groups.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pydantic import ValidationError
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from transformers import StableLmConfig, StableLmForCausalLM

from dora.objectives.rules import problems
from dora.objectives.settings import ObjectiveConfig
from dora.trainer import model as policy_module
from dora.trainer.context import make_context
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import Layout
from dora.trainer.step import Trainer
from dora.transport.messages import (
    NO_TURNS,
    TRUNCATIONS,
    Configure,
    MicroBatch,
    StepDone,
    TrainerLogprobs,
    TrainerSettings,
)
from tests.trainer.plain_trainer import Answer, PlainTrainer, Row, Training
from tests.trainer.publishing import KeptVersions, make_saver

VOCAB: Final = 23
STEPS: Final = 3
GROUPS: Final = 4
BUDGET: Final = 12
#: Distance of the weights as a share of how far they have moved. They are published in float32.
TOLERANCE: Final = 1e-5
#: Of metrics.
RELATIVE: Final = 1e-4
ABSOLUTE: Final = 1e-5
LAYOUTS: Final = {"packed": Layout(), "padded": Layout(padded=True), "shared": Layout(share_above=0.0)}


@dataclass(frozen=True)
class Case:
    """Settings, and a seed of the answers."""

    objective: dict[str, Any]
    training: dict[str, Any]
    model: str
    layout: str
    gathered: bool
    micro_batch_tokens: int
    outliers: bool  # some log μ so low that log ratios are cut
    seed: int
    shard_ranks: int = 0
    context_ranks: int = 1


# ---- what is drawn --------------------------------------------------------------------------------------------------


def make_models(folder: Path) -> None:
    """Tied and without biases; untied and with biases. StableLM computes everything in the dtype of the weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.2,
    }  # fmt: skip
    for name, is_tied in {"tied": True, "untied": False}.items():
        model = StableLmForCausalLM(StableLmConfig(**sizes, tie_word_embeddings=is_tied, use_qkv_bias=not is_tied))
        with torch.no_grad():
            for parameter, p in model.named_parameters():
                if parameter.endswith("bias"):
                    p.normal_(0, 0.2)
        model.save_pretrained(folder / name)


def draw_objective(rng: random.Random) -> dict[str, Any]:
    """A section `[objective]`, not always a legal one; limits are among the ratios that the answers have."""
    losses: dict[str, dict[str, list[Any]]] = {
        "ppo": {"ratio": ["decoupled", "bypass"], "clip_low": [0.1, 0.2], "clip_high": [0.05, 0.3], "dual_clip": [1.1]},
        "gspo": {"ratio": ["decoupled", "bypass"], "clip_low": [0.02, 0.1], "clip_high": [0.03, 0.1]},
        "cispo": {"ratio": ["decoupled", "bypass"], "clip_low": [0.1], "clip_high": [0.1]},
        "dppo_tv": {"threshold": [0.005, 0.02], "pull": [0.1, 0.0]},
        "ipo": {"threshold": [0.005, 0.02], "pull": [0.1, 0.0]},
        "reinforce": {},
        "m2po_per_sequence": {"ratio": ["decoupled", "bypass"], "threshold": [0.01, 0.1]},
    }
    keys: dict[str, list[Any]] = {
        "advantage": ["grpo", "dr_grpo", "rloo", "maxrl"],
        "aggregation": ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "longcat"],
        "turn_rewards": ["reward_to_go"],
        "truncated": ["mask"],
        "weight": ["none", "tis", "tis_sequence", "tis_geometric", "icepop"],
        "on": ["rho", "k"],
        "weight_low": [0.8, 0.9],
        "weight_high": [1.05, 1.3],
        "normalized": [True],
        "mis": ["token", "sequence", "geometric"],
        "mis_low": [0.8, 0.95],
        "mis_high": [1.1, 1.3],
        "veto": [0.5, 0.7],
        "opsm": [0.0, 0.05],
        "vcpo": [True],
        "proximal": ["approximate"],
        "kl_coefficient": [0.3],
        "kl_estimator": ["k1", "k2", "k3_weighted"],
        "entropy_coefficient": [0.1],
    }
    share = rng.choice([0.1, 0.25, 0.4])
    found = {key: rng.choice(values) for key, values in keys.items() if rng.random() < share}
    kind = rng.choice([*losses, "preset"])
    if kind == "preset":
        presets = ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "dppo", "reinforce", "longcat"]
        return {"preset": rng.choice(presets), **found}
    options = {key: rng.choice(values) for key, values in losses[kind].items() if rng.random() < 0.6}
    return {**found, "loss": {"kind": kind, **options}}


def is_legal(objective: dict[str, Any], *, updates: int) -> bool:
    """Whether a configuration may have it."""
    try:
        config = ObjectiveConfig.model_validate(objective)
    except ValidationError:
        return False
    return not list(problems(config, updates=updates, group_size=4)) and not (
        config.advantage == "maxrl" and config.turn_rewards == "reward_to_go"
    )


def draw(count: int, *, seed: int) -> Iterator[Case]:
    """Legal cases."""
    rng = random.Random(seed)
    for number in range(count):
        updates = rng.choice([1, 2, 2, 4])
        objective = draw_objective(rng)
        while not is_legal(objective, updates=updates):
            objective = draw_objective(rng)
        # Rewards to go may be negative, which `maxrl` refuses.
        kinds = ["grpo", "dr_grpo", "rloo", *([] if "turn_rewards" in objective else ["maxrl"])]
        training = {
            "learning_rate": rng.choice([1e-2, 3e-3]),
            "schedule": rng.choice(["constant", "linear", "cosine"]),
            "min_learning_rate": rng.choice([0.0, 0.3]),
            "warmup_steps": rng.choice([0, 1, 2]),
            "weight_decay": rng.choice([0.0, 0.1, 1.0]),
            "beta1": rng.choice([0.9, 0.5]),
            "beta2": rng.choice([0.95, 0.99]),
            "max_grad_norm": rng.choice([1e-2, 0.3, 100.0]),
            "steps": rng.choice([3, 5]),
            "updates": updates,
            "temperature": rng.choice([1.0, 0.7, 1.3]),
            "max_new_tokens": BUDGET,
            "advantages": (rng.choice(kinds), rng.choice(kinds)) if rng.random() < 0.3 else (),
        }
        yield Case(
            objective=objective, training=training, model=rng.choice(["tied", "untied"]),
            layout=rng.choice(list(LAYOUTS)), gathered=rng.random() < 0.7,
            micro_batch_tokens=rng.choice([20, 60, 1000]), outliers=rng.random() < 0.2, seed=1000 * seed + number,
        )  # fmt: skip


def divided(case: Case, ranks: int) -> Case:
    """The case with rows that so many ranks divide, which are never padded, one sequence a line."""
    return replace(case, context_ranks=ranks, layout="packed" if case.layout == "padded" else case.layout)


def make_step(rng: random.Random, plain: PlainTrainer, step: int, *, outliers: bool) -> list[list[Answer]]:
    """The groups of a step: with siblings that could not be graded, answers that were cut, tool output between trained
    tokens, answers without a trained token, episodes that forked, and μ around π."""
    groups = []
    for group in range(GROUPS):
        version = max(0, step - rng.choice([0, 0, 1, 2]))
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        source, noise = rng.randrange(2), rng.choice([0.02, 0.3])
        graded = rng.choice([4, 4, 4, 3, 2])
        rewards = [rng.choice([0.0, 0.3, 1.0]) for _ in range(graded)] + [math.nan] * (4 - graded)
        rng.shuffle(rewards)
        answers: list[Answer] = []
        for sibling, reward in enumerate(rewards):
            if math.isnan(reward):
                continue
            truncated = rng.choice(["tokens", "turns", "", "", "", ""])
            length = BUDGET if truncated == "tokens" else rng.randint(1, BUDGET)
            tokens = prompt + [rng.randrange(VOCAB) for _ in range(length)]
            trained = [False] * len(prompt) + [True] * length
            if rng.random() < 0.2:
                trained = [is_trained and rng.random() < 0.6 for is_trained in trained]
            if rng.random() < 0.05:
                trained = [False] * len(tokens)
            blank = Answer(
                tokens=tokens, trained=trained, behavior=[], group=GROUPS * step + group, version=version,
                reward=float(np.float32(reward)), group_rewards=[float(np.float32(r)) for r in rewards],
                sibling=sibling, turns=[], truncated=truncated, source=source, rows=fork(rng, tokens),
            )  # fmt: skip
            behavior = [[math.nan] * len(row.tokens) for row in blank.all_rows]
            places = [(i, place) for i, row in enumerate(blank.all_rows) for place in row.places]
            for (i, place), logprob in zip(places, plain.logprobs(blank), strict=True):
                behavior[i][place] = float(np.float32(min(logprob + rng.gauss(0, noise), -1e-3)))
                if outliers and rng.random() < 0.02:
                    behavior[i][place] = -40.0
            rows = [replace(row, behavior=one) for row, one in zip(blank.rows, behavior[1:], strict=True)]
            answers.append(replace(blank, behavior=behavior[0], rows=tuple(rows)))
        turns = [[0.0] for _ in rewards]
        for answer in answers:
            given = [rng.choice([0.0, 0.25]) for _ in range(num_turns(answer) - 1)]
            turns[answer.sibling] = [*given, answer.reward - sum(given)]
        answers = [replace(answer, turns=turns) for answer in answers]
        groups.append(answers)
    return groups


def num_turns(answer: Answer) -> int:
    """Runs of trained tokens, or one."""
    return max(1, sum(not row.trained[place - 1] for row in answer.all_rows for place in row.places))


def fork(rng: random.Random, tokens: list[int]) -> tuple[Row, ...]:
    """Rows that begin like `tokens`, or like one another."""
    rows: list[Row] = []
    while rng.random() < 0.25:
        kept = rng.choice([tokens, *(row.tokens for row in rows)])
        kept = kept[: rng.randint(1, len(kept))]
        length = rng.randint(1, BUDGET)
        trained = [False] * len(kept) + [rng.random() < 0.8 for _ in range(length)]
        rows.append(Row(kept + [rng.randrange(VOCAB) for _ in range(length)], trained, []))
    return tuple(rows)


# ---- the trainer ----------------------------------------------------------------------------------------------------


class Rank:
    """DORA's trainer of a case on this rank, without a controller; keeps what it reports and publishes."""

    def __init__(self, case: Case, folder: Path) -> None:
        policy_module.GATHERED_BYTES = 2**31 if case.gathered else 0
        # Parts of a gradient may cancel, as those of the biases of keys do, and AdamW magnifies what float32 leaves.
        policy_module.MASTER_DTYPE = torch.float32 if case.context_ranks == 1 else torch.float64
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group, self.groups = self.rank // case.context_ranks, self.world_size // case.context_ranks
        self.sent: list[Any] = []
        settings = TrainerSettings(
            device="cpu", dtype="float32", publish_dtype="float32", fp32_head=False, activation_checkpointing="none",
            optimizer_state="device", optimizer="adamw", compile=False, threads=1, longest_request=64,
            micro_batch_tokens=case.micro_batch_tokens, copies="device", probe_tokens=0, probe_every=1,
            objective=ObjectiveConfig.model_validate(case.objective).model_dump_json(), max_staleness=2,
            checkpoint_every=100, shard_ranks=case.shard_ranks, context_ranks=case.context_ranks, sends_logprobs=True,
            **case.training,
        )  # fmt: skip
        order = Configure(
            run_id="", model_path=str(folder / case.model), settings=settings, memory_root="", durable_root="",
            checkpoints="", resume_from=(), may_start_over=False, chain="", epoch=0, fence="",
        )  # fmt: skip
        policy = Policy(folder / case.model, mesh=make_mesh("cpu", shard_ranks=case.shard_ranks), dtype=torch.float64)
        self.versions = KeptVersions(policy)
        layout = replace(LAYOUTS[case.layout], context=make_context(case.context_ranks))
        self.trainer = _WithoutCheckpoints(
            order, end=self, policy=policy, layout=layout, publisher=self.versions,  # type: ignore[arg-type]
            saver=make_saver(order),
        )  # fmt: skip
        self.trainer.start()

    def send(self, message: Any) -> None:
        assert not isinstance(message, TrainerLogprobs) or self.rank == self.group * self.world_size // self.groups
        self.sent.append(message)

    def step(self, rng: random.Random, step: int, updates: list[list[Answer]]) -> dict[str, float]:
        """Train a step in waves that are cut at random."""
        waves = []
        for update, answers in enumerate(updates):
            answers = rng.sample(answers, len(answers))
            cuts = sorted(rng.randint(0, len(answers)) for _ in range(rng.randint(0, 2)))
            bounds = zip([0, *cuts], [*cuts, len(answers)], strict=True)
            waves += [(update, answers[start:end]) for start, end in bounds]
        for index, (update, wave) in enumerate(waves):
            closes = index == len(waves) - 1 or waves[index + 1][0] != update
            self.trainer.train(
                message(
                    wave[self.group :: self.groups], step=step, index=index, last=index == len(waves) - 1,
                    update=update, closes=closes,
                )
            )  # fmt: skip
        return next((m.metrics for m in reversed(self.sent) if isinstance(m, StepDone)), {})


class _WithoutCheckpoints(Trainer):
    def save_checkpoint(self) -> None:
        pass


def message(answers: list[Answer], **place: Any) -> MicroBatch:
    """What the controller would send."""
    rows = [(i, row) for i, a in enumerate(answers) for row in a.all_rows]
    answers = [answers[i] for i, _ in rows]
    return MicroBatch(
        tokens=np.array([token for _, row in rows for token in row.tokens], np.int32),
        loss_mask=np.array([one for _, row in rows for one in row.trained], np.uint8),
        behavior_logprobs=np.array([one for _, row in rows for one in row.behavior], np.float32),
        lengths=np.array([len(row.tokens) for _, row in rows], np.int32),
        trajectories=np.array([4 * a.group + a.sibling for a in answers], np.int64),
        groups=np.array([a.group for a in answers], np.int64),
        versions=np.array([a.version for a in answers], np.int32),
        rewards=np.array([a.reward for a in answers], np.float32),
        group_rewards=np.array([a.group_rewards for a in answers], np.float32).reshape(len(answers), 4),
        truncated=np.array([TRUNCATIONS.index(a.truncated) for a in answers], np.uint8),
        rewards_to_go=rewards_to_go_of(answers),
        sources=np.array([a.source for a in answers], np.uint8),
        **place,
    )


def rewards_to_go_of(answers: list[Answer]) -> Any:
    most = max((len(rewards) for a in answers for rewards in a.turns), default=0)
    if most < 2:
        return NO_TURNS
    found = np.full((len(answers), 4, most), np.nan, np.float32)
    for n, answer in enumerate(answers):
        for sibling, rewards in enumerate(answer.turns):
            if not math.isnan(answer.group_rewards[sibling]):
                found[n, sibling] = [sum(rewards[min(turn, len(rewards) - 1) :]) for turn in range(most)]
    return found


# ---- comparison -----------------------------------------------------------------------------------------------------


def play(case: Case, folder: Path) -> tuple[float, list[str]]:
    """Train a case twice; return the largest difference of a weight, and a line for each finding."""
    rng, waves = random.Random(case.seed), random.Random(case.seed)
    plain = PlainTrainer(folder / case.model, case.objective, Training(**case.training))
    rank = Rank(case, folder)
    worst, findings = 0.0, []
    for step in range(STEPS):
        groups = make_step(rng, plain, step, outliers=case.outliers)
        size = GROUPS // case.training["updates"]
        updates = [
            [answer for group in groups[start : start + size] for answer in group]
            for start in range(0, GROUPS, size)
        ]  # fmt: skip
        metrics = rank.step(waves, step, updates)
        expected, named = plain.step(step, updates)
        if rank.rank:
            continue
        found = rank.versions.weights[-1]
        off = distance(found, expected) / (distance(plain.start, expected) or 1.0)
        worst = max(worst, off)
        if not off < TOLERANCE:
            findings.append(f"step {step}: weights differ by {off:.2g}")
        findings += [f"step {step}: {line}" for line in differences(metrics, named)]
    return worst, findings


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The Euclidean distance of two sets of weights."""
    return math.sqrt(sum((left[name].double() - right[name].double()).square().sum().item() for name in right))


#: Of time and layout, which the plain trainer does not have.
ITS_OWN: Final = {"busy_s", "close_s", "write_wait_s", "useful_frac", "padding_frac"}


def differences(found: dict[str, float], expected: dict[str, float]) -> Iterator[str]:
    """A line for each metric that is missing, unexpected or different."""
    for name in sorted((found.keys() ^ expected.keys()) - ITS_OWN - {"engine_mismatch_k3", "probe_tokens"}):
        yield f"{name}: {found.get(name, 'absent')} instead of {expected.get(name, 'absent')}"
    for name in sorted(found.keys() & expected.keys()):
        relative = 0.011 if name.endswith("ratio_p99") else RELATIVE
        if not math.isclose(found[name], expected[name], rel_tol=relative, abs_tol=ABSOLUTE):
            yield f"{name}: {found[name]:.8g} instead of {expected[name]:.8g}"


def play_all(cases: list[Case], folder: Path) -> list[str]:
    """A line for each case that differs."""
    lines = []
    for number, case in enumerate(cases):
        worst, findings = play(case, folder)
        if findings:
            lines.append("\n  ".join([f"case {number} ({worst:.2g}): {case}", *findings[:12]]))
    return lines


def _rank(rank: int, cases: list[Case], folder: Path, world_size: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        lines = play_all(cases, folder)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        (folder / "lines").write_text("\n".join(lines))


def run(cases: list[Case], folder: Path, *, ranks: int = 1) -> str:
    """Play the cases; return what differs."""
    make_models(folder)
    if ranks > 1:
        mp.start_processes(_rank, (cases, folder, ranks), nprocs=ranks, start_method="spawn")
        return (folder / "lines").read_text()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        return "\n".join(play_all(cases, folder))
    finally:
        dist.destroy_process_group()


def main() -> int:
    """Play many cases."""
    given = [int(word) for word in sys.argv[1:]]
    count, seed, ranks, shard_ranks, context_ranks = given + [100, 1, 1, 0, 1][len(given) :]
    cases = [replace(case, shard_ranks=shard_ranks) for case in draw(count, seed=seed)]
    if context_ranks > 1:
        cases = [divided(case, context_ranks) for case in cases]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="dora-independent-") as name:
        found = run(cases, Path(name), ranks=ranks)
    sys.stdout.write(found or f"{count} cases: the same weights and metrics\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
