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
            "            pending += rope.values()\n",
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
        "dora/trainer/publish.py",
        "tests/trainer/test_kinds.py",
        (
            "untrained-tensors-get-the-published-type",
            "kept[name] = tensor.to(getattr(torch, dtype)) if name in policy.dequantised else tensor",
            "kept[name] = tensor.to(getattr(torch, dtype))",
            "test_the_tensors_of_a_vision_part_are_published_bit_for_bit",
        ),
    ),
)
