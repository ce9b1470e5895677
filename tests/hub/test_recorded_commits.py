"""A resume whose options name what the run was started with, as those of --continue do."""

from __future__ import annotations

import tomllib
from pathlib import Path

from dora.app.fetch import at_recorded_commits
from dora.config.changes import changes
from dora.config.load import dump, load
from dora.config.shorthand import Shorthand

COMMIT = "a" * 40
HELD_OUT = 'eval.sets=[{name="test", source={kind="datasets", path="o/data"}}]'
PINNED = [f"{key}={COMMIT}" for key in ("model.revision", "task.sources.0.revision", "eval.sets.0.source.revision")]


def test_what_is_named_again_has_the_commits_of_the_run_and_what_is_new_has_none(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("")
    given = [*Shorthand(model="o/model", data="o/data", reward="math").settings(job), HELD_OUT]
    began = load(job, [*given, *PINNED], environ={})
    again = load(tomllib.loads(dump(began)), given, environ={})
    assert [*changes(began, again)] != []
    assert [*changes(began, at_recorded_commits(again, began))] == []
    other = load(tomllib.loads(dump(began)), [*given, "model.path=o/other", "task.sources.0.path=o/more"], environ={})
    found = at_recorded_commits(other, began)
    assert (found.model.revision, found.task.sources[0].revision) == ("", "")
    assert found.eval.sets[0].source.revision == COMMIT
