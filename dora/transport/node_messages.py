"""The messages between the controller and the nodes: what each node is to do, and what it does.

They are states, not steps: `NodeOrders` is all that the controller wants of a node, `Report` all that the node has.
Each is sent again when it changes, so a lost message or a reconnection needs no special care, and a controller that
takes over finds what runs in the first report. Invariant: a node follows the controller with the highest term, and
tells others.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from dora.transport.messages import Message

#: Raised with each change of the messages below `Join`.
NODE_PROTOCOL: Final = 4
#: In place of a host in a `RelaySource`: that of the controller, by whatever name the node reaches it.
CONTROLLER_HOST: Final = "controller.invalid"


class WirePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the parts of messages."""


class RelaySource(WirePart, frozen=True):
    """A relay that has a version or a checkpoint, or receives it."""

    url: str
    key: str


class FolderOrder(WirePart, frozen=True):
    """A version or a checkpoint that a node must have. Without sources, it is not fetched yet."""

    files: dict[str, str]  # name -> checksum
    num_bytes: int
    chain: str  # lineage of the weights
    sources: tuple[RelaySource, ...]  # the preferred one first
    base: int | None = None  # version of which there is a delta


class ServerOrder(WirePart, frozen=True):
    """A server of a node, or the part of one that this node has."""

    start: int  # number of this start
    nodes: int = 1  # over which it extends
    node_rank: int = 0  # of this node among them
    master: str = ""  # host:port at which its parts meet; "" for one node


class RanksOrder(WirePart, frozen=True):
    """The ranks of a node."""

    start: int  # number of this start
    port: int  # at which the controller listens for ranks
    node_rank: int
    nodes: int
    master: str  # host:port at which ranks of several nodes meet; "" for one node
    incarnation: int  # number of this start of the ranks, since the controller began
    checkpoints: dict[str, FolderOrder]  # that must be there before the ranks start


# ---- received by a node ---------------------------------------------------------------------------------------------


class NodeWelcome(Message, frozen=True):
    """The node takes part, or is taken over. It answers with its first report, and then gets orders."""

    term: int  # of the controller
    run_id: str
    first_instance: int  # that its servers have; -1 for a node with ranks
    config: str  # TOML, without secrets
    live_bytes: int  # for which live versions need room


class NodeOrders(Message, frozen=True):
    """All that a node is to do. Versions that it was to hold, and that are missing here, are deleted."""

    term: int
    serial: int  # number of these orders, which the node reports
    servers: dict[int, ServerOrder]  # by index on the node; what runs since another start is ended
    ranks: RanksOrder | None
    versions: dict[int, FolderOrder]


class Beat(Message, frozen=True):
    """The orders have not changed."""

    term: int
    serial: int


class Over(Message, frozen=True):
    """The run is over, or the node has left it: the node ends everything, and itself with exit code 0."""

    term: int
    reason: str
    may_join_another: bool = False  # it was only a check: the node looks for a controller again


class Rejected(Message, frozen=True):
    """The node cannot take part, and ends with exit code 2."""

    reason: str


# ---- received by the controller -------------------------------------------------------------------------------------


class Join(Message, frozen=True):
    """The first message of a node, and after every reconnection. Its fields are the same in all protocol versions."""

    protocol: int
    release: str  # of DORA
    name: str
    run_id: str  # of the run in which it takes part; "": none yet
    problem: str = ""  # why it cannot take part; it ends then


class ProcessState(WirePart, frozen=True):
    """A server, or torchrun with the ranks of a node."""

    start: int
    phase: Literal["starting", "up", "ended"]
    url: str = ""
    key: str = ""
    reason: str = ""  # why it has ended, with the last lines of its log
    is_final: bool = False  # it would fail again: a configuration error


class NodePaths(WirePart, frozen=True):
    """Folders of a node."""

    model: str
    reference: str  # of the reference policy; "": version 0
    adapter: str  # that version 0 has; "": none
    memory_root: str
    durable_root: str
    checkpoints: str
    fence: str
    logs: str


class Report(Message, frozen=True):
    """All that a node has and does."""

    term: int  # of the controller that it follows
    serial: int  # of the orders that it follows
    clock: float  # by its wall clock, in seconds since 1970
    gpus: int
    memory_bytes: int
    shared_bytes: int  # free in the folder for live versions
    engine: str  # release of the kind of servers that the run has; "" if it is not installed
    relay: RelaySource
    meeting_port: int  # free, for the ranks of several nodes
    paths: NodePaths
    servers: dict[int, ProcessState]
    ranks: ProcessState | None
    versions: dict[int, str]  # that it has completely -> folder
    fetching: tuple[int, ...]  # versions that it receives
    problem: str = ""  # what keeps it from following its orders
    is_leaving: bool = False


class Superseded(Message, frozen=True):
    """The node follows a controller with a higher term."""

    term: int


ToNode = NodeWelcome | NodeOrders | Beat | Over | Rejected
FromNode = Join | Report | Superseded
