"""Mutations of adapters in the embedded engine and in its client."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_ALONE: Final = "test_every_row_has_the_logprobs_of_its_adapter_alone[llama]"
_OVERFLOW: Final = "test_an_adapter_that_overflows_ends_its_own_row_alone_and_leaves_its_slot_usable"
_REFUSED: Final = "test_a_folder_that_cannot_be_served_is_refused_in_one_line"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/embedded/adapter_stack.py",
        "tests/embedded/test_adapter_stack.py",
        ("rows-get-all-adapters", ".masked_fill_(self.others, 0.0)", "", _ALONE),
        ("other-adapters-multiplied-by-zero", ".masked_fill_(self.others, 0.0)", ".mul_(~self.others)", _OVERFLOW),
        ("served-without-the-scale", "scale=found.lora_alpha / found.r", "scale=1.0", _ALONE),
        (
            "rest-of-the-adapter-before-kept",
            "            mine.zero_()\n",
            "",
            "test_an_adapter_of_a_smaller_rank_or_of_fewer_targets_leaves_nothing_of_the_one_before",
        ),
        (
            "copies-kept-after-a-load",
            "        self._copied = []\n        for mine",
            "        for mine",
            "test_a_place_that_is_loaded_again_has_the_new_adapter_whatever_others_run_beside_it",
        ),
        ("infinite-matrices-served", "    if not matrix.isfinite().all():", "    if False:", _REFUSED),
        (
            "further-tensors-ignored",
            "    if extra := sorted(stored.keys() - expected):",
            "    if extra := []:",
            _REFUSED,
        ),
        ("other-shapes-not-noticed", "    if stored.shape != shape or", "    if", _REFUSED),
    ),
    *of(
        "dora/embedded/decoder.py",
        "tests/embedded/test_adapter_stack.py",
        ("prompts-without-the-adapter", "        self._aim_adapters(rows)\n", "", _ALONE),
        ("tokens-without-the-adapter", "        self._aim_adapters(slice(0, live))\n", "", _ALONE),
        (
            "nan-kept-where-the-last-row-was",
            "            self._cache.forget(last, length=self._lengths[last])\n",
            "",
            _OVERFLOW,
        ),
    ),
    *of(
        "dora/embedded/slots.py",
        "tests/embedded/test_adapter_stack.py",
        ("nan-kept-in-a-row", "            used.zero_()\n", "            pass\n", _OVERFLOW),
    ),
    *of(
        "dora/embedded/self_check.py",
        "tests/embedded/test_adapter_stack.py",
        (
            "adapters-not-checked-at-the-start",
            "        _compare(model, _served(decoder, list(zip(prompts, places, strict=False))), adapters)\n",
            "        _served(decoder, list(zip(prompts, places, strict=False)))\n",
            "test_the_check_at_the_start_finds_rows_that_get_the_adapter_of_another",
        ),
        (
            "modules-that-are-not-called-not-noticed",
            "    if missed := sorted(modules.keys() - called):",
            "    if missed := []:",
            "test_a_weight_that_is_used_without_its_module_is_found_at_the_start",
        ),
    ),
    *of(
        "dora/embedded/generation.py",
        "tests/embedded/test_adapters.py",
        (
            "prefixes-of-an-earlier-load-found",
            "{0 if self.adapter is None else self.adapter.number}",
            "{0 if self.adapter is None else self.adapter.name}",
            "test_a_name_that_is_loaded_again_reads_no_kv_of_the_earlier_load",
        ),
    ),
    *of(
        "dora/embedded/adapters.py",
        "tests/embedded/test_adapters.py",
        (
            "unload-under-running-requests",
            "            await self._batcher.released(adapter)\n",
            "",
            "test_an_unload_waits_for_the_requests_of_its_adapter_alone_and_a_load_waits_for_it",
        ),
        (
            "load-beside-an-unload",
            "        places = self._places()\n        async with self._changing:\n",
            "        places = self._places()\n        if True:\n",
            "test_an_unload_waits_for_the_requests_of_its_adapter_alone_and_a_load_waits_for_it",
        ),
        (
            "unload-ends-with-its-caller",
            "await asyncio.shield(running)",
            "await running",
            "test_an_unload_ends_even_if_its_caller_has_gone",
        ),
        (
            "unloaded-names-forgotten",
            "            self._paths[name] = path\n",
            "",
            "test_a_name_that_was_unloaded_is_loaded_again_from_its_folder",
        ),
    ),
    *of(
        "dora/engine/sglang/client.py",
        "tests/engine/test_adapter_calls.py",
        (
            "adapter-not-asked-for",
            '            body["lora_path"] = request.adapter\n',
            "            pass\n",
            "test_a_request_has_the_name_of_its_adapter_only_if_it_has_one",
        ),
        (
            "load-of-an-adapter-repeated",
            "attempts=1, accept=(200, 400)",
            "accept=(200, 400)",
            "test_a_change_whose_answer_is_lost_is_not_repeated_and_not_called_refused",
        ),
    ),
    *of(
        "dora/engine/sglang/adapters.py",
        "tests/engine/test_adapter_calls.py",
        (
            "requests-without-an-adapter-not-counted",
            "info.max_loras_per_batch <= needs.count",
            "info.max_loras_per_batch < needs.count",
            "test_a_server_without_room_is_refused_with_the_flags_that_it_lacks",
        ),
    ),
    *of(
        "dora/engine/sglang/adapters.py",
        "tests/engine/test_proofs.py",
        (
            "adapter-not-proved-after-its-load",
            "            await _prove(client, url, name=name, proof=proof, timeout_s=timeout_s)\n",
            "",
            "test_an_adapter_with_other_values_is_refused_as_it_is_loaded",
        ),
        (
            "adapter-not-proved-before-its-unload",
            "        await _prove(client, url, name=name, proof=proof, timeout_s=timeout_s)\n    try:",
            "        pass\n    try:",
            "test_an_adapter_that_was_replaced_under_its_name_is_found_before_it_goes",
        ),
        (
            "proof-of-the-weights-without-the-adapter",
            "timeout_s=timeout_s, adapter=name)",
            "timeout_s=timeout_s)",
            "test_an_adapter_is_served_once_it_has_proved_itself",
        ),
        (
            "adapters-of-others-unloaded",
            "if not name.startswith(ADAPTER_PREFIX)]:",
            "if False]:",
            "test_the_adapters_of_an_earlier_controller_are_unloaded_and_those_of_others_stay",
        ),
    ),
    *of(
        "dora/controller/effects.py",
        "tests/controller/test_effects.py",
        (
            "proof-read-where-servers-have-the-version",
            "await holders.own_folder(version) / ADAPTER",
            "await holders.folder(InstanceId(0), version) / ADAPTER",
            "test_a_server_reads_an_adapter_where_its_host_has_it_and_is_compared_with_the_proof_here",
        ),
        (
            "adapter-not-proved-when-it-goes",
            "proof = await _proof(self.holders, order.version) if was_confirmed else None",
            "proof = None",
            "test_an_adapter_that_computes_otherwise_is_disproved_and_then_unloaded_as_it_is",
        ),
        (
            "disproved-adapter-never-unloaded",
            "del self.served.loaded[order.instance, order.version]",
            "pass",
            "test_an_adapter_that_computes_otherwise_is_disproved_and_then_unloaded_as_it_is",
        ),
    ),
    *of(
        "dora/trainer/parts.py",
        "tests/trainer/test_adapters.py",
        (
            "adapter-alone-without-a-recipe",
            "serves_adapters and self._has_recipe()",
            "serves_adapters",
            "test_weights_that_are_computed_in_other_ways_are_not_made_on_nodes[FP8]",
        ),
        (
            "weights-beside-adapters-that-are-served",
            "serves_adapters and self._has_recipe()",
            "False",
            "test_weights_are_made_of_a_version_that_is_its_adapter_alone[qwen3-float32]",
        ),
    ),
    *of(
        "dora/trainer/probe.py",
        "tests/trainer/test_adapters.py",
        (
            "probe-of-the-present-adapter",
            "        adapters.read(self._folder(version) / ADAPTER, rank=rank)\n",
            "        self._folder(version)\n",
            "test_the_probe_uses_the_adapter_of_a_version",
        ),
    ),
    *of(
        "dora/weights/merging.py",
        "tests/trainer/test_adapters.py",
        (
            "weights-made-of-any-model",
            "    if checksums_of_model(model) != recipe.model:",
            "    if False:",
            "test_weights_are_made_of_a_version_that_is_its_adapter_alone[qwen3-float32]",
        ),
    ),
)
