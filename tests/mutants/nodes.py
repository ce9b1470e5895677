"""Mutations of what nodes and their controller follow: terms, places, orders, and from whom a version comes."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/node/agent.py",
        "tests/node/test_agent.py",
        (
            "node-follows-an-older-controller",
            "        if message.term < self._term:\n",
            "        if False:\n",
            "test_an_older_controller_is_told_that_it_was_replaced_and_is_not_followed",
        ),
        (
            "older-controller-ends-a-node",
            "isinstance(message, Over) and message.term >= self._term",
            "isinstance(message, Over)",
            "test_an_older_controller_is_told_that_it_was_replaced_and_is_not_followed",
        ),
        (
            "node-does-not-follow-a-new-controller",
            "if message.term > self._term or self._first_instance",
            "if self._term < 0 or self._first_instance",
            "test_servers_stay_at_a_change_of_controller_and_ranks_end",
        ),
        (
            "report-before-a-controller-is-followed",
            "                member = await Member.enter(",
            "                self._member = member = await Member.enter(",
            "test_a_report_waits_until_a_controller_is_followed",
        ),
        (
            "node-outlives-its-lease",
            "        if time.monotonic() - heard_at > limit_s:",
            "        if time.monotonic() - heard_at > limit_s and self._member is None:",
            "test_a_node_without_a_controller_ends_everything_after_the_lease",
        ),
        (
            "a-node-that-cannot-take-part-says-nothing",
            "                await self._end.send(address, self._join(problem=str(err)))\n",
            "",
            "test_a_node_that_cannot_take_part_tells_the_controller_why",
        ),
    ),
    *of(
        "dora/app/nodes.py",
        "tests/app/test_received_versions.py",
        (
            "nodes-delete-what-the-controller-had-not-received",
            "    for version in recorded.state.window.entries:",
            "    for version in ():",
            "test_nodes_keep_a_version_that_a_resumed_controller_had_not_received",
        ),
    ),
    *of(
        "dora/node/spread.py",
        "tests/app/test_received_versions.py",
        (
            "what-was-written-again-is-named-to-its-node-for-good",
            "            if place.report is None or version in place.report.versions:",
            "            if place.report is None:",
            "test_the_ranks_node_deletes_a_version_that_was_written_again_and_nothing_needs",
        ),
    ),
    *of(
        "dora/node/spread.py",
        "tests/node/test_cluster.py",
        (
            "ranks-write-again-what-another-node-has",
            "return place.report is not None and kept <= place.report.versions.keys()",
            "return place.report is not None",
            "test_ranks_wait_for_the_versions_that_they_may_write_again_unless_no_node_has_them",
        ),
        (
            "the-base-of-a-delta-is-deleted-at-once",
            "if not self._is_base(version)]",
            "]",
            "test_a_released_version_stays_until_the_delta_to_it_has_arrived",
        ),
        (
            "the-base-of-a-delta-stays-for-good",
            "        return not found <= {Stock.ALL, Stock.GONE}\n",
            "        return True\n",
            "test_a_released_version_stays_until_the_delta_to_it_has_arrived",
        ),
        (
            "every-released-version-stays-as-a-base",
            "        if self._base(following) is None or newest > following:",
            "        if self._base(following) is None:",
            "test_a_released_version_is_no_base_once_there_are_two_newer_ones",
        ),
    ),
    *of(
        "dora/node/member.py",
        "tests/node/test_agent.py",
        (
            "ranks-outlive-their-controller",
            "        await self._ranks.close()\n",
            "",
            "test_servers_stay_at_a_change_of_controller_and_ranks_end",
        ),
        (
            "servers-end-with-their-controller",
            "        await self._ranks.close()\n",
            "        await self._ranks.close()\n"
            "        for server in self._servers.values():\n            await server.close()\n",
            "test_servers_stay_at_a_change_of_controller_and_ranks_end",
        ),
        (
            "fence-of-a-node-not-raised",
            "        await raise_fence_patiently(Path(self._paths.fence), epoch=welcome.term)\n",
            "",
            "test_servers_stay_at_a_change_of_controller_and_ranks_end",
        ),
        (
            "older-orders-followed",
            "        if before is not None and orders.serial <= before.serial:",
            "        if False:",
            "test_repeated_and_older_orders_change_nothing",
        ),
        (
            "versions-unknown-to-a-new-controller-kept",
            "            if order is None:\n                await self._drop(version)\n            elif",
            "            if order is not None and",
            "test_versions_that_a_new_controller_does_not_know_are_deleted_and_others_stay",
        ),
        (
            "version-of-an-earlier-controller-kept-with-other-files",
            "            elif self._manifests.get(version, _manifest(version, order)) != _manifest(version, order):\n",
            "            elif False:\n",
            "test_a_version_with_other_bytes_than_the_journaled_ones_is_replaced",
        ),
        (
            "files-of-another-history-held",
            "            return self._store.manifest(manifest.version) == manifest\n",
            "            return bool(self._store.manifest(manifest.version))\n",
            "test_a_version_with_other_bytes_than_the_journaled_ones_is_replaced",
        ),
        (
            "versions-written-by-ranks-not-seen-while-they-are-received",
            "            while not (await asyncio.wait({receiving}, timeout=LOOK_S))[0]:\n",
            "            while not (await asyncio.wait({receiving}))[0]:\n",
            "test_a_version_that_is_waited_for_is_had_once_ranks_of_the_node_have_written_it",
        ),
        (
            "versions-that-ranks-wrote-otherwise-deleted",
            "                await self._forget(version)  # its files may be those that are wanted now\n",
            "                await self._drop(version)\n",
            "test_a_version_that_ranks_of_the_node_wrote_otherwise_is_kept_once_it_is_journaled",
        ),
        (
            "files-of-an-earlier-process-used",
            "    for version in {*store.live(), *store.durable()}:\n        store.discard(version)\n",
            "",
            "test_what_an_earlier_process_of_the_node_left_is_not_used",
        ),
    ),
    *of(
        "dora/node/cluster.py",
        "tests/node/test_cluster.py",
        (
            "replaced-controller-goes-on",
            "            case Superseded() if message.term > self._settings.term:\n                raise RunFailed(",
            "            case Superseded() if message.term > self._settings.term:\n                log.warning(",
            "test_a_controller_that_was_replaced_ends",
        ),
        (
            "report-to-another-controller-believed",
            "            case Report() if place is not None and message.term == self._settings.term:",
            "            case Report() if place is not None:",
            "test_a_report_to_another_controller_says_nothing",
        ),
        (
            "orders-sent-once",
            "and place.report.serial != place.serial:",
            "and False:",
            "test_orders_are_repeated_until_they_are_reported_and_not_longer",
        ),
        (
            "servers-that-run-are-not-adopted",
            'for index, server in report.servers.items() if server.phase == "up"\n',
            "for index, server in () if server\n",
            "test_servers_that_a_node_brings_along_are_wanted_if_they_run",
        ),
        (
            "silent-node-not-lost",
            "                if place.identity is not None and silent_s > self._config.nodes.lease_s:",
            "                if False:",
            "test_a_node_is_lost_after_the_lease_and_another_one_takes_its_place",
        ),
        (
            "node-without-an-answer-lost",
            "await asyncio.to_thread(self._settings.connects, report.relay) is False",
            "not await asyncio.to_thread(self._settings.connects, report.relay)",
            "test_a_silent_node_whose_host_gives_no_answer_is_not_lost",
        ),
    ),
    *of(
        "dora/node/places.py",
        "tests/node/test_cluster.py",
        (
            "places-of-known-nodes-given-to-others",
            "        if now - self._began < COME_BACK_S and self._known:",
            "        if False:",
            "test_nodes_of_an_earlier_start_come_back_to_their_places",
        ),
        (
            "known-node-gets-another-place",
            '            if place.name == name:\n                return place, ""\n',
            "",
            "test_nodes_of_an_earlier_start_come_back_to_their_places",
        ),
        (
            "name-of-a-node-that-is-alive-given-to-another",
            "            if place.name == name and place.identity is not None and not place.is_silent:",
            "            if False:",
            "test_a_name_is_rejected_while_a_node_that_is_alive_has_it",
        ),
        (
            "places-in-the-order-of-joining",
            "        names = sorted(self._asked, key=_natural)",
            "        names = [*self._asked]",
            "test_a_new_run_gives_places_in_the_natural_order_of_names",
        ),
    ),
    *of(
        "dora/node/sources.py",
        "tests/node/test_sources.py",
        (
            "source-named-before-it-has-begun",
            " or (earlier is not None and chain[earlier] is Stock.NOTHING):",
            ":",
            "test_a_source_is_complete_or_earlier_in_the_chain_so_that_nobody_waits_in_a_circle",
        ),
        (
            "lost-node-stays-a-source",
            "        if held is not Stock.GONE:\n            earlier = position",
            "        earlier = position",
            "test_a_source_is_complete_or_earlier_in_the_chain_so_that_nobody_waits_in_a_circle",
        ),
        (
            "everyone-asks-the-maker",
            "            found.append([earlier, *(source for source in complete if source != earlier)])",
            "            found.append(complete or [earlier])",
            "test_the_maker_and_whoever_receives_pass_the_version_on_to_one_that_is_alive",
        ),
    ),
    *of(
        "dora/node/processes.py",
        "tests/node/test_processes.py",
        (
            "earlier-process-not-ended",
            "            if self._child is not None:\n                await self._child.stop()\n",
            "",
            "test_an_order_that_comes_while_a_process_is_ended_is_followed_after_it",
        ),
        (
            "key-kept-from-start-to-start",
            "    key = api_key or secrets.token_hex(32)",
            '    key = api_key or "the same"',
            "test_each_start_has_a_key_of_its_own_unless_one_is_configured",
        ),
    ),
    *of(
        "dora/transport/node_ends.py",
        "tests/transport/test_node_ends.py",
        (
            "what-violates-the-protocol-of-nodes-not-refused",
            '                await self.send(identity, Rejected(reason=f"{err}; is it the same version of DORA?"))',
            "                del err",
            "test_what_violates_the_protocol_is_refused_with_a_reason_and_reaches_nobody",
        ),
    ),
)
