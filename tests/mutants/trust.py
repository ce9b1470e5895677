"""Mutations of the rule about who may execute what a received folder names."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_TRUST = "tests/app/test_trust.py"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/app/resume.py",
        _TRUST,
        (
            "received-folders-are-executed",
            "    if not trust_folder:\n        require_trust(",
            "    if False:\n        require_trust(",
            "test_a_resume_of_a_received_folder_executes_nothing_until_it_is_trusted",
        ),
    ),
    *of(
        "dora/cli/track.py",
        _TRUST,
        (
            "trackers-of-received-folders-are-executed",
            "    if own and not to and not trust_folder:",
            "    if False:",
            "test_a_tracker_that_a_received_folder_names_is_executed_only_if_it_is_trusted",
        ),
    ),
    *of(
        "dora/journal/signature.py",
        _TRUST,
        (
            "signatures-fit-every-run",
            'b"%d:%s:%s" % (len(id), id, config)',
            'b"%d:%s:%s" % (0, b"", config)',
            "test_no_other_configuration_is",
        ),
        (
            "keys-that-others-may-read",
            "found.st_mode & 0o077 or ",
            "",
            "test_a_key_that_others_may_know_or_have_placed_is_refused",
        ),
    ),
    *of(
        "dora/app/trust.py",
        _TRUST,
        (
            "an-interpreter-is-not-said-to-be-executed",
            '"python", ',
            "",
            "test_whatever_a_configuration_has_executed_is_named",
        ),
    ),
    *of(
        "dora/app/opening.py",
        "tests/crash/test_trust.py",
        (
            "a-resume-signs-for-another-run",
            "run_id=job.recorded.run_id)",
            'run_id="")',
            "test_a_resume_signs_its_own_configuration",
        ),
    ),
)
