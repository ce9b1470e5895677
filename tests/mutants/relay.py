"""Mutations of what nodes believe of each other when versions and checkpoints pass between them."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant, of

MUTANTS: Final[tuple[Mutant, ...]] = (
    *of(
        "dora/weights/source.py",
        "tests/weights/test_relay.py",
        (
            "a piece is taken as it comes",
            "if not is_whole or xxhash.xxh3_128_hexdigest(piece) != headers.get(PIECE_CHECKSUM):",
            "if not is_whole:",
            "test_a_false_answer_is_followed_by_the_next_source",
        ),
        (
            "other bytes than those asked for are taken",
            'if (given, headers.get("Content-Length")) != (expected, str(stop - start))',
            "if False",
            "test_a_false_answer_is_followed_by_the_next_source",
        ),
    ),
    *of(
        "dora/weights/source.py",
        "tests/weights/test_relay_tls.py",
        (
            "the key is sent in plain text",
            "if address.scheme != scheme or not",
            "if not",
            "test_the_key_is_not_sent_in_plain_text_to_one_that_should_speak_tls",
        ),
    ),
    *of(
        "dora/tls.py",
        "tests/weights/test_relay_tls.py",
        (
            "any certificate is believed",
            "return ssl.create_default_context(cafile=self.authority)",
            "return ssl._create_unverified_context(cafile=self.authority)",
            "test_the_key_is_not_sent_to_a_node_that_cannot_be_verified",
        ),
    ),
    *of(
        "dora/weights/arrival.py",
        "tests/weights/test_relay.py",
        (
            "a file is not compared with the manifest",
            "self._checksum not in (None, self._hasher.hexdigest()):",
            "False:",
            "test_a_version_of_a_source_with_other_bytes_never_becomes_visible",
        ),
        (
            "a file has any size",
            "if not 0 <= size <= max_size or",
            "if",
            "test_a_false_answer_is_followed_by_the_next_source",
        ),
        (
            "each file may have as many bytes as the version",
            "max_size = self._num_bytes - sum(f.num_bytes for f in self.files.values() if f is not file)",
            "max_size = self._num_bytes",
            "test_all_files_together_have_no_more_bytes_than_the_version",
        ),
        (
            "a file begins anew with each source",
            "        self._failures[source.url] += 1\n",
            "        self._failures[source.url] += 1\n"
            "        files.remove(file.path)\n"
            "        file.num_bytes, file.size, file._hasher = 0, None, xxhash.xxh3_128()\n",
            "test_another_source_continues_where_the_first_has_ended",
        ),
        (
            "any part of a file is passed on",
            "return self.num_bytes >= stop or self.num_bytes == self.size",
            "return True",
            "test_pieces_pass_on_through_a_node_that_does_not_have_all_of_them",
        ),
    ),
    *of(
        "dora/weights/arrival.py",
        "tests/weights/test_links.py",
        (
            "a liar is asked again and again",
            "if strikes[source.url] < _MAX_STRIKES]",
            "]",
            "test_two_liars_that_take_turns_end_a_fetch",
        ),
        (
            "who passed on a lie is a liar",
            "_MAX_STRIKES: Final = 2",
            "_MAX_STRIKES: Final = 1",
            "test_a_lying_maker_behind_an_honest_node_is_found_out_by_everyone",
        ),
        (
            "failures of a slow link add up",
            "                        self._num_in_vain = 0\n",
            "",
            "test_a_slow_link_is_no_failure_as_long_as_pieces_come",
        ),
    ),
    *of(
        "dora/weights/relay.py",
        "tests/weights/test_relay.py",
        (
            "a file that begins anew is said to be missing",
            "                raise TimeoutError from None\n            file = foreign",
            "                raise\n            file = foreign",
            "test_a_file_that_begins_anew_at_this_moment_is_not_said_to_be_missing",
        ),
        (
            "any file in a version's folder is served",
            "is_named = name in self._store.manifest(VersionId(int(folder))).files",
            "is_named = True",
            "test_only_files_that_a_manifest_names_are_served",
        ),
        (
            "files behind links are served",
            " or (path / name).resolve() != path.parent.resolve() / path.name / name:",
            ":",
            "test_nothing_behind_a_link_is_served",
        ),
        (
            "strangers close the connections of nodes",
            "sorted(open_ones, key=self._known.__contains__)",
            "open_ones",
            "test_strangers_do_not_displace_a_transfer",
        ),
    ),
    *of(
        "dora/weights/relay.py",
        "tests/weights/test_relay_folders.py",
        (
            "deltas outlive their version",
            "        await self._drop(list(filter(is_of_it, self._deltas)))\n",
            "",
            "test_deltas_are_few_and_go_with_their_version",
        ),
        (
            "a wrong delta ends a fetch",
            "            return False\n        return True",
            "            raise\n        return True",
            "test_a_delta_that_does_not_fit_is_followed_by_the_whole_version",
        ),
    ),
    *of(
        "dora/weights/checkpoints.py",
        "tests/weights/test_relay_folders.py",
        (
            "any name is fetched",
            "    if not all(is_file_of(folder.name, name) for name in checksums):",
            "    if False:",
            "test_names_that_lead_elsewhere_are_not_fetched",
        ),
        (
            "a fetched checkpoint passes any fence",
            "        fence()\n        if not target.is_dir():",
            "        if not target.is_dir():",
            "test_the_fence_holds_for_checkpoints",
        ),
    ),
)
