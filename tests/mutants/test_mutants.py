"""The table of mutations fits the present code, and the tests kill a sample of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutants.copied import ROOT, Copy, NotApplied, mutated
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS

#: Mutations with quick tests, of journal, lineage and access.
QUICK = ("journal-not-synced", "chain-without-waves", "run-folder-open-to-all")


def test_every_mutation_changes_exactly_one_place_of_the_present_code() -> None:
    problems = []
    for mutant in MUTANTS:
        try:
            mutated((ROOT / mutant.file).read_text(), mutant)
        except NotApplied as err:
            problems.append(str(err))
    assert problems == []


def test_every_mutation_has_a_name_of_its_own_and_tests_that_exist() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for node in {node for mutant in MUTANTS for node in mutant.killers}:
        path, _, name = node.partition("::")
        assert re.search(rf"^(async )?def {name.partition('[')[0]}\(", (ROOT / path).read_text(), re.M), node
    assert all(mutant.killers for mutant in MUTANTS)


@pytest.mark.parametrize("text", ["nothing of the kind", "old, and old again"])
def test_a_mutation_whose_text_is_not_there_once_is_refused(text: str) -> None:
    with pytest.raises(NotApplied, match="not once"):
        mutated(text, Mutant("m", "file.py", "old", "new", ("a::b",)))


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_some_mutations_are_noticed_by_their_tests(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    chosen = [mutant for mutant in MUTANTS if mutant.name in QUICK]
    clean = copy.test([node for mutant in chosen for node in mutant.killers])
    assert clean.code == 0, clean.tail
    for mutant in chosen:
        outcome = copy.run(mutant)
        assert outcome.killed, f"{mutant.name}: {outcome}\n{outcome.tail}"
