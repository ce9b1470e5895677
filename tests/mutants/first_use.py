"""Mutations of what a user meets first: models and data of the hub, options without a file, scores, runs in Python."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_ASKING = "tests/hub/test_asking.py"
_RUN = "tests/python/test_run.py"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/hub.py",
        _ASKING,
        (
            "a-commit-that-is-here-asked-for-again",
            "found = _kept(repo, is_listed=not _is_offline()) if repo.is_pinned or _is_offline() else None",
            "found = _kept(repo) if _is_offline() else None",
            "test_nothing_is_asked_of_a_commit_that_is_here",
        ),
        (
            "names-of-the-hub-trusted",
            'if path.is_absolute() or ".." in path.parts or "\\0" in name:',
            "if False:",
            "test_the_hub_cannot_name_files_outside_of_its_folder",
        ),
        (
            "no-disk-of-our-own-to-blame",
            "    if _of_disk(err):\n",
            "    if False:\n",
            "test_a_full_disk_is_one_line_and_what_was_complete_is_kept",
        ),
    ),
    *of(
        "dora/model_config.py",
        "tests/app/test_model_limits.py",
        (
            "limits-of-other-files-kept",
            '    if "configuration_files" in read_config(folder):',
            "    if False:",
            "test_a_configuration_that_names_other_files_is_asked_every_time",
        ),
        (
            "limits-of-another-release-believed",
            "b' '.join([*releases, config])",
            "config",
            "test_a_changed_configuration_or_another_release_is_asked_anew",
        ),
    ),
    *of(
        "dora/app/fetch.py",
        _ASKING,
        (
            "all-files-of-a-model-downloaded",
            "    names = used_names(snapshot.folder, sizes, field=repo.field)\n",
            "    names = [*sizes]\n",
            "test_only_what_is_used_is_downloaded",
        ),
        (
            "data-fetched-by-a-node",
            "        for repo in _models(config):\n            one = _of_model(hub.open(repo), hub)\n",
            "        _look(config, hub)\n        for repo in _models(config):\n"
            "            one = _of_model(hub.open(repo), hub)\n",
            "test_a_node_fetches_the_models_alone_and_a_plan_for_gpus_only_their_small_files",
        ),
    ),
    *of(
        "dora/tasks/data_sets.py",
        _ASKING,
        (
            "any-reader-of-the-package",
            '.rpartition(".")[2]) not in _READERS:',
            '.rpartition(".")[2]) == "":',
            "test_what_the_hub_refuses_is_said_in_one_line_each",
        ),
        (
            "a-card-may-name-any-file",
            "    _require_own_files(outline, shown=shown)\n",
            "",
            "test_what_the_hub_refuses_is_said_in_one_line_each",
        ),
    ),
    *of(
        "dora/tasks/sources.py",
        "tests/tasks/test_unreadable_rows.py",
        (
            "one-row-in-ten-may-be-unreadable",
            "    if 100 * len(unreadable) > of:",
            "    if 10 * len(unreadable) > of:",
            "test_more_are_refused_with_the_first_and_their_number",
        ),
    ),
    *of(
        "dora/config/shorthand.py",
        "tests/config/test_shorthand.py",
        (
            "the-revision-of-another-model-kept",
            "                yield 'model.revision=\"\"'  # the file's is that of another model\n",
            "                pass\n",
            "test_an_option_for_one_of_several_is_refused",
        ),
    ),
    *of(
        "dora/controller/evaluations.py",
        "tests/controller/test_evaluations.py",
        (
            "samples-of-a-prompt-share-a-key",
            "{self.sets[s].prompts[p].position} {number}",
            "{self.sets[s].prompts[p].position}",
            "test_a_sample_has_the_same_key_under_every_version_and_beside_other_sets_and_samples",
        ),
    ),
    *of(
        "dora/app/held_out.py",
        "tests/app/test_evaluate.py",
        (
            "failed-answers-count-as-zero",
            "    graded = [[reward for reward in one if reward is not None] for one in rewards]\n",
            "    graded = [[reward or 0.0 for reward in one] for one in rewards]\n",
            "test_failures_are_left_out_of_every_score_and_counted_by_cause",
        ),
    ),
    *of(
        "dora/observe/estimates.py",
        "tests/observe/test_estimates.py",
        (
            "answers-resampled-one-by-one",
            "    return _bootstrap(np.array([sum(one) for one in known]), np.array([len(one) for one in known]))\n",
            "    flat = np.array([reward for one in known for reward in one])\n"
            "    return _bootstrap(flat, np.ones(len(flat)))\n",
            "test_answers_to_one_prompt_are_not_independent",
        ),
    ),
    *of(
        "dora/node/holder.py",
        _RUN,
        (
            "any-process-of-that-number",
            "is_same = abs(_started(pid) - started) <= _SAME_START_S",
            "is_same = True",
            "test_a_process_with_the_same_number_that_began_later_is_another",
        ),
        (
            "any-process-that-a-lock-names",
            " and _works_on(found, lock):",
            ":",
            "test_a_lock_cannot_have_a_process_signaled_that_has_nothing_to_do_with_the_run",
        ),
    ),
    *of(
        "dora/jobs/start.py",
        _RUN,
        (
            "in-the-session-of-the-notebook",
            "            setsid=True,\n",
            "",
            "test_a_started_process_heeds_sigint_although_its_parent_ignores_it_and_leads_a_session",
        ),
        (
            "sigint-ignored-as-by-the-kernel",
            "            setsigdef=[signal.SIGINT],\n",
            "",
            "test_a_started_process_heeds_sigint_although_its_parent_ignores_it_and_leads_a_session",
        ),
    ),
    *of(
        "dora/jobs/html.py",
        _RUN,
        (
            "a-run-s-sentence-as-markup",
            "<div><p>{escape(sentence)}</p>",
            "<div><p>{sentence}</p>",
            "test_text_of_a_run_cannot_become_markup_in_a_notebook",
        ),
    ),
    *of(
        "dora/jobs/settings.py",
        "tests/python/test_settings.py",
        (
            "a-function-of-the-notebook-passed-on",
            '    if module == "__main__":\n        raise ConfigError(f"{key}: {in_main(name)}")\n',
            "",
            "test_a_function_of_a_notebook_is_refused_with_how_to_move_it",
        ),
    ),
)
