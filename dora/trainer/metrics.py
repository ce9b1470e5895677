"""The metrics of a step: sums over micro-batches, one reduction over ranks, and names with unit and formula.

Invariant: until the step is closed everything is a sum, a maximum or a count per bin over trained tokens or
trajectories. Division comes last, so that neither packing nor the number of ranks changes a metric, apart from the
shares of computed positions. Sums that an update needs are kept separately: they are reduced and set to zero when the
update closes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dora.objectives.marks import MARKS
from dora.objectives.objective import SUMS, Terms
from dora.objectives.tokens import MAX_LOG_RATIO, Tokens, log_ratio
from dora.transport.messages import TRUNCATIONS

# name -> (unit, formula). Rows of LAGGED exist as `all/<name>` and, for every lag with tokens, `lag=<l>/<name>`.
# Sums run over trained tokens; w = k = π/μ, log k clamped to ±20.
LAGGED: dict[str, tuple[str, str]] = {
    "tokens": ("tokens", "Σ 1"),
    "mismatch_k1": ("nats", "mean of -log k"),
    "mismatch_k3": ("nats", "mean of k - 1 - log k"),
    "log_ratio_mean": ("nats", "mean of log k"),
    "log_ratio_abs_mean": ("nats", "mean of |log k|"),
    "log_ratio_abs_max": ("nats", "max |log k|"),
    "log_ratio_min": ("nats", "min log k"),
    "log_ratio_max": ("nats", "max log k"),
    "ratio_p99": ("1", "99th percentile of k, within 1 %"),
    "ess": ("fraction", "(Σ w)² / (n Σ w²)"),
    "chi2": ("1", "mean of w² - 1"),
    "ppl_ratio": ("1", "exp(mean of -log k)"),
    **{f"{name}_frac": row for name, row in MARKS.items() if row[0] == "fraction"},
    "entropy": ("nats", "mean entropy of softmax(logits / temperature)"),
    "adv_mean": ("1", "mean advantage"),
    "adv_std": ("1", "√(mean A² - adv_mean²)"),
    "sequences": ("trajectories", "Σ 1 over trajectories"),
    "reward_mean": ("1", "mean reward over trajectories"),
    "response_len_mean": ("tokens", "trained tokens / trajectories"),
    "truncated_frac": ("fraction", "trajectories that a budget ended"),
    "truncated_tokens_frac": ("fraction", "trajectories that reached their token budget"),
    "truncated_turns_frac": ("fraction", "trajectories that reached environment.max_turns"),
    "truncated_time_frac": ("fraction", "trajectories that reached environment.episode_timeout_s"),
}
#: Further rows of LAGGED, present if the objective measures them.
MEASURED = {name: row for name, row in MARKS.items() if row[0] != "fraction"}
WHOLE: dict[str, tuple[str, str]] = {
    "denominator": ("1", "D of the objective, summed over updates: with token_mean, the trained tokens of all ranks"),
    "loss": ("1", "Σ l / denominator"),
    "grad_norm": ("1", "Euclidean norm of the normalized gradient before clipping, mean over updates"),
    "learning_rate": ("1", "rate in force, warm-up and objective.vcpo included, mean over updates"),
    "nonfinite_count": ("tokens", "trained tokens whose loss is NaN or infinite"),
    "updates_skipped": ("updates", "updates that were not made because D = 0 or the gradient is not finite"),
    "step_tokens": ("tokens", "all tokens of the step, prompts included, all ranks"),
    "useful_frac": ("fraction", "share of computed positions whose token is trained, not a prompt or padding"),
    "padding_frac": ("fraction", "share of computed positions that hold no token; 0 if sequences are packed"),
    "busy_s": ("s", "time spent on micro-batches, mean over ranks; without waiting for them"),
    "close_s": ("s", "from the end of the last micro-batch until the next version can be published, rank 0"),
    "write_wait_s": ("s", "waited before updates until the weights that they change were written, rank 0"),
}
#: Metrics of the probe (dora/trainer/probe.py), in steps with tokens to measure. v: the version that sampled a token.
PROBED: dict[str, tuple[str, str]] = {
    "engine_mismatch_k3": (
        "nats",
        "mean of π_v/μ - 1 - log π_v/μ over probed tokens and the fresh tokens of the first update",
    ),
    "version_drift_mean": ("nats", "mean of log π_s/π_v over probed tokens"),
    "version_drift_k3": ("nats", "mean of π_s/π_v - 1 - log π_s/π_v over probed tokens"),
    "probe_tokens": ("tokens", "stale tokens whose log π_v was computed, all ranks"),
    "probe_skipped": ("0/1", "1: the version of stale tokens could not be read from the store"),
}
METRICS = WHOLE | {f"all/{name}": row for name, row in LAGGED.items()}

_TOKEN_SUMS = (
    "tokens", "k", "k_squared", "log_k", "abs_log_k", "entropy", "adv", "adv_squared", "loss", "nonfinite", *MARKS,
)  # fmt: skip
#: Sum -> index into TRUNCATIONS.
_TRUNCATED = {f"truncated_{kind}": index for index, kind in enumerate(TRUNCATIONS) if kind}
_SEQUENCE_SUMS = ("sequences", "reward", *_TRUNCATED)
_COLUMNS = {name: i for i, name in enumerate((*_TOKEN_SUMS, *_SEQUENCE_SUMS))}

#: Bins of log k, centered on multiples of their width. The center of a bin is within 1 % of every ratio in it.
_BINS = 2_049
_BIN_WIDTH = 2 * MAX_LOG_RATIO / (_BINS - 1)


class StepSums:
    """The sums of one step on one rank, one row per lag."""

    def __init__(self, *, max_staleness: int, device: torch.device, ranks_per_batch: int = 1) -> None:
        """`ranks_per_batch`: number of ranks that have the same micro-batches, and so the same sums."""
        self._ranks_per_batch = ranks_per_batch
        self._sums = torch.zeros(max_staleness + 1, len(_COLUMNS), dtype=torch.float64, device=device)
        self._extremes = torch.full((max_staleness + 1, 2), -math.inf, dtype=torch.float64, device=device)  # of ±log k
        self._bins = torch.zeros(max_staleness + 1, _BINS, dtype=torch.float64, device=device)  # tokens by log k
        self._measured: tuple[str, ...] = ()  # the MARKS that the objective measures; equal on all ranks, in all passes
        self._update_sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.step_tokens = 0
        self.positions = 0  # that forward passes computed
        self.padding = 0  # of these, positions without a token
        self.busy_s = 0.0

    @torch.no_grad()
    def add_tokens(self, tokens: Tokens, terms: Terms) -> None:
        """Add the trained tokens of one pass."""
        lag_P = tokens.staleness_n[tokens.sequence_P]
        log_k = log_ratio(tokens.current_P, tokens.behavior_P).double()
        k, adv, loss = log_k.exp(), tokens.advantage_P.double(), terms.loss_P.detach()
        ones = torch.ones_like(k)
        entropy = torch.zeros_like(k) if tokens.entropy_P is None else tokens.entropy_P
        marks = [terms.marks.get(name, torch.zeros_like(k)) for name in MARKS]
        self._measured = tuple(terms.marks)
        columns = (ones, k, k * k, log_k, log_k.abs(), entropy, adv, adv * adv, loss, ~loss.isfinite(), *marks)
        values = torch.stack([column.double() for column in columns], dim=1)
        self._sums[:, : len(_TOKEN_SUMS)].index_add_(0, lag_P, values)
        both = torch.stack([-log_k, log_k], dim=1)
        self._extremes.scatter_reduce_(0, lag_P[:, None].expand_as(both), both, "amax")
        bin_P = ((log_k + MAX_LOG_RATIO) / _BIN_WIDTH).round().long().clamp(0, _BINS - 1)  # a NaN falls into some bin
        self._bins += torch.bincount(lag_P * _BINS + bin_P, minlength=self._bins.numel()).view_as(self._bins)
        self._update_sums += torch.stack([terms.sums[name].to(self._update_sums) for name in SUMS])

    def add_trajectories(self, *, lag: Tensor, reward: Tensor, truncated: Tensor) -> None:
        """Add the trajectories of one micro-batch; `truncated`: index into TRUNCATIONS."""
        ended = [truncated == kind for kind in _TRUNCATED.values()]
        values = torch.stack([torch.ones(len(lag)), reward, *ended], dim=1).double()
        self._sums[:, len(_TOKEN_SUMS) :].index_add_(0, lag.to(self._sums.device), values.to(self._sums.device))

    def reduce_update(self) -> dict[str, float]:
        """Return the objective's sums of the update that ends, over all ranks, and reset them; a collective."""
        dist.all_reduce(self._update_sums)
        totals = dict(zip(SUMS, (self._update_sums / self._ranks_per_batch).tolist(), strict=True))
        self._update_sums.zero_()
        return totals

    def reduce(self) -> ReducedSums:
        """Return the sums of the step over all ranks; a collective."""
        extra = torch.tensor([self.step_tokens, self.positions, self.padding, self.busy_s], dtype=torch.float64)
        parts = [extra.to(self._sums.device), self._sums.flatten(), self._bins.flatten()]
        flat = torch.cat(parts)
        dist.all_reduce(flat)
        flat /= self._ranks_per_batch
        dist.all_reduce(self._extremes, op=dist.ReduceOp.MAX)
        extra, sums, bins = flat.cpu().split([part.numel() for part in parts])
        step_tokens, positions, padding, busy_s = extra.tolist()
        return ReducedSums(
            sums.view_as(self._sums),
            extremes=self._extremes.cpu(),
            bins=bins.view_as(self._bins),
            measured=self._measured,
            step_tokens=step_tokens,
            positions=positions,
            padding=padding,
            busy_s=busy_s * self._ranks_per_batch / dist.get_world_size(),
        )


class ReducedSums:
    """The sums of a whole step."""

    def __init__(
        self,
        sums: Tensor,
        *,
        extremes: Tensor,
        bins: Tensor,
        measured: tuple[str, ...],
        step_tokens: float,
        positions: float,
        padding: float,
        busy_s: float,
    ) -> None:
        self._sums = sums
        self._extremes = extremes
        self._bins = bins
        self._measured = [name for name in MEASURED if name in measured]
        self._step_tokens = step_tokens
        self._positions = max(positions, 1.0)
        self._padding = padding
        self._busy_s = busy_s

    def metrics(self, *, denominator: float, **whole: float) -> dict[str, float]:
        """Return all metrics; the arguments are the metrics of WHOLE that the caller computed."""
        result = {
            "denominator": denominator,
            "loss": float(self._column("loss").sum()) / (denominator or 1.0),
            "nonfinite_count": float(self._column("nonfinite").sum()),
            "step_tokens": self._step_tokens,
            "useful_frac": float(self._column("tokens").sum()) / self._positions,
            "padding_frac": self._padding / self._positions,
            "busy_s": self._busy_s,
            **whole,
        }
        whole_step = self._lagged(self._sums.sum(0), self._extremes.amax(0), self._bins.sum(0))
        result |= {f"all/{key}": value for key, value in whole_step.items()}
        for lag, row in enumerate(self._sums):
            if row[_COLUMNS["tokens"]] > 0:
                own = self._lagged(row, self._extremes[lag], self._bins[lag])
                result |= {f"lag={lag}/{key}": value for key, value in own.items()}
        return result

    def _column(self, name: str) -> Tensor:
        return self._sums[:, _COLUMNS[name]]

    def _lagged(self, row: Tensor, extremes: Tensor, bins: Tensor) -> dict[str, float]:
        """Return the metrics of LAGGED from one row of sums; 0 if nothing was trained."""
        total: dict[str, Any] = {name: float(row[i]) for name, i in _COLUMNS.items()}
        n, sequences = max(total["tokens"], 1.0), max(total["sequences"], 1.0)
        mean = {name: total[name] / n for name in _TOKEN_SUMS}
        below, above = extremes.tolist() if total["tokens"] else (0.0, 0.0)
        return {
            "tokens": total["tokens"],
            "mismatch_k1": -mean["log_k"],
            "mismatch_k3": mean["k"] - mean["tokens"] - mean["log_k"],
            "log_ratio_mean": mean["log_k"],
            "log_ratio_abs_mean": mean["abs_log_k"],
            "log_ratio_abs_max": max(below, above),
            "log_ratio_min": -below,
            "log_ratio_max": above,
            "ratio_p99": _ratio_quantile(bins, 0.99),
            "ess": total["k"] ** 2 / (n * total["k_squared"]) if total["k_squared"] else 0.0,
            "chi2": mean["k_squared"] - mean["tokens"],
            "ppl_ratio": math.exp(-mean["log_k"]),
            **{f"{name}_frac": mean[name] for name, (unit, _) in MARKS.items() if unit == "fraction"},
            **{name: mean[name] for name in self._measured},
            "entropy": mean["entropy"],
            "adv_mean": mean["adv"],
            "adv_std": max(mean["adv_squared"] - mean["adv"] ** 2, 0.0) ** 0.5,
            "sequences": total["sequences"],
            "reward_mean": total["reward"] / sequences,
            "response_len_mean": total["tokens"] / sequences,
            "truncated_frac": sum(total[name] for name in _TRUNCATED) / sequences,
            **{f"{name}_frac": total[name] / sequences for name in _TRUNCATED},
        }


def _ratio_quantile(bins: Tensor, share: float) -> float:
    """Return the ratio at the middle of the bin that holds the quantile; 0 if no token was trained."""
    total = float(bins.sum())
    if not total:
        return 0.0
    place = int(torch.searchsorted(bins.cumsum(0), share * total))
    return math.exp(place * _BIN_WIDTH - MAX_LOG_RATIO)
