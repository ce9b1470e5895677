"""Mutations of what observes and audits servers that hold several adapters."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

_AUDIT: Final = "tests/journal/test_audit_adapters.py"
_WRONG: Final = "test_a_load_or_unload_out_of_place_is_found"
_NAMED_TWICE: Final = "test_a_name_that_is_used_twice_is_found"
_DIVIDED: Final = "test_a_row_divides_the_time_of_an_instance_among_the_versions_of_its_requests"
_LOST: Final = "test_what_was_under_way_on_a_server_that_is_lost_has_no_duration"
_LISTED: Final = "test_adapters_in_doubt_and_under_way_are_listed_and_full_weights_are_not"
_AGREES: Final = "test_adapters_agree_with_the_versions_and_with_the_requests_at_every_moment"
_GENERATES: Final = "test_a_server_of_adapters_generates_with_each_version_that_has_requests"

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/journal/audit_fleet.py",
        _AUDIT,
        (
            "audit-holds-what-is-being-loaded",
            "    instance.adapters[order.attempt] = order.version\n",
            "    instance.adapters[order.attempt] = order.version\n    instance.holds.add(order.version)\n",
            "test_a_request_before_the_load_of_its_version_is_confirmed_is_found",
        ),
        (
            "audit-confirms-any-version",
            "    elif version == event.version:  # else the push has failed\n",
            "    else:\n",
            "test_a_request_after_a_load_that_was_never_confirmed_is_found",
        ),
        (
            "audit-load-of-another-version-goes-on",
            "    version = instance.pushing.pop(event.attempt, None)\n    if version is None:\n",
            "    version = instance.pushing.get(event.attempt)\n    if version is None:\n",
            "test_a_load_that_reads_back_another_version_is_a_failure_and_may_be_unloaded",
        ),
        (
            "audit-holds-what-was-unloaded",
            "    instance.holds.discard(order.version)\n",
            "",
            "test_a_request_under_a_version_that_was_unloaded_is_found",
        ),
        (
            "audit-adapters-outlive-their-controller",
            "    instance.up = False\n    instance.holds = set()\n",
            "    instance.up = False\n",
            "test_a_request_on_a_server_that_outlived_its_controller_is_found",
        ),
        (
            "audit-takes-adapters-over",
            "    return t.stored & {event.version} if not t.settings.adapters else set()\n",
            "    return t.stored & {event.version}\n",
            "test_a_request_on_a_server_that_outlived_its_controller_is_found",
        ),
        (
            "audit-unload-under-a-request",
            "    if users:\n        t.find(C1_SERVING",
            "    if False:\n        t.find(C1_SERVING",
            "test_an_unload_under_a_request_is_found_although_its_group_was_given_up",
        ),
        (
            "audit-unload-of-another-load",
            "instance.adapters.get(order.load) != order.version or is_busy",
            "is_busy",
            _WRONG,
        ),
        ("audit-unload-twice", " or order.load in instance.unloading.values()\n", "\n", _WRONG),
        (
            "audit-unload-of-what-is-needed-elsewhere",
            "    elif needed:\n",
            "    elif False:\n",
            "test_an_unload_of_what_an_unfinished_answer_needs_elsewhere_is_found",
        ),
        (
            "audit-failed-calls-need-their-version",
            " and not (a.finished or a.graded)]\n",
            " and not a.finished]\n",
            "test_an_answer_whose_environment_failed_needs_its_version_no_more",
        ),
        (
            "audit-unload-of-what-is-in-doubt",
            " if order.version in instance.holds else []\n",
            "\n",
            "test_a_load_that_failed_may_be_unloaded_while_answers_wait_for_its_version",
        ),
        ("audit-loaded-twice", "    if order.version in instance.adapters.values():\n", "    if False:\n", _WRONG),
        (
            "audit-one-adapter-too-many",
            "len(instance.adapters) >= t.settings.num_holdings",
            "len(instance.adapters) > t.settings.num_holdings",
            "test_more_adapters_than_a_server_has_room_for_are_found",
        ),
        ("audit-name-used-twice", "    if order.attempt <= instance.attempt:\n", "    if False:\n", _NAMED_TWICE),
        (
            "audit-names-of-unloads",
            '    _name(t, instance, order, f"{found} as attempt {order.attempt}")\n',
            "",
            _NAMED_TWICE,
        ),
        (
            "audit-forgets-names-at-a-loss",
            "    instance.up = False\n    instance.holds = set()\n",
            "    instance.up = False\n    instance.holds = set()\n    instance.attempt = 0\n",
            "test_a_name_of_before_a_loss_is_found_and_a_new_one_is_not",
        ),
    ),
    *of(
        "dora/journal/audit_ledger.py",
        _AUDIT,
        (
            "audit-release-of-a-held-adapter",
            "(*i.pushing.values(), *i.adapters.values())",
            "i.pushing.values()",
            "test_a_version_that_is_released_while_a_server_may_have_its_adapter_is_found",
        ),
    ),
    *of(
        "dora/observe/lanes.py",
        "tests/observe/test_lanes.py",
        (
            "lanes-an-adapter-that-waits-to-be-loaded",
            '"load" if is_adapter else "wait"',
            '"wait"',
            "test_an_adapter_is_loaded_in_an_empty_server",
        ),
        (
            "lanes-newest-version-without-requests",
            "        return activity, max(requests, default=version)\n",
            "        return activity, version\n",
            "test_a_load_beside_requests_changes_nothing_until_the_version_has_requests",
        ),
        ("lanes-undivided", "    if not instance.is_shared:\n", "    if True:\n", _DIVIDED),
        ("lanes-requests-of-the-begin", "            lane.requests = requests\n", "            pass\n", _DIVIDED),
        (
            "lanes-new-requests-since-the-last-count",
            "            self._count_lane(id, lane, at)\n            lane.requests",
            "            lane.requests",
            _DIVIDED,
        ),
        (
            "lanes-each-version-has-all-the-time",
            "share=count / whole)",
            "share=1.0)",
            "test_the_timeline_and_the_seconds_add_up_to_the_spans",
        ),
    ),
    *of(
        "dora/observe/timeline.py",
        "tests/observe/test_timeline.py",
        (
            "timeline-joins-versions-that-share-a-lane",
            "        versions = FOLDED_VERSIONS if self._first.shared else LANE_VERSIONS\n",
            "        versions = LANE_VERSIONS\n",
            "test_joined_rows_keep_the_versions_that_share_a_lane",
        ),
        (
            "timeline-joined-rows-are-not-shared",
            "            shared=self._first.shared,\n",
            "",
            "test_joined_rows_keep_the_versions_that_share_a_lane",
        ),
    ),
    *of(
        "dora/observe/durations.py",
        "tests/observe/test_durations.py",
        (
            "durations-one-load-at-a-time",
            '        if timed.of == "instance":\n',
            "        if False:\n",
            "test_adapters_that_are_loaded_and_unloaded_at_once_are_timed_one_by_one",
        ),
        (
            "durations-of-unloads-that-failed",
            "ev.WeightPushFailed, ev.VersionUnloadFailed)\n",
            "ev.WeightPushFailed)\n",
            "test_adapters_that_are_loaded_and_unloaded_at_once_are_timed_one_by_one",
        ),
        ("durations-outlive-a-loss", "ev.InstanceLost | ev.InstanceRemoved", "ev.InstanceRemoved", _LOST),
        ("durations-outlive-a-removal", "ev.InstanceLost | ev.InstanceRemoved", "ev.InstanceLost", _LOST),
        ("durations-outlive-a-controller", "            self._began.clear()\n", "            pass\n", _LOST),
    ),
    *of(
        "dora/observe/snapshot.py",
        "tests/status/test_snapshot.py",
        (
            "holdings-confirmed-ones-alone",
            "        if h.adapter is not None\n",
            "        if h.version is not None\n",
            _LISTED,
        ),
        ("holdings-without-requests", "requests=requests[h.adapter])", "requests=0)", _AGREES),
        ("unloads-not-counted", "h.phase is WeightsPhase.UNLOADING)", "h.phase is WeightsPhase.LOADING)", _AGREES),
        (
            "running-without-requests",
            "for holding in self.holdings if holding.requests)",
            "for holding in self.holdings)",
            "test_every_adapter_of_an_instance_has_its_phase_and_its_requests",
        ),
    ),
    *of(
        "dora/observe/sentence.py",
        "tests/status/test_frame.py",
        (
            "sentence-counts-a-server-for-each-version",
            "    total, servers = len(busy), Counter",
            "    total, servers = sum(map(len, busy)), Counter",
            _GENERATES,
        ),
        (
            "sentence-older-by-version",
            "min(running) < shown[-1] for",
            "sum(v < shown[-1] for v in running) for",
            _GENERATES,
        ),
    ),
    *of(
        "dora/status/frame.py",
        "tests/status/test_frame.py",
        (
            "frame-unloading-unsaid",
            '    note = note or ("unloading" if row.unloading else "")\n',
            "",
            "test_a_version_that_nothing_needs_is_said_to_be_unloading",
        ),
    ),
    *of(
        "dora/cli/instances.py",
        "tests/status/test_frame.py",
        (
            "table-newest-version-alone",
            "    if row.holdings:\n",
            "    if False:\n",
            "test_the_table_of_servers_has_every_adapter_with_its_requests",
        ),
    ),
)
