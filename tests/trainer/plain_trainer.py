"""The trainer once more, from docs/OBJECTIVES.md, docs/TRAINER.md and docs/METRICS.md alone, without any code of DORA.

Float64, one sequence at a time, one token at a time; transformers' own model and attention; its own AdamW. What is
without gradient is a Python float, so that a missing stop-gradient cannot go unseen. `tests/trainer/independent.py`
compares the two.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

LARGEST = 20.0
#: What docs/OBJECTIVES.md says that each preset sets.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2}, "advantage": "grpo",
        "aggregation": "seq_mean_token_mean",
    },
    "dapo": {
        "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28}, "advantage": "grpo", "aggregation": "token_mean",
    },
    "dr_grpo": {
        "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2}, "advantage": "dr_grpo",
        "aggregation": "seq_mean_token_sum_norm",
    },
    "gspo": {
        "loss": {"kind": "gspo", "ratio": "bypass", "clip_low": 3e-4, "clip_high": 4e-4}, "advantage": "grpo",
        "aggregation": "seq_mean_token_mean", "weight": "none",
    },
    "cispo": {
        "loss": {"kind": "cispo", "ratio": "bypass", "clip_high": 0.28}, "advantage": "grpo",
        "aggregation": "token_mean", "weight": "none",
    },
    "dppo": {
        "loss": {"kind": "dppo_tv", "threshold": 0.2, "pull": 1e-3}, "advantage": "grpo", "aggregation": "token_mean",
        "weight": "none",
    },
    "reinforce": {
        "loss": {"kind": "reinforce"}, "advantage": "rloo", "aggregation": "seq_mean_token_sum_norm", "weight": "tis",
        "on": "k",
    },
    "longcat": {
        "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}, "advantage": "grpo",
        "aggregation": "longcat",
    },
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"ratio": "decoupled", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "gspo": {"ratio": "decoupled", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"ratio": "decoupled", "clip_low": None, "clip_high": 0.28},
    "dppo_tv": {"threshold": 0.2, "pull": 1e-3},
    "ipo": {"threshold": 0.3, "pull": 1e-3},
    "reinforce": {},
    "m2po_per_sequence": {"ratio": "bypass", "threshold": 0.04},
}
DEFAULTS: dict[str, Any] = {
    "preset": "none", "advantage": "dr_grpo", "aggregation": "seq_mean_token_sum_norm", "turn_rewards": "sum",
    "truncated": "train", "weight": "tis", "weight_low": None, "weight_high": None, "on": "rho", "normalized": False,
    "mis": "none", "mis_low": 0.5, "mis_high": 2.0, "veto": 0.0, "opsm": None, "vcpo": False, "proximal": "copy",
    "kl_coefficient": 0.0, "kl_reference": "", "kl_estimator": "k3", "entropy_coefficient": 0.0,
}  # fmt: skip


def complete(given: dict[str, Any]) -> dict[str, Any]:
    """The section `[objective]` with every key: what is given, what the preset says, what the loss implies."""
    preset = PRESETS.get(given.get("preset", "none"), {})
    loss = dict(given.get("loss", {}))
    base = preset.get("loss", {"kind": "ppo"})
    if loss.get("kind", base["kind"]) == base["kind"]:
        loss = {**base, **loss}
    loss = {**OPTIONS[loss["kind"]], **loss}
    kind, implied = loss["kind"], {}
    if kind == "gspo":
        implied = {"aggregation": "seq_mean_token_mean", "weight": "tis_geometric"}
    if loss.get("ratio") == "bypass" or kind in ("dppo_tv", "ipo"):
        implied["weight"] = "none"
    if kind in ("dppo_tv", "ipo", "reinforce"):
        implied["on"] = "k"
    return {**DEFAULTS, **implied, **preset, **given, "loss": loss}


@dataclass(frozen=True)
class Row:
    """A sequence of an answer."""

    tokens: list[int]
    trained: list[bool]
    behavior: list[float]

    @property
    def places(self) -> list[int]:
        return [place for place, is_trained in enumerate(self.trained) if is_trained]


@dataclass(frozen=True)
class Answer:
    """A graded answer of a group."""

    tokens: list[int]
    trained: list[bool]  # of each token; never of the first one
    behavior: list[float]  # log μ of each token; read only where it is trained
    group: int
    version: int
    reward: float
    group_rewards: list[float]  # NaN: could not be graded
    sibling: int  # its place in group_rewards
    turns: list[list[float]]  # what each sibling got in each of its turns; a turn is trained tokens side by side
    truncated: str  # by which budget, if any
    source: int
    rows: tuple[Row, ...] = ()  # further ones, of an episode that forked

    @property
    def all_rows(self) -> list[Row]:
        return [Row(self.tokens, self.trained, self.behavior), *self.rows]


@dataclass(frozen=True)
class Training:
    """Settings of the trainer."""

    learning_rate: float
    schedule: str
    min_learning_rate: float
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float
    steps: int
    updates: int
    temperature: float
    max_new_tokens: int
    advantages: tuple[str, ...]  # by source; empty: the objective's


@dataclass
class Scored:
    """An answer in an update, in Python floats, except for what has a gradient."""

    answer: Answer
    advantages: list[float]  # of each token
    siblings: int
    logprob: list[Tensor]
    entropy: list[Tensor]
    log_mu: list[float]
    log_old: list[float]
    log_reference: list[float]
    now: list[float] = field(default_factory=list)  # log π, without gradient
    weight: list[float] = field(default_factory=list)
    rejected: list[bool] = field(default_factory=list)
    marks: dict[str, list[bool]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.logprob)


def advantage(kind: str, rewards: Iterable[float], own: float) -> float:
    """The advantage of a reward in its group."""
    graded = [reward for reward in rewards if not math.isnan(reward)]
    mean = sum(graded) / len(graded)
    if kind == "dr_grpo":
        return own - mean
    if kind == "maxrl":
        return (own - mean) / mean if mean != 0 else 0.0
    if len(graded) == 1:  # no sibling to compare with
        return 0.0
    if kind == "rloo":
        return own - (sum(graded) - own) / (len(graded) - 1)
    assert kind == "grpo"
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in graded) / (len(graded) - 1))
    return (own - mean) / (deviation + 1e-6)


def cut(difference: float) -> float:
    """A difference of log-probs, cut to ± 20."""
    return min(max(difference, -LARGEST), LARGEST)


def clip(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """`x` within the limits; a constant beyond them."""
    if high is not None and x.item() > high:
        return torch.tensor(high, dtype=torch.float64)
    if low is not None and x.item() < low:
        return torch.tensor(low, dtype=torch.float64)
    return x


def log_ratio(now: Tensor, then: float) -> Tensor:
    """A log ratio with gradient."""
    return clip(now - then, -LARGEST, LARGEST)


class PlainTrainer:
    """The model, its optimizer, and the version that it is at."""

    def __init__(self, folder: Path, objective: dict[str, Any], training: Training) -> None:
        self.objective, self.training = complete(objective), training
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
        self.parameters = dict(self.model.named_parameters())
        self.other = copy.deepcopy(self.model)  # for other weights
        self.start = self._weights()
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.count = 0
        embedding = self.model.get_input_embeddings().weight
        self.decayed = {name for name, p in self.parameters.items() if p.dim() > 1 and p is not embedding}

    def _weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    # ---- a step -----------------------------------------------------------------------------------------------------

    def step(self, step: int, updates: Sequence[Sequence[Answer]]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Train the answers of each update; return the weights and the metrics."""
        before = self._weights()
        norms, scales, skipped, divisor, total = [], [], 0, 0.0, 0.0
        seen: list[Scored] = []
        for number, answers in enumerate(updates):
            sequences = [self._sequence(answer, before, step=step, update=number) for answer in answers]
            loss, denominator, scale = self._loss(sequences)
            seen += sequences
            scales.append(scale)
            total, divisor = total + loss.item(), divisor + denominator
            if denominator == 0:
                skipped += 1
                continue
            self.model.zero_grad()
            if loss.requires_grad:  # not if everything is rejected
                (loss / denominator).backward()
            gradient = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}
            norm = math.sqrt(sum(float((g * g).sum()) for g in gradient.values()))
            norms.append(norm)
            self._adamw(step, gradient, shrink=min(1.0, self.training.max_grad_norm / max(norm, 1e-300)), scale=scale)
        metrics = {
            "denominator": divisor,
            "loss": total / divisor if divisor else 0.0,
            "grad_norm": sum(norms) / len(updates),
            "learning_rate": self._rate(step) * mean(scales),
            "nonfinite_count": 0.0,
            "updates_skipped": float(skipped),
            "step_tokens": float(sum(len(row.tokens) for one in seen for row in one.answer.all_rows)),
        }
        for lag in sorted({step - one.answer.version for one in seen}):
            chosen = [one for one in seen if step - one.answer.version == lag]
            of_lag = self._metrics(chosen)
            if of_lag["tokens"]:
                metrics |= {f"lag={lag}/{name}": value for name, value in of_lag.items()}
        metrics |= {f"all/{name}": value for name, value in self._metrics(seen).items()}
        return self._weights(), metrics

    def _rate(self, step: int) -> float:
        """Linear warm-up; then constant, or down to the minimum at the end of the run."""
        t = self.training
        if step < t.warmup_steps:
            return t.learning_rate * (step + 1) / t.warmup_steps
        if t.schedule == "constant":
            return t.learning_rate
        done = (step - t.warmup_steps) / (t.steps - t.warmup_steps)
        share = 1 - done if t.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return t.learning_rate * (t.min_learning_rate + (1 - t.min_learning_rate) * share)

    @torch.no_grad()
    def _adamw(self, step: int, gradient: dict[str, Tensor], *, shrink: float, scale: float) -> None:
        t = self.training
        self.count += 1
        rate = self._rate(step) * scale
        for name, p in self.parameters.items():
            g = gradient[name] * shrink
            self.first[name] = t.beta1 * self.first[name] + (1 - t.beta1) * g
            self.second[name] = t.beta2 * self.second[name] + (1 - t.beta2) * g * g
            mean = self.first[name] / (1 - t.beta1**self.count)
            square = self.second[name] / (1 - t.beta2**self.count)
            if name in self.decayed:
                p -= rate * t.weight_decay * p
            p -= rate * mean / (square.sqrt() + 1e-8)

    # ---- the policies -----------------------------------------------------------------------------------------------

    def _compute(self, answer: Answer, model: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs of the trained tokens, and the entropies with which they were drawn."""
        logprobs, entropies = [], []
        for row in answer.all_rows:
            logits = model(input_ids=torch.tensor([row.tokens])).logits[0]
            for place in row.places:
                choices = torch.log_softmax(logits[place - 1] / self.training.temperature, 0)
                logprobs.append(choices[row.tokens[place]])
                entropies.append(-(choices.exp() * choices).sum())
        return logprobs, entropies

    @torch.no_grad()
    def _under(self, weights: dict[str, Tensor], answer: Answer) -> list[float]:
        """Log-probs under other weights."""
        for name, p in self.other.named_parameters():
            p.copy_(weights[name])
        return [p.item() for p in self._compute(answer, self.other)[0]]

    @torch.no_grad()
    def logprobs(self, answer: Answer) -> list[float]:
        """Log-probs under the weights of now."""
        return [p.item() for p in self._compute(answer, self.model)[0]]

    def _sequence(self, answer: Answer, before: dict[str, Tensor], *, step: int, update: int) -> Scored:
        """Everything about an answer that does not depend on the others."""
        objective = self.objective
        own = self.training.advantages
        kind = own[answer.source] if own else objective["advantage"]
        mu = [row.behavior[place] for row in answer.all_rows for place in row.places]
        logprob, entropy = self._compute(answer, self.model)
        now = [value.item() for value in logprob]
        if update == 0:
            old = now
        elif objective["proximal"] == "copy":
            old = self._under(before, answer)
        else:
            version = step + update / self.training.updates
            share = (step - answer.version) / (version - answer.version)
            old = [m + share * (n - m) for m, n in zip(mu, now, strict=True)]
        one = Scored(
            answer=answer,
            advantages=self._advantages(kind, answer),
            siblings=sum(not math.isnan(reward) for reward in answer.group_rewards),
            logprob=logprob, entropy=entropy, log_mu=mu, log_old=old,
            log_reference=self._under(self.start, answer) if objective["kl_coefficient"] else [],
            now=now,
        )  # fmt: skip
        self._correct(one)
        return one

    def _advantages(self, kind: str, answer: Answer) -> list[float]:
        """The advantage of each trained token."""
        found = []
        turn = -1
        for row in answer.all_rows:
            for place in row.places:
                turn += not row.trained[place - 1]
                if self.objective["turn_rewards"] == "sum":
                    found.append(advantage(kind, answer.group_rewards, answer.reward))
                    continue
                to_go = [math.nan] * len(answer.group_rewards)
                for sibling, rewards in enumerate(answer.turns):
                    if not math.isnan(answer.group_rewards[sibling]):
                        to_go[sibling] = sum(rewards[min(turn, len(rewards) - 1) :])
                found.append(advantage(kind, to_go, to_go[answer.sibling]))
        return found

    def _is_masked(self, answer: Answer) -> bool:
        return bool(answer.truncated) and self.objective["truncated"] == "mask"

    # ---- weights and masks ------------------------------------------------------------------------------------------

    def _log_on(self, one: Scored) -> list[float]:
        """Logarithms of the ratios on which corrections are."""
        above = one.now if self.objective["on"] == "k" else one.log_old
        return [cut(a - m) for a, m in zip(above, one.log_mu, strict=True)]

    def _correct(self, one: Scored) -> None:
        """Weight of each token, and whether it is rejected."""
        o, n = self.objective, len(one)
        logs = self._log_on(one)
        ratios = [math.exp(x) for x in logs]
        product = math.exp(cut(sum(logs)))
        geometric = math.exp(sum(logs) / n) if n else 1.0
        raw = {
            "none": [1.0] * n, "tis": ratios, "icepop": ratios, "tis_sequence": [product] * n,
            "tis_geometric": [geometric] * n,
        }[o["weight"]]  # fmt: skip
        low, high = {"icepop": (0.5, 5.0)}.get(o["weight"], (0.0, 2.0))
        low = low if o["weight_low"] is None else o["weight_low"]
        high = high if o["weight_high"] is None else o["weight_high"]
        if o["weight"].startswith("tis"):
            one.weight = [min(max(w, low), high) for w in raw]
        elif o["weight"] == "icepop":
            one.weight = [w if low <= w <= high else 0.0 for w in raw]
        else:
            one.weight = raw
        tested = {"none": [1.0] * n, "token": ratios, "sequence": [product] * n, "geometric": [geometric] * n}[o["mis"]]
        outside = [o["mis"] != "none" and not o["mis_low"] <= x <= o["mis_high"] for x in tested]
        vetoed = any(ratio < o["veto"] for ratio in ratios)
        drift = sum(cut(m - x) for m, x in zip(one.log_mu, one.now, strict=True)) / n if n else 0.0
        opsm = o["opsm"] is not None and any(a < 0 for a in one.advantages) and drift > o["opsm"]
        whole = vetoed or opsm or (o["mis"] in ("sequence", "geometric") and any(outside))
        one.rejected = [whole or out for out in outside]
        one.marks = {
            "tis_capped": [o["weight"].startswith("tis") and w > high for w in raw],
            "masked_token": [
                r or (o["weight"] == "icepop" and w == 0) for r, w in zip(one.rejected, one.weight, strict=True)
            ],
            "masked_seq": [whole] * n,
            "veto": [vetoed] * n,
            "clip_low": [False] * n, "clip_high": [False] * n, "dual_clip": [False] * n,
        }  # fmt: skip

    # ---- the loss ---------------------------------------------------------------------------------------------------

    def _loss(self, sequences: list[Scored]) -> tuple[Tensor, float, float]:
        """The sum of an update, its divisor, and the factor of the learning rate."""
        o = self.objective
        length = self.training.max_new_tokens
        total, divisor = torch.zeros((), dtype=torch.float64), 0.0
        weights: list[float] = []
        products: list[float] = []
        for one in sequences:
            if self._is_masked(one.answer) or not len(one):
                continue
            losses = self._policy(one)
            kept = [not rejected for rejected in one.rejected]
            counted = sum(kept)
            products.append(math.exp(cut(sum(self._log_on(one)))))
            if counted == 0:
                continue
            factor, share = {
                "token_mean": (1.0, float(counted)),
                "seq_mean_token_mean": (1 / counted, 1.0),
                "seq_mean_token_sum_norm": (1 / length, 1.0),
                "longcat": (1 / (one.siblings * length), 1 / one.siblings),
            }[o["aggregation"]]
            divisor += share
            used = [weight for weight, keeps in zip(one.weight, kept, strict=True) if keeps]
            weights += used[:1] if o["weight"] in ("tis_sequence", "tis_geometric") else used
            for t, keeps in enumerate(kept):
                if keeps:
                    term = one.weight[t] * losses[t]
                    if o["kl_coefficient"]:
                        term = term + o["kl_coefficient"] * self._divergence(one, t)
                    total = total + factor * (term - o["entropy_coefficient"] * one.entropy[t])
        if o["normalized"] and weights:
            divisor *= sum(weights) / len(weights)
        scale = 1.0
        if o["vcpo"] and products:
            squares = [w * w for w in products]
            scale = math.sqrt(sum(products) ** 2 / (len(products) * sum(squares)))
        return total, divisor, scale

    def _divergence(self, one: Scored, t: int) -> Tensor:
        d = clip(one.log_reference[t] - one.logprob[t], -LARGEST, LARGEST)
        estimator = self.objective["kl_estimator"]
        found = {"k1": -d, "k2": d * d / 2}.get(estimator, torch.exp(d) - d - 1)
        return found * log_ratio(one.logprob[t], one.log_mu[t]).exp() if estimator == "k3_weighted" else found

    def _policy(self, one: Scored) -> list[Tensor]:
        """Policy loss of every token."""
        options = self.objective["loss"]
        anchor = one.log_mu if options.get("ratio", "bypass") == "bypass" else one.log_old
        logs = [log_ratio(p, a) for p, a in zip(one.logprob, anchor, strict=True)]
        losses: dict[str, Callable[..., list[Tensor]]] = {
            "ppo": self._ppo, "gspo": self._gspo, "cispo": self._cispo,
            "dppo_tv": self._bounded, "ipo": self._bounded, "reinforce": self._reinforce,
            "m2po_per_sequence": self._m2po,
        }  # fmt: skip
        return losses[options["kind"]](one, logs, options)

    def _surrogate(self, one: Scored, t: int, x: Tensor, options: dict[str, Any]) -> Tensor:
        """-min(x A, clip(x) A), cut at -c A where A < 0."""
        a, low, high = one.advantages[t], 1 - options["clip_low"], 1 + options["clip_high"]
        clipped = clip(x, low, high)
        is_clipped = clipped.item() * a < x.item() * a
        loss = -(clipped if is_clipped else x) * a
        one.marks["clip_low"][t] = is_clipped and x.item() < low
        one.marks["clip_high"][t] = is_clipped and x.item() > high
        if options.get("dual_clip") is not None and a < 0 and loss.item() > -options["dual_clip"] * a:
            one.marks["dual_clip"][t] = True
            return torch.tensor(-options["dual_clip"] * a, dtype=torch.float64)
        return loss

    def _ppo(self, one: Scored, logs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
        return [self._surrogate(one, t, torch.exp(x), options) for t, x in enumerate(logs)]

    def _gspo(self, one: Scored, logs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
        mean = sum(logs) / len(logs)  # type: ignore[arg-type]
        found = []
        for t, p in enumerate(one.logprob):
            found.append(self._surrogate(one, t, torch.exp(mean.item() + p - p.item()), options))
        return found

    def _cispo(self, one: Scored, logs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
        found = []
        for t, x in enumerate(logs):
            ratio, high = math.exp(x.item()), 1 + options["clip_high"]
            low = -math.inf if options["clip_low"] is None else 1 - options["clip_low"]
            one.marks["clip_low"][t], one.marks["clip_high"][t] = ratio < low, ratio > high
            found.append(-min(max(ratio, low), high) * one.advantages[t] * one.logprob[t])
        return found

    def _bounded(self, one: Scored, logs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
        found = []
        for t, x in enumerate(logs):
            change, a, bound = math.exp(one.now[t]) - math.exp(one.log_mu[t]), one.advantages[t], options["threshold"]
            if options["kind"] == "ipo":
                too_high, too_low = change > bound, change < -bound
            else:
                too_high, too_low = a > 0 and change > bound, a < 0 and change < -bound
            one.marks["clip_high"][t], one.marks["clip_low"][t] = too_high, too_low
            keep = 0.0 if too_high or too_low else 1.0
            found.append(-keep * a * torch.exp(x) + options["pull"] * x * x)
        return found

    def _reinforce(self, one: Scored, logs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
        return [-a * p for a, p in zip(one.advantages, one.logprob, strict=True)]

    def _m2po(self, one: Scored, logs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
        squares = [x.item() ** 2 for x in logs]
        left = list(range(len(logs)))
        while left and sum(squares[t] for t in left) / len(left) > options["threshold"]:
            left.remove(max(left, key=lambda t: squares[t]))
        found = []
        for t, x in enumerate(logs):
            one.marks["masked_token"][t] |= t not in left
            found.append(-(1.0 if t in left else 0.0) * torch.exp(x) * one.advantages[t])
        return found

    # ---- metrics ----------------------------------------------------------------------------------------------------

    def _metrics(self, sequences: list[Scored]) -> dict[str, float]:
        """Every formula of docs/METRICS.md over these sequences."""
        trained = [s for s in sequences if not self._is_masked(s.answer)]
        logs = [cut(p - m) for s in trained for p, m in zip(s.now, s.log_mu, strict=True)]
        ratios = [math.exp(x) for x in logs]
        advantages = [a for s in trained for a in s.advantages]
        of_tokens: dict[str, Callable[[], float]] = {
            "mismatch_k1": lambda: mean(-x for x in logs),
            "mismatch_k3": lambda: mean(math.exp(x) - 1 - x for x in logs),
            "log_ratio_mean": lambda: mean(logs),
            "log_ratio_abs_mean": lambda: mean(abs(x) for x in logs),
            "log_ratio_abs_max": lambda: max(abs(x) for x in logs),
            "log_ratio_min": lambda: min(logs),
            "log_ratio_max": lambda: max(logs),
            "ratio_p99": lambda: sorted(ratios)[math.ceil(0.99 * len(ratios)) - 1],
            "ess": lambda: sum(ratios) ** 2 / (len(ratios) * sum(x * x for x in ratios)),
            "chi2": lambda: mean(x * x - 1 for x in ratios),
            "ppl_ratio": lambda: math.exp(mean(-x for x in logs)),
            "entropy": lambda: mean(e.item() for s in trained for e in s.entropy),
            "adv_mean": lambda: mean(advantages),
            "adv_std": lambda: math.sqrt(max(0.0, mean(a * a for a in advantages) - mean(advantages) ** 2)),
        }
        for mark in ("clip_low", "clip_high", "dual_clip", "tis_capped", "masked_token", "masked_seq", "veto"):
            of_tokens[f"{mark}_frac"] = lambda mark=mark: mean(m for s in trained for m in s.marks[mark])
        if self.objective["kl_coefficient"]:
            differences = [cut(r - p) for s in trained for r, p in zip(s.log_reference, s.now, strict=True)]
            of_tokens["kl_reference"] = lambda: mean(math.exp(d) - d - 1 for d in differences)
        found = {"tokens": float(len(logs)), "sequences": float(len(sequences))}
        if logs:
            found |= {name: compute() for name, compute in of_tokens.items()}
        found["reward_mean"] = mean(s.answer.reward for s in sequences)
        found["response_len_mean"] = len(logs) / len(sequences)
        found["truncated_frac"] = mean(bool(s.answer.truncated) for s in sequences)
        for budget in ("tokens", "turns", "time"):
            found[f"truncated_{budget}_frac"] = mean(s.answer.truncated == budget for s in sequences)
        return found


def mean(values: Iterable[float]) -> float:
    """The mean."""
    found = list(values)
    return sum(found) / len(found)
