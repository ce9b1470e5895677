#!/bin/sh
# The pictures of the page in docs/pictures, from made-up runs, with checks by axe-core, keyboard and mouse.
set -eu
take() {  # run, prefix of the files, pictures and checks
    run=$1 prefix=$2
    shift 2
    python -m tests.status.page_fixture "$run" 8765 >/dev/null &
    server=$!
    trap 'kill $server' EXIT
    until curl -sfo /dev/null http://127.0.0.1:8765/; do sleep 0.2; done
    node tests/page/pictures.cjs http://127.0.0.1:8765 "$prefix" "$@"
    kill $server
    wait $server || true
    trap - EXIT
}
take small docs/pictures/page- light dark phone lost use axe
take finished docs/pictures/page-finished- wide axe
take large docs/pictures/page-1000-servers- wide times
take markup "${TMPDIR:-/tmp}/page-markup-" details
take growing "${TMPDIR:-/tmp}/page-" growing
