"""Mutations of layouts of stateful layers, position limits and kinds of models."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/model_config.py",
        "tests/app/test_inputs.py",
        (
            "limits-of-the-top-level-alone",
            "    return config.get_text_config(decoder=True)",
            "    return config",
            "test_positions_are_read_as_transformers_reads_them",
        ),
        (
            "rope-of-one-kind-of-layer-overlooked",
            '            pending += [(f"{place}.{name}", value) for name, value in rope.items()]\n',
            "",
            "test_a_dynamic_rope_is_found_wherever_it_stands",
        ),
    ),
    *of(
        "dora/model_files.py",
        "tests/app/test_hostile_models.py",
        (
            "links-out-of-a-model-folder-followed",
            "        if path.is_symlink() and not any(",
            "        if path.name == 'config.json' and not any(",
            "test_a_link_to_a_file_that_is_none_of_a_model_leads_out_too",
        ),
        (
            "index-may-lead-elsewhere",
            "        if Path(file).name != file or not",
            "        if not",
            "test_an_index_that_is_none_or_leads_elsewhere",
        ),
    ),
    *of(
        "dora/trainer/model.py",
        "tests/trainer/test_kinds.py",
        (
            "encoders-left-to-the-tolerance",
            "    if kind in ENCODERS or config.is_encoder_decoder:",
            "    if config.is_encoder_decoder:",
            "test_encoders_are_refused_by_their_kind",
        ),
        (
            "buffers-always-in-float32",
            "    model = build_on_meta(config, dtype)\n    planned",
            "    model = build_on_meta(config, torch.float32)\n    planned",
            "test_buffers_compute_in_16_bits_and_are_published_as_they_were_read",
        ),
    ),
    *of(
        "dora/trainer/parts.py",
        "tests/trainer/test_kinds.py",
        (
            "untrained-tensors-get-the-published-type",
            "tensor.to(self._dtype) if name in self._policy.dequantised else tensor",
            "tensor.to(self._dtype)",
            "test_the_tensors_of_a_vision_part_are_published_bit_for_bit",
        ),
    ),
    *of(
        "dora/trainer/layouts.py",
        "tests/trainer/test_layouts.py",
        (
            "marks-of-stateful-families-ignored",
            'getattr(module, "_is_stateful", False)',
            "False",
            "test_a_family_carries_state_if_its_tokens_reach_each_other_without_attention[xlstm]",
        ),
        (
            "convolutions-taken-for-attention",
            "isinstance(module, nn.Conv1d)",
            "False",
            "test_a_convolution_is_a_sign_where_transformers_does_not_mark_the_family",
        ),
        (
            "places-for-state-in-the-cache-ignored",
            "isinstance(layer, LinearAttentionCacheLayerMixin)",
            "False",
            "test_a_family_carries_state_if_its_tokens_reach_each_other_without_attention[minimax]",
        ),
    ),
    *of(
        "dora/trainer/forward_check.py",
        "tests/trainer/test_forward_check.py",
        (
            "operands-that-do-not-fit-raw",
            '("dtype", "scalar type", "size", "shape")',
            '("dtype", "scalar type")',
            "test_a_configuration_with_which_transformers_itself_cannot_compute_is_refused_in_one_line",
        ),
    ),
    *of(
        "dora/trainer/forward_check.py",
        "tests/trainer/test_check_again.py",
        (
            "leak-between-sequences-not-measured",
            "        if leak <= LEAK:\n",
            "        if True:\n",
            "test_a_leak_of_a_hundredth_is_found_in_bfloat16_and_nothing_without_it[lfm2-12]",
        ),
        (
            "no-sequence-follows-a-changed-one",
            "for n in order[::2]]",
            "for n in order[1::2]]",
            "test_a_leak_of_a_hundredth_is_found_in_bfloat16_and_nothing_without_it[lfm2-0]",
        ),
        (
            "failed-repeated-check-forgotten",
            "    if problem:\n        raise RunFailed(",
            "    if False:\n        raise RunFailed(",
            "test_trained_weights_are_checked_again_without_a_change_and_a_leak_ends_the_run[bfloat16]",
        ),
    ),
    *of(
        "dora/trainer/step.py",
        "tests/trainer/test_check_again.py",
        (
            "trained-weights-not-checked-at-a-resume",
            '        self._check_again(f"the weights of the checkpoint of step {self._step}")\n',
            "",
            "test_ranks_end_the_run_at_a_leak_and_neither_publish_nor_save_nor_resume_such_weights",
        ),
    ),
    *of(
        "dora/trainer/check_rows.py",
        "tests/trainer/test_forward_check.py",
        (
            "no-sequence-beyond-the-thresholds",
            "if max(LENGTHS) <= limit < longest}",
            "if False}",
            "test_a_rope_of_one_kind_of_layers_that_depends_on_the_row_is_refused_if_a_sequence_can_be_so_long",
        ),
    ),
    *of(
        "dora/model_config.py",
        "tests/trainer/test_thresholds.py",
        (
            "longrope-overlooked",
            'if rope["rope_type"] == "longrope"]',
            'if rope["rope_type"] == "yarn"]',
            "test_longrope_is_found_in_the_one_embedding_and_in_that_of_a_kind_of_layer",
        ),
    ),
)
