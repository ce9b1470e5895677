"""Prefix cache: finds computed prompt prefixes by their tokens and namespace.

It holds opaque payloads (the decoder's KV of a whole prompt) in two generations, young and old. Entries are put into
the young generation. When that would exceed its budget, it becomes the old generation, and the previous old generation
is dropped. A hit in the old generation is copied to the young one, so entries that were not used lately are dropped
first. Invariant: a payload found at depth d was computed for a prompt with the same namespace and the same first d
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Payload = TypeVar("Payload")


@dataclass(slots=True)
class _Node(Generic[Payload]):
    token_ids: Sequence[int]  # tokens of the first prompt that passed through this node
    payload: Payload
    children: dict[int, _Node[Payload]] = field(default_factory=dict)


class _Generation(Generic[Payload]):
    """One trie per namespace; a node refers to the first payload that passed through it."""

    def __init__(self) -> None:
        self.tokens = 0
        self.entries = 0
        self.roots: dict[str, dict[int, _Node[Payload]]] = {}

    def put(self, namespace: str, token_ids: Sequence[int], payload: Payload) -> None:
        children = self.roots.setdefault(namespace, {})
        for token in token_ids:
            node = children.get(token)
            if node is None:
                node = children[token] = _Node(token_ids, payload)
            children = node.children
        self.tokens += len(token_ids)
        self.entries += 1

    def match(self, namespace: str, token_ids: Sequence[int]) -> tuple[int, _Node[Payload] | None]:
        children, depth, deepest = self.roots.get(namespace, {}), 0, None
        for token in token_ids:
            node = children.get(token)
            if node is None:
                break
            children, deepest = node.children, node
            depth += 1
        return depth, deepest


class PrefixCache(Generic[Payload]):
    def __init__(self, *, budget_tokens: int, budget_entries: int) -> None:
        """Both are of each generation; the size of an entry may depend little on its tokens."""
        self._budget_tokens, self._budget_entries = budget_tokens, budget_entries
        self.clear()

    def clear(self) -> None:
        self._young: _Generation[Payload] = _Generation()
        self._old: _Generation[Payload] = _Generation()

    @property
    def tokens(self) -> int:
        return self._young.tokens + self._old.tokens

    def match(self, namespace: str, token_ids: Sequence[int]) -> tuple[int, Payload | None]:
        """Return the length of the longest cached prefix of `token_ids`, and a payload that covers at least that."""
        depth, node = self._young.match(namespace, token_ids)
        if depth < len(token_ids):
            old_depth, old_node = self._old.match(namespace, token_ids)
            if old_depth > depth and old_node is not None:
                self.put(namespace, old_node.token_ids, old_node.payload)
                depth, node = old_depth, old_node
        return depth, node.payload if node is not None else None

    def put(self, namespace: str, token_ids: Sequence[int], payload: Payload) -> None:
        if len(token_ids) > self._budget_tokens:
            return
        young = self._young
        if young.tokens + len(token_ids) > self._budget_tokens or young.entries >= self._budget_entries:
            self._old, self._young = self._young, _Generation()
        self._young.put(namespace, token_ids, payload)
