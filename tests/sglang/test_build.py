"""The environment of the real server: built once, by one builder, and never left half built. The recipe here needs no
network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sglang.conftest import LAUNCH, launch_module

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]  # making a virtual environment takes seconds when quiet

BUILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from build import build
print(build(Path(sys.argv[2]), proof=sys.argv[3]))
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DORA_SGLANG_CPU", str(tmp_path / "cache"))
    monkeypatch.delenv("DORA_SGLANG_RELEASE", raising=False)
    folder = tmp_path / "recipe"
    (folder / "shims").mkdir(parents=True)
    (folder / "requirements.txt").write_text("# nothing\n")
    (folder / "requirements-nodeps.txt").write_text("# nothing\n")
    (folder / "shims" / "shim.py").write_text("VALUE = 1\n")
    return folder


def test_another_pin_or_another_shim_is_another_environment(recipe: Path) -> None:
    build = launch_module("build")
    folders = {build.environment_folder(recipe)}
    (recipe / "shims" / "shim.py").write_text("VALUE = 2\n")
    folders.add(build.environment_folder(recipe))
    (recipe / "requirements-nodeps.txt").write_text("# other\n")
    folders.add(build.environment_folder(recipe))
    assert len(folders) == 3
    assert {folder.parent for folder in folders} == {recipe.parent / "cache"}


def test_a_half_built_environment_is_built_anew_and_one_without_its_proof_is_not_built(recipe: Path) -> None:
    build = launch_module("build")
    folder = build.environment_folder(recipe)
    folder.mkdir(parents=True)
    (folder / "left-over").touch()
    with pytest.raises(SystemExit, match="failed with exit code 1"):
        build.build(recipe, proof="import no_such_module")
    assert (folder / "bin").exists()
    assert not (folder / "left-over").exists()
    assert not build.is_built(folder)


def test_of_two_builders_at_once_one_builds_and_both_and_later_ones_get_the_folder(
    recipe: Path, tmp_path: Path
) -> None:
    build = launch_module("build")
    folder = build.environment_folder(recipe)
    proof = f"import shim; open({str(tmp_path / 'proofs')!r}, 'a').write(str(shim.VALUE))"
    command = [sys.executable, "-c", BUILD, str(LAUNCH), str(recipe), proof]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [builder.communicate(timeout=250) for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0], answers
    assert {out for out, _ in answers} == {f"{folder}\n"}
    assert (tmp_path / "proofs").read_text() == "1"
    assert build.is_built(folder)
    assert build.build(recipe, proof="import no_such_module") == folder
