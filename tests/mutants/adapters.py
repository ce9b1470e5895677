"""Mutations of adapters."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/trainer/adapters.py",
        "tests/trainer/test_adapters.py",
        (
            "adapter-not-switched-off",
            "            module._disable_adapters = adapter is None\n",
            "",
            "test_the_reference_is_the_model_and_the_proximal_policy_the_one_before",
        ),
        (
            "proximal-adapter-not-copied",
            "matrices[PROXIMAL].weight.to_local().copy_(matrices[TRAINED].weight.to_local())",
            "pass",
            "test_one_rank_trains_and_publishes_what_a_plain_loop_over_peft_does[qwen3]",
        ),
        (
            "new-adapter-not-zero-after-the-check",
            "if is_trial else 0.0",
            "",
            "test_first_values_depend_on_the_seed_and_add_nothing",
        ),
        (
            "sum-without-the-scale",
            "right.to(wide), alpha=self.scale)",
            "right.to(wide))",
            "test_versions_in_16_bits_are_rounded_once",
        ),
        (
            "rslora-not-folded",
            "(math.sqrt(settings.rank) if settings.rslora else 1.0)",
            "1.0",
            "test_a_version_has_the_adapter_as_peft_reads_it_beside_the_weights_that_include_it[qwen3]",
        ),
        (
            "shared-weights-adapted-twice",
            "        if chosen & shared:\n",
            "        if False:\n",
            "test_a_target_that_cannot_be_adapted_is_refused",
        ),
    ),
    *of(
        "dora/trainer/forward_check.py",
        "tests/trainer/test_adapters.py",
        (
            "idle-adapters-accepted",
            "    _require_effect(policy, expected)\n",
            "",
            "test_the_check_of_the_model_uses_an_adapter_that_has_an_effect_and_leaves_the_first_one",
        ),
    ),
    *of(
        "dora/trainer/step.py",
        "tests/trainer/test_adapters.py",
        (
            "checkpoints-with-the-frozen-weights",
            "self._shards = policy.trained()",
            "self._shards = policy.shards()",
            "test_a_checkpoint_has_the_adapter_and_its_moments_alone",
        ),
    ),
)
