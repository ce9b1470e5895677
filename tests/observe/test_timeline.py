"""Time added up by bucket: every second is in one row, and the number of rows grows with the logarithm of the age."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from dora.journal.spans import ALL_LANES, MAX_LANES, TimelineRow, encode_line
from dora.observe.timeline import FIRST_BUCKET_S, Timeline, bucket_of, compact, decode_row


def seconds(rows: list[TimelineRow]) -> float:
    lanes = [entry for row in rows for entries in row.lanes.values() for entry in entries]
    return sum(s for _, _, s in [*lanes, *(entry for row in rows for entry in row.folded)])


@pytest.mark.parametrize("at", [0.0, 0.3, 511.9, 512.0, 777.7, 1024.0, 600_000.0])
def test_a_bucket_contains_its_moment_and_the_next_begins_where_it_ends(at: float) -> None:
    begin, length = bucket_of(at)
    assert begin <= at < begin + length
    assert bucket_of(begin + length)[0] == begin + length


def test_a_run_of_a_week_has_12_000_buckets() -> None:
    count, at = 0, 0.0
    while at < 7 * 86_400:
        begin, length = bucket_of(at)
        at, count = begin + length, count + 1
    assert 11_000 < count < 13_000


def test_spans_at_random_are_in_rows_second_by_second() -> None:
    draw = random.Random(3)
    timeline, rows = Timeline("instance", begin=0.0), list[TimelineRow]()
    ends = [0.0] * 5
    while min(ends) < 30:
        lane = ends.index(min(ends))
        end = ends[lane] + draw.expovariate(3.0)
        timeline.add(lane, (draw.choice(["decoding", "prefill"]), draw.randrange(2)), ends[lane], end)
        ends[lane] = end
        rows += timeline.rows(min(ends))
    for row in rows:
        assert row.s == FIRST_BUCKET_S
        assert all(sum(s for _, _, s in entries) == pytest.approx(row.s, abs=1e-5) for entries in row.lanes.values())
    assert [row.at for row in rows] == [i * FIRST_BUCKET_S for i in range(len(rows))]


def test_a_row_of_many_lanes_is_folded_and_keeps_their_seconds() -> None:
    timeline = Timeline("instance", begin=0.0)
    for lane in range(MAX_LANES + 1):
        timeline.add(lane, ("decoding", lane % 2), 0.0, 0.25)
    [row] = timeline.rows(0.25)
    assert (row.lanes, row.num_lanes) == ({}, MAX_LANES + 1)
    assert row.folded == [("decoding", 0, 33 * 0.25), ("decoding", 1, 32 * 0.25)]


def test_marks_are_in_the_row_of_their_moment_and_moves_of_many_lanes_are_added_up() -> None:
    for lanes, moved in ((2, {0: 2, 1: 1}), (MAX_LANES + 1, {ALL_LANES: 3})):
        timeline = Timeline("instance", begin=0.0)
        for lane in range(lanes):
            timeline.add(lane, ("decoding", 0), 0.0, 0.75)
        for lane in (0, 1, 0):
            timeline.move(lane, 0.3)
        timeline.publish(7, 0.55)
        assert [(row.moved, row.published) for row in timeline.rows(0.75)] == [({}, []), (moved, []), ({}, [(7, 0.55)])]


def test_joined_rows_keep_the_versions_that_share_a_lane() -> None:
    for shared, kept in ((True, {0: 0.375, 1: 0.375, 2: 0.75}), (False, {0: 0.375, 2: 1.125})):
        timeline = Timeline("instance", begin=0.0, shared=shared)
        for version, share in ((0, 0.25), (1, 0.25), (2, 0.5)):
            timeline.add(0, ("decoding", version), 0.0, 1.5, share=share)
        lines = [encode_line(row) for row in timeline.rows(1.5)]
        [row] = map(decode_row, compact(lines, most=2, size=1_000_000))
        assert row is not None
        assert (row.shared, {version: s for _, version, s in row.lanes[0]}) == (shared, kept)


def test_a_timeline_that_ends_and_goes_on_counts_nothing_twice() -> None:
    first = Timeline("rank", begin=0.0)
    first.add(0, ("packing", None), 0.0, 0.6)
    rows = first.rows(0.6, partial=True)
    second = Timeline("rank", begin=rows[-1].at + rows[-1].s)
    second.add(0, ("packing", None), 0.0, 0.6)  # read again from spans.jsonl
    second.add(0, ("saving", None), 0.6, 1.0)
    rows += second.rows(1.0)
    assert seconds(rows) == pytest.approx(1.0)
    assert all(b.at == pytest.approx(a.at + a.s) for a, b in pairwise(rows))
    assert rows[-2].lanes == {0: [("saving", None, 0.15)]}
