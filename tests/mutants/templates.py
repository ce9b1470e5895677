"""Mutations of chat templates, of the choice of a renderer, and of transcripts."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_PROCESS: Final = "dora/tasks/template_process.py"
_RENDERER: Final = "dora/environments/renderer.py"
_OF_TEMPLATE: Final = "tests/tasks/test_chat_template.py"
_OF_CHOICE: Final = "tests/environments/test_renderer_choice.py"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        _PROCESS,
        _OF_TEMPLATE,
        (
            "a template has no end of time",
            "signal.setitimer(signal.ITIMER_PROF, left_s)",
            "signal.setitimer(signal.ITIMER_PROF, 0)",
            "test_the_processor_time_of_many_prompts_is_bounded_as_well",
        ),
        (
            "a template may render any length",
            "if len(text) > max_characters(len(request)):",
            "if len(text) > 1 << 40:",
            "test_a_template_ends_with_one_line_that_names_its_file",
        ),
        (
            "each prompt has all the time",
            "left_s = min(MAX_CPU_S, signal.setitimer(signal.ITIMER_PROF, 0)[0] + CPU_S_PER_PROMPT)",
            "left_s = MAX_CPU_S",
            "test_the_processor_time_of_many_prompts_is_bounded_as_well",
        ),
    ),
    *of(
        _RENDERER,
        _OF_CHOICE,
        (
            "a probe that the template rejects is not compared",
            "if _by_family(candidate.renderer, probe) == wanted]",
            "if wanted in (None, _by_family(candidate.renderer, probe))]",
            "test_a_template_that_rejects_what_the_family_renders_is_refused",
        ),
        (
            "first prompts are not compared",
            "        if self._has_template and ids != self._by_template(messages, tools):",
            "        if not ids:",
            "test_a_first_prompt_that_no_probe_is_like_is_compared_with_the_template",
        ),
    ),
    *of(
        "dora/environments/renderer.py",
        "tests/environments/test_shapes.py",
        (
            "shapes-are-not-compared",
            "        if is_compared and ids != self._by_template(example, tools):",
            "        if not ids:",
            "test_a_shape_that_the_template_renders_differently_fails_the_episode",
        ),
        (
            "shapes-are-compared-each-time",
            "        self._known_shapes.update(pairs)\n",
            "",
            "test_a_shape_is_compared_once",
        ),
        (
            "text-may-be-left-out",
            "            return self.render(without, tools=tools) != self.render(messages, tools=tools)\n",
            "            return True\n",
            "test_a_message_whose_text_is_left_out_is_refused",
        ),
    ),
    *of(
        "dora/controller/samples.py",
        "tests/controller/test_samples.py",
        (
            "an observation is shown as a turn",
            "yield KeptPart(role, self._text(record, start, end), end, calls)",
            'yield KeptPart("policy", self._text(record, start, end), end, calls)',
            "test_an_episode_is_kept_by_its_turns_with_their_calls_and_what_was_observed",
        ),
    ),
)
