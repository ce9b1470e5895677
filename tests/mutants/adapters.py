"""Mutations of adapters."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/trainer/adapters.py",
        "tests/trainer/test_adapters.py",
        (
            "reference-left-as-it-was-allocated",
            "into=(TRAINED, REFERENCE))",
            "into=(TRAINED,))",
            "test_the_reference_of_what_begins_with_an_adapter_is_that_adapter",
        ),
        (
            "first-adapter-drawn-in-place-of-the-folder",
            "        if not self.settings.begins_with:\n            self.draw",
            "        if True:\n            self.draw",
            "test_one_rank_trains_and_publishes_what_a_plain_loop_over_peft_does[gpt2-True]",
        ),
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
            "test_one_rank_trains_and_publishes_what_a_plain_loop_over_peft_does[qwen3-False]",
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
        "dora/adapted_modules.py",
        "tests/trainer/test_adapters.py",
        (
            "shared-weights-adapted-twice",
            "        if chosen & shared:\n",
            "        if False:\n",
            "test_a_target_that_cannot_be_adapted_is_refused",
        ),
    ),
    *of(
        "dora/trainer/parts.py",
        "tests/trainer/test_adapters.py",
        (
            "recipe-for-dequantised-weights",
            "if self._policy.adapters is None or self._policy.dequantised:",
            "if self._policy.adapters is None:",
            "test_weights_that_are_computed_in_other_ways_are_not_made_on_nodes[FP8]",
        ),
    ),
    *of(
        "dora/weights/merging.py",
        "tests/weights/test_merging.py",
        (
            "made-weights-not-compared",
            "if self._checksums and checksum_of(path) != self._checksums[name]:",
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
            "test_the_check_of_the_model_uses_an_adapter_that_has_an_effect_and_leaves_the_first_one",
        ),
    ),
    *of(
        "dora/trainer/model.py",
        "tests/trainer/test_adapters.py",
        (
            "trial-adapter-kept-after-the-check",
            "            shard.copy_(before[name])\n",
            "            pass\n",
            "test_the_check_of_the_model_uses_an_adapter_that_has_an_effect_and_leaves_the_first_one",
        ),
    ),
    *of(
        "dora/trainer/copies.py",
        "tests/trainer/test_adapters.py",
        (
            "reference-without-the-first-adapter",
            "REFERENCE if adapters.settings.begins_with else None",
            "None",
            "test_one_rank_trains_and_publishes_what_a_plain_loop_over_peft_does[gpt2-True]",
        ),
        (
            "reference-is-the-trained-adapter",
            "REFERENCE if adapters.settings.begins_with else None",
            "'default' if adapters.settings.begins_with else None",
            "test_one_rank_trains_and_publishes_what_a_plain_loop_over_peft_does[gpt2-True]",
        ),
    ),
    *of(
        "dora/trainer/stored_adapter.py",
        "tests/trainer/test_adapters.py",
        (
            "missing-matrices-accepted",
            "        if missing := sorted(shapes.keys() - found):\n",
            "        if missing := []:\n",
            "test_values_that_do_not_fit_are_refused_by_name",
        ),
        (
            "other-matrices-ignored",
            "        if extra := sorted(found - shapes.keys()):\n",
            "        if extra := []:\n",
            "test_values_that_do_not_fit_are_refused_by_name",
        ),
        (
            "values-that-are-no-numbers-trained",
            "        if not math.isfinite(found.float().abs().amax()):",
            "        if False:",
            "test_values_that_do_not_fit_are_refused_by_name",
        ),
    ),
    *of(
        "dora/adapter_files.py",
        "tests/app/test_adapter_files.py",
        (
            "other-scales-accepted",
            '        problems.append(\n            f"trainer.lora.alpha',
            '        _ = (\n            f"trainer.lora.alpha',
            "test_each_difference_is_a_line_that_says_what_to_set",
        ),
        (
            "settings-compared-in-place-of-scales",
            "_divisor(found.r, rslora=found.use_rslora)",
            "_divisor(found.r, rslora=rslora)",
            "test_effective_scales_are_compared_not_settings",
        ),
        (
            "unknown-settings-of-peft-ignored",
            "        if key not in _KNOWN and value and",
            "        if key in UNSUPPORTED and value and",
            "test_other_configurations_are_refused",
        ),
    ),
    *of(
        "dora/app/inputs.py",
        "tests/app/test_adapter_files.py",
        (
            "adapter-not-in-the-lineage",
            'digest + (adapter_digest(inputs.adapter) if inputs.adapter is not None else "")',
            "digest",
            "test_its_files_are_part_of_what_training_starts_from",
        ),
    ),
    *of(
        "dora/app/prepare.py",
        "tests/app/test_adapter_files.py",
        (
            "adapter-forgotten-without-a-trainer",
            "    if rollout_only and inputs.adapter is not None:\n",
            "    if False:\n",
            "test_without_a_trainer_nothing_would_add_it_to_the_weights",
        ),
    ),
    *of(
        "dora/trainer/trial.py",
        "tests/app/test_trainer_check.py",
        (
            "check-compares-the-adapter-with-servers-of-the-model",
            "        with self._policy.without_adapter():\n",
            "        if True:\n",
            "test_the_log_probs_compared_with_servers_are_those_of_the_model_without_the_adapter",
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
    *of(
        "dora/trainer/model.py",
        "tests/trainer/test_adapters.py",
        (
            "adapters-of-hosts-not-compared",
            "if len({*gather_bytes(together(fill, device=self.device), device=self.device)}) > 1:",
            "if not gather_bytes(together(fill, device=self.device), device=self.device):",
            "test_steps_from_checkpoints_of_other_ranks_are_the_same",
        ),
    ),
    *of(
        "dora/app/resume.py",
        "tests/crash/test_trust.py",
        (
            "resumed-with-another-adapter",
            'trainer.optimizer_state == "8bit", trainer.lora',
            'trainer.optimizer_state == "8bit", LoraConfig()',
            "test_an_adapter_of_other_settings_is_refused_even_if_accepted",
        ),
    ),
)
