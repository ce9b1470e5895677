"""Which node has which place in a run; a function of who asks, when, and who is there.

The first places have ranks, the others roll out. A new run gives them in the order of names, once all nodes are there;
later, those with ranks come first, since training waits for them.
Invariant: a node that comes back gets its old place; another one gets it only when that node is lost, or has not come
back to a resumed run in time; and the numbers of instances that have left are not given again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Final, NamedTuple, overload

from msgspec import Meta

from dora.config.schema import MAX_NODES, Config
from dora.core.ids import InstanceId
from dora.node.place import Place

#: Time for which a new run waits for all nodes, before it gives places to those that are there.
GATHER_S: Final = 30.0
#: Time for which a node asks for a name or a place that another one has, before it is rejected: the other one may be
#: lost already.
TAKEN_S: Final = 30.0
#: Time that nodes of an earlier start have to come back before others may take their places.
COME_BACK_S: Final = 15.0


#: What a name may be: it is shown, and a key in a file of the run.
NODE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
#: More than the numbers that instances get in any run.
MAX_INSTANCE: Final = 1 << 24


class KnownNode(NamedTuple):
    """A node that has joined the run, as its folder records it."""

    place: Annotated[int, Meta(ge=0, lt=MAX_NODES)]
    first_instance: Annotated[int, Meta(ge=0, lt=MAX_INSTANCE)] | None
    servers: Annotated[int, Meta(ge=1, lt=MAX_INSTANCE)]


Known = Mapping[str, KnownNode]


class Places(Sequence[Place]):
    """All places of a run, by number."""

    def __init__(self, config: Config, *, known: Known, removed: Collection[InstanceId], now: float) -> None:
        """`known`: nodes of earlier starts. `removed`: instances that have left. Times are in seconds, by one clock."""
        self._config = config
        self._known = known
        self._removed = removed
        self._began = now
        self._asked: dict[str, dict[bytes, float]] = {}  # name -> processes of that name -> when they first asked
        self._places: list[Place] = []
        for number in range(config.nodes.expected):
            self._add().first_instance = self._first_instance(number)
        for name, node in known.items():
            while len(self._places) <= node.place:
                self._add()
            self._places[node.place].name, self._places[node.place].first_instance = name, node.first_instance

    @overload
    def __getitem__(self, number: int) -> Place: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Place]: ...

    def __getitem__(self, number: int | slice) -> Place | Sequence[Place]:
        return self._places[number]

    def __len__(self) -> int:
        return len(self._places)

    def _add(self) -> Place:
        number = len(self._places)
        self._places.append(place := Place(number, has_ranks=number < self._config.num_training_nodes))
        return place

    def _first_instance(self, number: int) -> int | None:
        """Return the first instance of a place that the run begins with."""
        config = self._config
        rolling = number - config.num_training_nodes
        first = InstanceId(len(config.engine.urls) + rolling // config.nodes_of_server * config.servers_of_node)
        return first if rolling >= 0 and first not in self._removed else None

    def known(self) -> Known:
        """Return the nodes that have a place, for a later start."""
        each = self._config.servers_of_node
        return {place.name: KnownNode(place.number, place.first_instance, each) for place in self if place.name}

    def group_of(self, place: Place) -> list[Place]:
        """Return the places over which a server extends, in the order of their ranks; only this one in most runs."""
        first, several = self._config.num_training_nodes, self._config.nodes_of_server
        begin = place.number - (place.number - first) % several
        return self._places[begin : begin + several]

    def of_instance(self, instance: InstanceId) -> Place | None:
        """Return the place of a server of a node, the first one if there are several."""
        each = self._config.servers_of_node
        for place in self:
            first = place.first_instance
            if first is not None and first <= instance < first + each:
                return place
        return None

    def place_for(self, name: str, identity: bytes, *, now: float) -> tuple[Place | None, str]:
        """Return the place of a node that asks, or why it is rejected; neither if it must ask again later."""
        asked_at = self._asked.setdefault(name, {}).setdefault(identity, now)
        if self._is_gathering(now):
            return None, ""
        place, reason = self._find(name, identity, now=now, asked_at=asked_at)
        if place is not None or reason:
            del self._asked[name]
        return place, reason

    def _find(self, name: str, identity: bytes, *, now: float, asked_at: float) -> tuple[Place | None, str]:
        is_late = now - asked_at > TAKEN_S
        for place in self:
            if place.identity == identity:
                return place, ""
            if place.name == name and place.identity is not None and not place.is_silent:
                reason = f"another node is named {name}; give it another name (--name)"
                return None, reason if is_late else ""
            if place.name == name:
                return place, ""
        vacant = [place for place in self if place.identity is None]
        if now - self._began < COME_BACK_S and self._known:
            vacant = [place for place in vacant if not place.name]
        if not vacant and len(self) < self._config.max_nodes:
            vacant = [self._add()]
        if not vacant:
            is_full = all(place.identity is not None for place in self)
            return None, f"the run has its {self._config.max_nodes} nodes (nodes.max)" if is_full and is_late else ""
        return min(vacant, key=lambda place: (not place.has_ranks, place.name != "", place.number)), ""

    def _is_gathering(self, now: float) -> bool:
        """Whether a new run still waits for all nodes."""
        if any(place.name for place in self):
            return False
        names = sorted(self._asked, key=_natural)
        first = min(at for askers in self._asked.values() for at in askers.values())
        if len(names) < self._config.nodes.expected and now - first < GATHER_S:
            return True
        for place, name in zip(self, names, strict=False):
            place.name = name
        return False


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts node-2 before node-10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]
