"""The controller's side of nodes: who takes part, in which place, and who is lost."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from dora.config.load import parse
from dora.core.ids import InstanceId, VersionId
from dora.errors import RunFailed
from dora.node import cluster as cluster_module
from dora.node import place as place_module
from dora.node import places as places_module
from dora.node.place import Place
from dora.node.places import KnownNode
from dora.transport.node_messages import (
    NODE_PROTOCOL,
    Beat,
    NodeOrders,
    NodeWelcome,
    Over,
    ProcessState,
    RanksOrder,
    Rejected,
    RelaySource,
    ServerOrder,
    Superseded,
)
from tests.node.peers import AGAIN_S, RUN, WAIT_S, Controller, Peer, config_of, controller
from tests.weights.adapted import make_model, publish_adapted
from tests.weights.nodes import KEY, held, node, publish, store_at

RANKS = RanksOrder(start=1, port=1, node_rank=0, nodes=2, master="h:1", incarnation=0, checkpoints={})
ONE = ("nodes.expected=1", "nodes.train=0", "nodes.max=3", "rollout.max_staleness=0")


@pytest.fixture(autouse=True)
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that beats often, and is patient otherwise."""
    monkeypatch.setattr(cluster_module, "BEAT_S", 0.02)
    for name in ("GATHER_S", "TAKEN_S", "COME_BACK_S"):
        monkeypatch.setattr(places_module, name, WAIT_S)


async def joined(there: Controller, *peers: Peer) -> list[int]:
    """Let nodes join at the same time; return their first instances."""
    welcomes = await asyncio.gather(*(peer.join() for peer in peers))
    return [welcome.first_instance for welcome in welcomes]


# -- joining


async def test_places_are_saved_once_there_is_room_on_a_full_disk(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE, full=3) as there:
        with Peer(there.address, "n") as peer:
            await peer.join()
            await peer.until(Beat, lambda beat: bool(there.saved))
            assert there.saved == [{"n": KnownNode(place=0, first_instance=0, servers=1)}]


async def test_a_node_learns_all_of_the_run_and_gets_orders_once_it_can_be_reached(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE, term=7) as there:
        with Peer(there.address, "n") as peer:
            welcome = await peer.join()
            assert (welcome.term, welcome.run_id, welcome.first_instance) == (7, RUN, 0)
            assert parse(welcome.config) == config_of(*ONE)
            orders = await peer.until(NodeOrders, saying=peer.reports(term=7))
            assert (orders.term, orders.servers, orders.ranks, orders.versions) == (7, {}, None, {})
    assert there.told[1:] == ["node n has joined with instances 0 to 0 (1 here, 1 expected)"]
    assert there.saved[-1] == {"n": KnownNode(place=0, first_instance=0, servers=1)}


async def test_a_new_run_gives_places_in_the_natural_order_of_names(tmp_path: Path) -> None:
    async with controller(tmp_path) as there:
        with ExitStack() as stack:
            peers = [stack.enter_context(Peer(there.address, name)) for name in ("node-10", "node-9", "node-2")]
            assert await joined(there, *peers) == [1, 0, -1]
            assert [place.name for place in there.cluster.places] == ["node-2", "node-9", "node-10"]


async def test_a_run_that_waits_for_nodes_begins_with_those_that_are_there_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places_module, "GATHER_S", 0.2)
    async with controller(tmp_path) as there:
        with Peer(there.address, "node-2") as one, Peer(there.address, "node-1") as other:
            assert await joined(there, one, other) == [0, -1]


async def test_a_name_is_rejected_while_a_node_that_is_alive_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with controller(tmp_path, *ONE) as there:
        with Peer(there.address, "n") as first, Peer(there.address, "n") as second:
            await first.take_part()
            alive = asyncio.create_task(first.until(Over, saying=first.reports()))
            refused = asyncio.create_task(second.refused())
            await asyncio.wait({alive, refused}, timeout=0.5)
            assert not refused.done()  # a node that was killed may come back under its name
            monkeypatch.setattr(places_module, "TAKEN_S", 0.0)
            assert await refused == "another node is named n; give it another name (--name)"
            await there.cluster.end("done")
            await alive


async def test_a_node_that_starts_again_takes_over_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with controller(tmp_path, *ONE) as there:
        with Peer(there.address, "n") as first:
            await first.take_part()
        monkeypatch.setattr(place_module, "ALIVE_S", 0.0)
        with Peer(there.address, "n") as second:
            assert (await second.join()).first_instance == 0
            monkeypatch.setattr(place_module, "ALIVE_S", WAIT_S)
            assert (await second.until(NodeOrders, saying=second.reports())).servers == {}
    assert len(there.saved[-1]) == 1


async def test_another_release_is_rejected_by_both_names(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE) as there:
        with Peer(there.address, "n") as peer:
            reason = await peer.refused(release="0.0.1")
            assert reason.startswith(f"it has DORA 0.0.1 (protocol {NODE_PROTOCOL}), the controller ")
            assert reason.endswith("; install the same release")


async def test_a_node_of_another_run_gets_no_answer(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE) as there:
        with Peer(there.address, "a") as other, Peer(there.address, "b") as own:
            await other.until(Rejected, saying=other.asks(release="0"))  # it is connected
            await other.send(other.asks(run_id="another"))
            await own.join(run_id=RUN)
            assert await other.end.receive(0) == []
            assert [place.name for place in there.cluster.places] == ["b"]


async def test_a_check_ends_once_its_nodes_look_for_another_controller_and_does_not_take_them_again(
    tmp_path: Path,
) -> None:
    async with controller(tmp_path, *ONE, "nodes.max=2") as there:
        there.cluster.on_new_servers = lambda place: 40 + place.number
        with Peer(there.address, "a") as one, Peer(there.address, "b") as other:
            await one.take_part()
            await other.take_part()
            ending = asyncio.create_task(there.cluster.end("the check is over", may_join_another=True))
            for peer in (one, other):
                assert not ending.done()
                assert (await peer.until(Over)).may_join_another
                await peer.send(peer.asks())
            async with asyncio.timeout(cluster_module.LET_GO_S / 2):
                await ending
            assert not any(isinstance(message, NodeWelcome) for _, message in await other.end.receive(AGAIN_S))


async def test_a_check_does_not_wait_long_for_a_node_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "LET_GO_S", 0.1)
    async with controller(tmp_path, *ONE) as there:
        with Peer(there.address, "a") as peer:
            await peer.take_part()
            async with asyncio.timeout(WAIT_S):
                await there.cluster.end("the check is over", may_join_another=True)


async def test_more_nodes_join_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "TAKEN_S", 0.0)
    async with controller(tmp_path, *ONE, "nodes.max=2") as there:
        there.cluster.on_new_servers = lambda place: 40 + place.number
        with ExitStack() as stack:
            first, second, third = (stack.enter_context(Peer(there.address, name)) for name in "abc")
            assert [(await peer.join()).first_instance for peer in (first, second)] == [0, 41]
            assert await third.refused() == "the run has its 2 nodes (nodes.max)"
            assert there.cluster.places.of_instance(41) is there.cluster.places[1]


@pytest.mark.parametrize(
    ("overrides", "fields", "reason"),
    [
        pytest.param(
            ("engine.device=cuda", "trainer.device=cuda", "nodes.gpus=4"),
            {"gpus": 2},
            "it has 2 GPUs, and the run is planned for 4 (nodes.gpus)",
            id="too few GPUs",
        ),
        pytest.param(
            ("engine.kind=sglang",),
            {"engine": ""},
            "the servers of engine.kind = sglang are not installed there",
            id="no engine",
        ),
    ],
)
async def test_a_node_that_cannot_do_its_part_is_rejected(
    tmp_path: Path, overrides: tuple[str, ...], fields: dict[str, object], reason: str
) -> None:
    async with controller(tmp_path, *ONE, *overrides) as there:
        with Peer(there.address, "n") as peer:
            await peer.join()
            assert (await peer.until(Rejected, saying=peer.reports(**fields))).reason == reason
            assert there.cluster.places[0].lost == reason


async def test_a_node_that_the_controller_cannot_connect_to_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "ADMIT_S", 0.0)
    async with controller(tmp_path, *ONE, connects=lambda relay: relay.url != "http://n:1") as there:
        with Peer(there.address, "n") as peer:
            await peer.join()
            reason = (await peer.until(Rejected, saying=peer.reports())).reason
            assert reason.startswith("the controller cannot connect to http://n:1; give the address of this node")


@pytest.mark.parametrize("name", ["", "a b", "\x1b[2J", "n" * 201, "../n"])
async def test_a_name_that_no_command_line_allows_is_rejected(tmp_path: Path, name: str) -> None:
    async with controller(tmp_path, *ONE) as there:
        with Peer(there.address, name) as peer:
            assert (await peer.refused()).startswith("a name has up to 200 letters")
        assert there.saved == []


async def test_a_node_that_cannot_take_part_leaves_its_place_and_the_reason(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE) as there:
        with Peer(there.address, "n") as peer:
            await peer.join()
            await peer.send(replace(peer.asks(), problem="its disk is full"))
            await there.until(lambda cluster: cluster.places[0].identity is None)
            assert there.cluster.places[0].lost == "it cannot take part: its disk is full"
            assert there.told[1:] == ["node n is lost: it cannot take part: its disk is full"]
        with Peer(there.address, "another") as peer:
            assert (await peer.join()).first_instance == 0


async def test_a_node_that_cannot_be_reached_at_first_is_tried_again(tmp_path: Path) -> None:
    answers = [None, False]
    async with controller(tmp_path, *ONE, connects=lambda relay: answers.pop(0) if answers else True) as there:
        with Peer(there.address, "n") as peer:
            await peer.join()
            while there.cluster.places[0].report is None:
                await peer.send(peer.reports())
                await asyncio.sleep(0)
    assert answers == []


# -- orders


async def test_orders_are_repeated_until_they_are_reported_and_not_longer(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE) as there:
        with Peer(there.address, "n") as peer:
            await peer.take_part()
            there.cluster.places[0].servers[0] = ServerOrder(start=1)
            there.cluster.changes.tell()
            wanted = await peer.until(NodeOrders, lambda orders: orders.servers == {0: ServerOrder(start=1)})
            assert await peer.until(NodeOrders) == wanted  # again, for the report that came had another number
            await peer.send(peer.reports(serial=wanted.serial))
            await there.until(lambda cluster: cluster.places[0].report.serial == wanted.serial)
            while await peer.end.receive(0):  # what was sent before
                pass
            beats: list[object] = []
            while len(beats) < 10:
                beats += [message for _, message in await peer.end.receive(WAIT_S)]
            assert beats == [Beat(term=0, serial=wanted.serial)] * len(beats)


async def test_servers_that_a_node_brings_along_are_wanted_if_they_run(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE) as there:
        with Peer(there.address, "n") as peer:
            await peer.join()
            states = {0: ProcessState(start=5, phase="up"), 1: ProcessState(start=9, phase="ended")}
            orders = await peer.until(NodeOrders, saying=peer.reports(servers=states))
            assert orders.servers == {0: ServerOrder(start=5)}


async def test_a_report_to_another_controller_says_nothing(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE, term=2) as there:
        with Peer(there.address, "n") as peer:
            await peer.join()
            await peer.send(peer.reports(term=1, engine="of the earlier one"))
            await peer.until(NodeOrders, saying=peer.reports(term=2, engine="1"))
            report = there.cluster.places[0].report
            assert report is not None
            assert report.engine == "1"


async def test_a_version_goes_from_node_to_node(tmp_path: Path) -> None:
    two = ("nodes.expected=2", "nodes.train=0")
    async with controller(tmp_path, *two) as there:
        spread, own = there.cluster.spread, there.cluster.own_source
        with Peer(there.address, "a") as first, Peer(there.address, "b") as second:
            await joined(there, first, second)
            for peer in (first, second):
                await peer.until(NodeOrders, saying=peer.reports())
            spread.hold(manifest := publish(spread._store))
            order = await first.until(NodeOrders, lambda orders: 3 in orders.versions)
            assert (order.versions[3].files, order.versions[3].sources) == (dict(manifest.files), (own,))
            order = await second.until(NodeOrders, lambda orders: 3 in orders.versions)
            assert order.versions[3].sources == ()
            await first.send(first.reports(fetching=(3,)))
            order = await second.until(NodeOrders, lambda orders: bool(orders.versions[3].sources))
            assert order.versions[3].sources == (first.reports().relay, own)
            await second.send(second.reports(versions={3: "/there"}))
            async with asyncio.timeout(WAIT_S):
                assert await spread.folder(there.cluster.places[1], 3) == Path("/there")
            spread.release(3)
            for peer in (first, second):
                await peer.until(NodeOrders, lambda orders: orders.versions == {})


async def test_a_version_that_is_published_again_before_it_has_arrived_is_waited_for(tmp_path: Path) -> None:
    """Its node was lost before any other had the version."""
    async with controller(tmp_path, *ONE) as there, asyncio.timeout(WAIT_S):
        spread = there.cluster.spread
        lost = publish(store_at(tmp_path / "lost"))
        spread.hold(lost)
        first, again = (asyncio.create_task(spread.fetch(VersionId(lost.version))) for _ in range(2))
        done, _ = await asyncio.wait({first, again}, timeout=0.2)
        assert not done
        spread.release(VersionId(lost.version))
        await asyncio.gather(first, again)


async def test_ranks_wait_for_the_versions_that_they_may_write_again_unless_no_node_has_them(tmp_path: Path) -> None:
    two = ("nodes.expected=2", "nodes.train=1", "nodes.servers=2")
    async with controller(tmp_path, *two) as there:
        spread = there.cluster.spread
        with Peer(there.address, "a") as trains, Peer(there.address, "b") as serves:
            await joined(there, trains, serves)
            for peer in (trains, serves):
                await peer.until(NodeOrders, saying=peer.reports())
            maker = there.cluster.places[0]
            assert maker.has_ranks
            for version in (3, 4):
                spread.hold(publish(store_at(tmp_path / "lost"), version))
            assert spread.has_again(maker)  # no node has them, so its ranks write them
            await serves.send(serves.reports(versions={3: "/v"}))
            await there.until(lambda cluster: not spread.has_again(maker))
            await trains.send(trains.reports(versions={3: "/v"}))
            await there.until(lambda cluster: spread.has_again(maker))
            spread.hold(publish(spread._store, 5))
            assert not spread.has_again(maker)
            spread.release(5)  # it may stay as the base of a delta, but is deleted here
            assert spread.has_again(maker)


async def test_a_released_version_stays_until_the_delta_to_it_has_arrived(tmp_path: Path) -> None:
    two = ("nodes.expected=2", "nodes.train=0", "nodes.deltas=10", "trainer.publish_dtype=bfloat16")
    async with controller(tmp_path, *two) as there:
        spread = there.cluster.spread
        with Peer(there.address, "a") as first, Peer(there.address, "b") as second:
            await joined(there, first, second)
            for version in (3, 4):
                spread.hold(publish(spread._store, version))
                spread.release(3)
                for peer in (first, second):
                    asks = peer.reports(versions={3: "/there"})
                    orders = await peer.until(
                        NodeOrders, lambda orders, version=version: version in orders.versions, saying=asks
                    )
                    assert (orders.versions.keys(), orders.versions[version].base) == (
                        {*range(3, version + 1)},
                        version - 1,
                    )
            await second.send(second.reports(versions={4: "/there"}))
            await there.until(lambda cluster: 4 in cluster.places[1].report.versions)
            assert 3 in spread.orders()[0], "the other node still receives it"
            await first.send(first.reports(versions={4: "/there"}))
            for peer in (first, second):
                await peer.until(NodeOrders, lambda orders: orders.versions.keys() == {4})


async def test_a_released_version_is_no_base_once_there_are_two_newer_ones(tmp_path: Path) -> None:
    one = (*ONE, "nodes.deltas=10", "trainer.publish_dtype=bfloat16")
    async with controller(tmp_path, *one) as there:
        spread = there.cluster.spread
        with Peer(there.address, "n") as peer:
            await peer.join()
            await peer.until(NodeOrders, saying=peer.reports())
            for version in (3, 4, 5):
                spread.hold(publish(spread._store, version))
            spread.release(3)
            await peer.until(NodeOrders, lambda orders: orders.versions.keys() == {4, 5}, saying=peer.reports())


async def test_a_version_with_an_adapter_is_made_of_the_model_of_each_host_and_has_no_delta(tmp_path: Path) -> None:
    model, maker = make_model(tmp_path / "model", "BF16"), store_at(tmp_path / "maker")
    manifests = [publish_adapted(maker, model, version=version) for version in (3, 4)]
    two = ("nodes.expected=2", "nodes.deltas=10", "trainer.publish_dtype=bfloat16", "rollout.max_staleness=0")
    async with controller(tmp_path, *two) as there, node(maker) as (_, proxy):
        spread = there.cluster.spread
        with Peer(there.address, "a") as first, Peer(there.address, "b") as second:
            await joined(there, first, second)
            has_all = {"versions": dict.fromkeys((3, 4), "/there"), "relay": RelaySource(url=proxy.url, key=KEY)}
            await first.until(NodeOrders, saying=first.reports(**has_all))
            for manifest in manifests:
                spread.hold(manifest)
            orders = await second.until(
                NodeOrders, lambda orders: orders.versions.keys() == {3, 4}, saying=second.reports()
            )
            assert [order.base for order in orders.versions.values()] == [None, None]
            await second.send(second.reports(**has_all))
            async with asyncio.timeout(WAIT_S):
                await spread.fetch(VersionId(3))
            assert held(spread._store) == held(maker)
            assert proxy.num_bytes < 0.2 * manifests[0].num_bytes


# -- the end


async def test_a_controller_that_was_replaced_ends(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE, term=4) as there:
        [(_, ended)] = there.cluster.loops()
        with Peer(there.address, "n") as peer:
            await peer.join()
            await peer.send(Superseded(term=5))
            with pytest.raises(RunFailed, match=r"another controller has taken over .* \(term 5, this one has 4\)"):
                async with asyncio.timeout(WAIT_S):
                    await ended
            with pytest.raises(RunFailed):  # and so does whoever waits for a node
                await there.cluster.wait_until(lambda: False)


async def test_a_late_word_of_a_node_to_an_earlier_controller_does_not_end_the_next_one(tmp_path: Path) -> None:
    """The connection to its address is that to the next one by then."""
    async with controller(tmp_path, *ONE, term=7) as there:
        with Peer(there.address, "n") as peer:
            await peer.join()
            await peer.send(Superseded(term=5))
            await peer.until(NodeOrders, saying=peer.reports(term=7))


async def test_a_node_that_comes_back_in_another_place_follows_the_orders_there(tmp_path: Path) -> None:
    """It knows the number of the last orders that it had, and ignores older ones."""

    def of_start(told: NodeOrders) -> bool:
        return told.ranks is not None and told.ranks.start == start

    async with controller(
        tmp_path, "nodes.train=2", "nodes.servers=2", "trainer.ranks=2", "nodes.lease_s=0.3"
    ) as there:
        with ExitStack() as stack:
            first, *others, third = [stack.enter_context(Peer(there.address, name)) for name in "abnc"]
            await joined(there, first, *others)
            place = there.cluster.places[0]
            for start in range(1, 6):
                place.ranks = replace(RANKS, start=start)
                there.cluster.changes.tell()
                orders = await first.until(NodeOrders, of_start, saying=first.reports())
            await there.until_lost(0)
            await third.take_part()
            alive = asyncio.create_task(third.until(Over, saying=third.reports()))
            await first.join(run_id=RUN)
            again = await first.until(NodeOrders, lambda told: told.ranks is None, saying=first.reports())
            assert [place.name for place in there.cluster.places][:2] == ["c", "a"]
            assert again.serial > orders.serial
            await there.cluster.end("done")
            await alive


async def test_a_node_is_lost_after_the_lease_and_another_one_takes_its_place(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE, "nodes.max=1", "nodes.lease_s=0.3") as there:
        with Peer(there.address, "a") as first, Peer(there.address, "b") as second:
            await first.take_part()
            assert (await there.until_lost(0)).startswith("nothing was heard from it for ")
            assert (await second.join()).first_instance == 0
            assert there.cluster.places[0].name == "b"


async def test_a_replacement_that_comes_before_the_loss_is_known_waits_for_the_place(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE, "nodes.max=1", "nodes.lease_s=0.5") as there:
        with Peer(there.address, "a") as first, Peer(there.address, "b") as second:
            await first.take_part()
            asking = asyncio.create_task(second.join())
            await there.until_lost(0)
            assert (await asking).first_instance == 0


async def test_a_node_that_has_ended_is_lost_before_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bool | None] = [True, None, None]  # then none listens there

    def connects(relay: RelaySource) -> bool | None:
        return answers.pop(0) if answers else False

    monkeypatch.setattr(place_module, "ALIVE_S", 0.0)
    async with controller(tmp_path, *ONE, connects=connects) as there:
        with Peer(there.address, "n") as peer:
            await peer.take_part()
            assert await there.until_lost(0) == "its process has ended"
    assert answers == []


async def test_a_silent_node_whose_host_gives_no_answer_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    answers: list[bool | None] = [True]

    def connects(relay: RelaySource) -> bool | None:
        loop.call_soon_threadsafe(asked.release)
        return answers.pop() if answers else None

    monkeypatch.setattr(place_module, "ALIVE_S", 0.0)
    async with controller(tmp_path, *ONE, connects=connects) as there:
        with Peer(there.address, "n") as peer:
            await peer.take_part()
            async with asyncio.timeout(WAIT_S):
                for _ in range(5):
                    await asked.acquire()
            assert there.cluster.places[0].report is not None


async def test_a_node_that_leaves_is_let_go_and_the_next_one_has_other_instances(tmp_path: Path) -> None:
    leaving: list[Place] = []
    async with controller(tmp_path, *ONE, "nodes.max=1") as there:
        there.cluster.on_leaving = leaving.append
        there.cluster.on_new_servers = lambda place: 17
        with Peer(there.address, "a") as first, Peer(there.address, "b") as second:
            await first.take_part()
            await first.send(first.reports(is_leaving=True))
            await there.until(lambda cluster: cluster.places[0].report.is_leaving)
            assert leaving == [there.cluster.places[0]]
            await first.send(first.reports(engine="again"))
            await there.until(lambda cluster: cluster.places[0].report.engine == "again")
            assert len(leaving) == 1
            await there.cluster.let_go(there.cluster.places[0])
            assert (await first.until(Over)).reason == "the node has left the run"
            assert there.saved[-1] == {}
            assert (await second.join()).first_instance == 17


async def test_a_node_with_ranks_that_leaves_is_lost_and_the_next_one_has_its_place_before_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others: that of a server, which no node has had."""
    monkeypatch.setattr(places_module, "GATHER_S", 0.2)
    ranks = ("nodes.expected=3", "nodes.train=1", "nodes.max=3")
    async with controller(tmp_path, *ranks) as there:
        with ExitStack() as stack:
            first, second, third = (stack.enter_context(Peer(there.address, name)) for name in "abc")
            await asyncio.gather(first.take_part(), second.take_part())
            assert [place.name for place in there.cluster.places if place.report is not None] == ["a", "b"]
            await first.send(first.reports(is_leaving=True))
            assert await there.until_lost(0) == "it was told to end"
            await third.take_part()
            assert there.cluster.places[0].name == "c"


async def test_the_end_of_the_run_is_told_to_every_node(tmp_path: Path) -> None:
    async with controller(tmp_path, "nodes.expected=2", "nodes.train=0") as there:
        with Peer(there.address, "a") as first, Peer(there.address, "b") as second:
            await joined(there, first, second)
            await there.cluster.end("the run is over")
            for peer in (first, second):
                assert (await peer.until(Over)).reason == "the run is over"


# -- a later start


KNOWN = {"a": KnownNode(0, None, 1), "b": KnownNode(1, 0, 1), "z": KnownNode(2, 5, 1)}


async def test_nodes_of_an_earlier_start_come_back_to_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with controller(tmp_path, known=KNOWN, term=1) as there:
        with ExitStack() as stack:
            new, b, z = (stack.enter_context(Peer(there.address, name)) for name in ("0", "b", "z"))
            refused = asyncio.create_task(new.refused())
            assert await joined(there, z, b) == [5, 0]
            assert not refused.done()
            assert [place.name for place in there.cluster.places] == ["a", "b", "z"]
            assert (await stack.enter_context(Peer(there.address, "a")).join()).first_instance == -1
            monkeypatch.setattr(places_module, "TAKEN_S", 0.0)
            assert await refused == "the run has its 3 nodes (nodes.max)"


async def test_the_place_of_a_node_that_does_not_come_back_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places_module, "COME_BACK_S", 0.1)
    async with controller(tmp_path, known=KNOWN, term=1) as there:
        with Peer(there.address, "new") as new, Peer(there.address, "a") as late:
            assert (await new.join()).first_instance == -1
            assert [place.name for place in there.cluster.places] == ["new", "b", "z"]
            assert (await late.join()).first_instance == 0  # another place


async def test_the_numbers_of_servers_that_have_left_are_not_given_again(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE, term=1, removed={InstanceId(0)}) as there:
        there.cluster.on_new_servers = lambda place: 7
        with Peer(there.address, "a") as peer:
            assert (await peer.join()).first_instance == 7


async def test_a_process_that_is_started_again_is_a_loss_of_the_earlier_one(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE) as there:
        with Peer(there.address, "a") as first, Peer(there.address, "a") as second:
            await first.take_part()
            place = there.cluster.places[0]
            place.servers[0] = ServerOrder(start=1)
            place.heard_at -= 2 * place_module.ALIVE_S  # silent, and far from the end of its lease
            lost = asyncio.create_task(there.cluster.changes.until(lambda: place.report is None))
            await second.join()
            async with asyncio.timeout(WAIT_S):
                await lost
            assert place.servers == {}
            assert any("its process was started again" in line for line in there.told)


async def test_a_node_that_leaves_before_it_is_admitted_is_let_go_too(tmp_path: Path) -> None:
    leaving: list[Place] = []
    async with controller(tmp_path, *ONE) as there:
        there.cluster.on_leaving = leaving.append
        with Peer(there.address, "a") as peer:
            await peer.join()
            await peer.send(peer.reports(is_leaving=True))
            await there.until_joined(0)
            assert leaving == [there.cluster.places[0]]


async def test_what_keeps_a_node_from_its_orders_is_told_once(tmp_path: Path) -> None:
    async with controller(tmp_path, *ONE) as there:
        with Peer(there.address, "a") as peer:
            await peer.take_part()
            for engine in ("1", "2"):
                await peer.send(peer.reports(problem="the disk is full", engine=engine))
                await there.until(lambda cluster, engine=engine: cluster.places[0].report.engine == engine)
            assert there.told.count("node a: the disk is full") == 1
