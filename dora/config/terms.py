"""Contradictions between the terms of a reward, the sources that they score, and the token budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dora.config.schema import RewardConfig


def term_problems(
    field: str, terms: Sequence[RewardConfig], *, labels: Mapping[str, str], budget: int
) -> Iterator[str]:
    """Yield a line for each problem. `labels`: configuration field of each source whose answers are scored -> its
    label. `budget`: maximum number of tokens of an answer."""
    known = sorted({label for label in labels.values() if label})
    for index, term in enumerate(terms):
        for label in term.sources:
            if label not in known:
                those = f"labels are {', '.join(known)}" if known else "no source has a label"
                yield f"{field}.{index}.sources: no source is labelled '{label}'; {those}"
        if term.kind == "overlong" and not 1 <= term.buffer <= budget:
            yield (
                f"{field}.{index}.buffer: {term.buffer} tokens; overlong needs 1 to {budget} (rollout.max_new_tokens)"
            )
        yield from _judge_problems(f"{field}.{index}", term)
    for name, label in labels.items():
        if terms and not any(term.applies_to(label) for term in terms):
            what = f"the label '{label}'" if label else "no label"
            yield f"{name}: it has {what}, and no term of {field} scores its answers; add the label to a term's sources"


def _judge_problems(field: str, term: RewardConfig) -> Iterator[str]:
    if term.kind != "judge":
        return
    if not term.url.startswith(("http://", "https://")):
        yield f"{field}.url: {term.url!r} is not the http:// or https:// address of a judge's API"
    if not term.name:
        yield f"{field}.name: a judge needs the name of its model"
    if term.template and not any(name in term.template for name in ("{response}", "{turns}")):
        yield f"{field}.template: it has neither {{response}} nor {{turns}}, so that the judge would not see the answer"
    for key in ("messages", "model", "stream", "n"):
        if key in term.options:
            yield f"{field}.options: {key} is not for you to set; remove it"
