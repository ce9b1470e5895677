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
            "self.scale * left[start",
            "left[start",
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
        "dora/trainer/adapters.py",
        "tests/trainer/test_adapters.py",
        (
            "sum-of-a-node-rounded-otherwise",
            "                total += column[:, None] * row\n",
            "                total += (column[:, None] * row).float()\n",
            "test_a_node_makes_the_same_bytes_of_the_model_and_the_adapter[qwen3-float32]",
        ),
    ),
    *of(
        "dora/trainer/parts.py",
        "tests/trainer/test_adapters.py",
        (
            "recipe-for-dequantised-weights",
            "if is_copied and is_added and not self._policy.dequantised and",
            "if is_copied and is_added and",
            "test_weights_that_are_computed_in_other_ways_are_not_made_on_nodes[FP8]",
        ),
    ),
    *of(
        "dora/weights/merging.py",
        "tests/weights/test_merging.py",
        (
            "made-weights-not-compared",
            "if checksum_of(path) != self._checksums[name]:",
            "if False:",
            "test_with_another_model_versions_are_fetched_whole_and_that_is_told_once",
        ),
        (
            "made-file-left-after-a-failure",
            "            path.unlink(missing_ok=True)\n",
            "",
            "test_a_file_that_cannot_be_made_is_not_left",
        ),
        (
            "shapes-of-a-recipe-believed",
            "if source is None or source.shape != origin.shape:",
            "if source is None:",
            "test_what_is_damaged_or_hostile_is_refused_and_the_version_fetched_whole[huge]",
        ),
        (
            "shapes-of-matrices-believed",
            "or (expected[::-1] if origin.is_transposed else expected) != origin.shape",
            "",
            "test_what_is_damaged_or_hostile_is_refused_and_the_version_fetched_whole[another module]",
        ),
        (
            "model-not-rounded-as-the-ranks-hold-it",
            "    if dtype != origin.held:\n",
            "    if False:\n",
            "test_every_node_of_a_chain_makes_the_weights_of_the_adapter[F32-BF16-F32]",
        ),
        (
            "released-weights-made-to-the-end",
            "                    if stop.is_set():\n",
            "                    if False:\n",
            "test_a_file_that_cannot_be_made_is_not_left",
        ),
    ),
    *of(
        "dora/weights/tensors.py",
        "tests/weights/test_merging.py",
        (
            "header-of-an-adapter-believed",
            "or end > size - 8 - length:",
            "or False:",
            "test_what_is_damaged_or_hostile_is_refused_and_the_version_fetched_whole[claimed size]",
        ),
    ),
    *of(
        "dora/node/spread.py",
        "tests/node/test_cluster.py",
        (
            "adapted-versions-with-deltas",
            "if (manifest := self._manifests.get(version)) is not None and has_recipe(manifest):",
            "if False:",
            "test_a_version_with_an_adapter_is_made_of_the_model_of_each_host_and_has_no_delta",
        ),
    ),
    *of(
        "dora/trainer/forward_check.py",
        "tests/trainer/test_adapters.py",
        (
            "idle-adapters-accepted",
            "    _require_effect(policy, expected)\n",
            "",
            "test_the_check_of_the_model_uses_an_adapter_that_has_an_effect_and_leaves_the_new_one",
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
