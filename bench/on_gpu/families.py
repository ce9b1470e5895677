"""The check of the forward pass on this device: all families of docs/MODELS.md, and the tolerances of the check.

In float32, each family is examined as for docs/MODELS.md: log-probs and gradients beside plain transformers on the CPU,
and what is published. In bfloat16, the check's own quantities are measured under the weights that transformers draws:
what changes in a sequence if those before it get other tokens, without a leak and with one of 1 %, and how far rows are
from each sequence alone; each as a share of what the check allows. Models of the size that is trained follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from clients.steps import one_rank
from result import Row
from transformers import AutoModelForCausalLM

from dora.trainer import attention
from dora.trainer.check_rows import sequences_for
from dora.trainer.forward_check import (
    LEAK,
    NOISE,
    PACKING,
    ROUNDING,
    _Comparison,
    _mean_difference,
    _packed_logprobs,
)
from dora.trainer.layouts import layout_of
from on_gpu.cases import Case, Place
from on_gpu.models import DTYPE, config_of
from tests.families import FAMILIES, make_config
from tests.leaks import leaking
from tests.models import LARGEST_ERROR, LARGEST_GRADIENT_ERROR, examine

SHARE = 0.01  # of a state, that leaks
LONGEST = 120


class Margins(NamedTuple):
    """Mean differences of log-probs, and how large they may be."""

    leak: float  # what other tokens before a sequence change in it
    leak_limit: float
    packing: float  # rows beside each sequence alone
    packing_limit: float


def cases(part: str, *, tiny: bool) -> list[Case]:
    names = ["llama", "qwen3_moe", "lfm2"] if tiny else list(FAMILIES)
    third = -(-len(names) // 3)
    groups = [names[i : i + third] for i in range(0, len(names), third)]
    return [
        *(Case(f"families from {group[0]} in float32", partial(table, group)) for group in groups),
        Case("families in bfloat16", partial(tolerances, names), limit_s=240.0),
        *(Case(f"Qwen3 {model}", partial(large, model)) for model in (["tiny"] if tiny else ["0.6B", "8B"])),
    ]


def table(families: Sequence[str], place: Place) -> Iterator[Row]:
    what = f"{families[0]} to {families[-1]}, float32"
    with one_rank(place.device):
        verdicts = [examine(family, device=place.device) for family in families]
    trained = [verdict for verdict in verdicts if not verdict.problem]
    refused = ", ".join(verdict.family for verdict in verdicts if verdict.problem) or "none"
    yield Row(f"{what}: families that are trained", len(trained), f"of {len(verdicts)}", f"refused: {refused}")
    wrong = ", ".join(f"{v.family} ({v.published}, {v.error:.0e})" for v in trained if not v.is_right)
    yield Row(f"{what}: silently wrong", sum(not v.is_right for v in trained), "", wrong, bar="figure <= 0")
    error, family = max((verdict.error, verdict.family) for verdict in trained)
    yield Row(f"{what}: largest error of a log-prob", error, "", family, bar=f"figure <= {LARGEST_ERROR}")
    error, family = max((verdict.gradient_error, verdict.family) for verdict in trained)
    yield Row(f"{what}: largest error of a gradient", error, "", family, bar=f"figure <= {LARGEST_GRADIENT_ERROR}")


def tolerances(families: Sequence[str], place: Place) -> Iterator[Row]:
    found: dict[str, tuple[Margins, Margins]] = {}
    unable = []
    for family in families:
        torch.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(make_config(family), dtype=getattr(torch, DTYPE)).eval()
            model.set_attn_implementation(attention.NAME)
            model.to(place.device)
            found[family] = measure(model, place.device, share=0.0), measure(model, place.device, share=SHARE)
        except Exception as err:  # noqa: BLE001 - anything that the class of a model raises
            unable.append(f"{family} ({type(err).__name__})")
    yield Row("families in bfloat16", len(found), f"of {len(families)}", f"not computed: {', '.join(unable) or 'none'}")
    exact = sum(without.leak == 0 for without, _ in found.values())
    yield Row("sequences change by 0 if those before them do", exact, f"of {len(found)} families")
    yield from beside_limits(found)


def large(model_name: str, place: Place) -> Iterator[Row]:
    config, dtype = config_of(model_name), getattr(torch, DTYPE)
    with torch.device(place.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME).eval()
    with_and_without = measure(model, place.device, share=0.0), measure(model, place.device, share=SHARE)
    yield from beside_limits({f"Qwen3 {model_name}": with_and_without})


def beside_limits(found: dict[str, tuple[Margins, Margins]]) -> Iterator[Row]:
    """Yield what is nearest to its limit: without a leak all must be below theirs, with one above it."""
    what = "bfloat16" if len(found) > 1 else next(iter(found))
    leak, family = max((without.leak / without.leak_limit, family) for family, (without, _) in found.items())
    yield Row(f"{what}: the largest change without a leak", leak, "of its limit", family, bar="figure <= 1")
    packing, family = max((without.packing / without.packing_limit, family) for family, (without, _) in found.items())
    yield Row(f"{what}: rows beside each sequence alone", packing, "of its limit", family, bar="figure <= 1")
    planted, family = min((leaks.leak / leaks.leak_limit, family) for family, (_, leaks) in found.items())
    title = f"{what}: the smallest change by a leak of {SHARE:.0%}"
    yield Row(title, planted, "of its limit", family, bar="figure >= 1")


@torch.no_grad()
def measure(model: Any, device: str, *, share: float) -> Margins:
    """Return the check's own quantities for the layout of the model; `share`: of a planted leak."""
    on, sequences = torch.device(device), sequences_for(model.config, longest=LONGEST)
    with leaking(model, share=share) if share else nullcontext():
        comparison = _Comparison(model, sequences, device=on, dtype=DTYPE)
        layout = layout_of(model)
        rows = sequences.rows(layout, on)
        together = comparison._logprobs(rows, partial(_packed_logprobs, model))
        orders = [sequences.in_order(members, row) for members, row in rows]
        noise = comparison._effect(layout, together, changed=[order[-1] for order in orders])
        return Margins(
            leak=comparison._effect(layout, together, changed=[n for order in orders for n in order[::2]]),
            leak_limit=max(LEAK, NOISE * noise),
            packing=_mean_difference(together, comparison._alone, together),
            packing_limit=max(PACKING[DTYPE], ROUNDING * comparison._rounding),
        )
