"""Mutations of how files of others are opened, what is made of them, and how their text is shown."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_HOSTILE: Final = "test_a_hostile_folder_ends_every_command_with_one_line"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/foreign.py",
        "tests/journal/test_foreign.py",
        (
            "a file of any size is read",
            "    if max(size, len(data)) > max_bytes:\n",
            "    if False:\n",
            "test_a_file_is_read_up_to_its_bound_and_not_beyond",
        ),
    ),
    *of(
        "dora/weights/store.py",
        "tests/weights/test_store.py",
        (
            "the folder of another user is swept",
            "            foreign.require_folder(root, owners={os.geteuid()})\n            with foreign",
            "            with foreign",
            "test_a_folder_of_another_user_is_not_touched",
        ),
    ),
    *of(
        "dora/weights/delta.py",
        "tests/weights/test_delta.py",
        (
            "a delta is decompressed to any length",
            "4 * num_gaps + 1)",
            "0)",
            "test_a_bomb_takes_no_more_memory_than_some_blocks",
        ),
        (
            "any base is written to before it is compared",
            "            _check(base, deltas, name)\n",
            "            pass\n",
            "test_a_wrong_base_of_any_file_is_refused_before_anything_is_written",
        ),
        (
            "a delta writes beside its folder",
            "    if not is_inside(name):",
            "    if False:",
            "test_a_name_that_leads_elsewhere_is_refused",
        ),
        (
            "a delta makes anything",
            "if (found := checksum_of(into / name)) != checksum:",
            "if False:",
            "test_a_result_that_is_not_the_new_version_is_refused",
        ),
    ),
    *of(
        "dora/cli/output.py",
        "tests/app/test_written_files.py",
        (
            "an output is written through a link",
            "    require_no_folder(path)\n    written = ",
            '    path.with_name(f".{path.name}").write_bytes(b"")\n    written = ',
            "test_a_link_beside_the_output_is_not_written_through",
        ),
        (
            "a device is replaced",
            "if _is_special(path):",
            "if False:",
            "test_a_pipe_in_place_of_the_output_is_written_into",
        ),
    ),
    *of(
        "dora/journal/run_folder.py",
        "tests/app/test_hostile_folders.py",
        ("a run folder is opened as it is", "        folder._require_own_kinds()\n", "", _HOSTILE),
    ),
    *of(
        "dora/journal/reader.py",
        "tests/app/test_hostile_folders.py",
        ("any settings are replayed", "if not header.settings.is_possible:", "if False:", _HOSTILE),
    ),
    *of(
        "dora/journal/audit_report.py",
        "tests/app/test_escapes.py",
        (
            "the audit prints what a journal says",
            '"\\n".join(map(one_line, [*lines, f"audit: {verdict}"]))',
            '"\\n".join([*lines, f"audit: {verdict}"])',
            "test_a_command_shows_text_of_a_run_folder_harmlessly",
        ),
    ),
    *of(
        "dora/log.py",
        "tests/app/test_escapes.py",
        (
            "tracebacks-of-processes-without-a-log-raw",
            'one_line(f"  | {line}")',
            'f"  | {line}"',
            "test_a_process_without_a_log_shows_a_traceback_harmlessly",
        ),
    ),
    *of(
        "dora/trainer/full_disk.py",
        "tests/app/test_escapes.py",
        (
            "errors-of-ranks-raw",
            'one_line(f"dora trainer: {line}")',
            'f"dora trainer: {line}"',
            "test_the_last_words_of_a_process_are_one_line",
        ),
    ),
    *of(
        "dora/status/metrics.py",
        "tests/status/test_endpoint.py",
        (
            "names-of-metrics-unchecked",
            "        if trainer_name(key).isascii() and trainer_name(key).isidentifier():\n",
            "        if True:\n",
            "test_no_text_of_others_makes_a_line_of_the_metrics",
        ),
    ),
)
