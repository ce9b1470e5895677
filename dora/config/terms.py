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
    for name, label in labels.items():
        if terms and not any(term.applies_to(label) for term in terms):
            what = f"the label '{label}'" if label else "no label"
            yield f"{name}: it has {what}, and no term of {field} scores its answers; add the label to a term's sources"
