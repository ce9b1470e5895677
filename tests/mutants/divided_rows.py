"""Mutations of what ranks do that divide rows: the exchange of heads, the loss of all, and what counts once."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_HEADS: Final = "test_attention_of_slices_is_that_of_the_row"
_CHECKS: Final = "test_divided_rows_pass_the_checks_and_take_the_memory_of_their_parts"
_FORMULAS: Final = "test_weights_and_metrics_are_those_of_the_formulas_with_divided_rows"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/trainer/context.py",
        "tests/trainer/test_context.py",
        (
            "sinks-of-the-first-heads",
            "        return values_H.chunk(self.size)[self.rank]\n",
            "        return values_H.chunk(self.size)[0]\n",
            _HEADS,
        ),
        (
            "keys-repeated-in-another-order",
            "heads.repeat_interleave(repeats, dim=1)",
            "heads.repeat(1, repeats, 1, 1)",
            _HEADS,
        ),
        (
            "gradients-not-sent-back",
            "        returned: Tensor = _Exchange.apply(grad, ctx.group)\n",
            "        returned = grad\n",
            _HEADS,
        ),
    ),
    *of(
        "dora/trainer/context.py",
        "tests/trainer/test_independent.py",
        (
            "gradients-of-equal-losses-summed",
            "        return grad_P[own_p], None, None, None\n",
            "        dist.all_reduce(grad_P := grad_P.clone())\n        return grad_P[own_p], None, None, None\n",
            _FORMULAS,
        ),
    ),
    *of(
        "dora/trainer/metrics.py",
        "tests/trainer/test_independent.py",
        (
            "divisor-counts-a-row-once-per-rank",
            "(self._update_sums / self._ranks_per_batch).tolist()",
            "self._update_sums.tolist()",
            _FORMULAS,
        ),
        (
            "metrics-count-a-row-once-per-rank",
            "        flat /= self._ranks_per_batch\n",
            "",
            _FORMULAS,
        ),
    ),
    *of(
        "dora/trainer/step.py",
        "tests/trainer/test_independent.py",
        (
            "gradients-divided-by-the-ranks-of-a-row",
            "self._settings.micro_batch_tokens / (denominator or 1.0)",
            "self._settings.micro_batch_tokens / self._layout.ranks / (denominator or 1.0)",
            _FORMULAS,
        ),
        (
            "answer-sent-by-each-rank",
            " and self._rank % self._layout.ranks == 0:",
            ":",
            _FORMULAS,
        ),
    ),
    *of(
        "dora/trainer/probe.py",
        "tests/trainer/test_version_probe.py",
        (
            "probe-counts-a-row-once-per-rank",
            "(sums / self._layout.ranks).tolist()",
            "sums.tolist()",
            "test_on_two_ranks_all_take_part_with_or_without_sequences",
        ),
    ),
    *of(
        "dora/trainer/forward_check.py",
        "tests/trainer/test_context.py",
        (
            "divided-rows-not-checked",
            "replace(layout_of(model), context=context)",
            "layout_of(model)",
            _CHECKS,
        ),
    ),
    *of(
        "dora/trainer/layouts.py",
        "tests/trainer/test_context.py",
        (
            "long-angles-not-refused",
            "    if limit is not None and longest > limit:\n",
            "    if False:\n",
            "test_models_whose_rows_cannot_be_divided_are_refused_by_name",
        ),
    ),
    *of(
        "dora/controller/batches.py",
        "tests/controller/test_batches.py",
        (
            "parts-dealt-to-ranks-in-turn",
            "    return [part for part in parts for _ in range(ranks_per_part)]\n",
            "    return [part for _ in range(ranks_per_part) for part in parts]\n",
            "test_ranks_that_divide_sequences_get_the_same_part",
        ),
    ),
    *of(
        "dora/controller/trainer_link.py",
        "tests/controller/test_lost_trainer.py",
        (
            "ranks-that-divide-get-different-parts",
            "ranks_per_part=start.ranks_per_part)",
            "ranks_per_part=1)",
            "test_fewer_ranks_that_divide_sequences_get_all_parts_of_a_wave",
        ),
    ),
)
