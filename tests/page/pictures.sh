#!/bin/sh
# The pictures of the page in docs/pictures, from made-up runs and a real one that was stopped and resumed, with checks by
# axe-core, keyboard and mouse.
set -eu
take() {  # made-up run or run folder, prefix of the files, pictures and checks
    run=$1 prefix=$2
    shift 2
    if [ -d "$run" ]; then
        python -m dora view "$run" --port 8765 >/dev/null &
    else
        python -m tests.status.page_fixture "$run" 8765 >/dev/null &
    fi
    server=$!
    trap 'kill $server' EXIT
    until curl -sfo /dev/null http://127.0.0.1:8765/; do sleep 0.2; done
    node tests/page/pictures.cjs http://127.0.0.1:8765 "$prefix" "$@"
    kill $server
    wait $server || true
    trap - EXIT
}
resumed() {  # folder for the run: is stopped after 8 steps of 24, and resumed
    python -m dora run --set "run.folder=$1" --set run.steps=24 --set rollout.groups_per_step=12 \
        --set trainer.learning_rate=1e-4 --set eval.every=4 --set status.port=0 >/dev/null &
    run=$!
    until [ "$(cat "$1"/*/metrics.jsonl 2>/dev/null | grep -c '"kind":"step"')" -ge 8 ]; do sleep 0.2; done
    kill -INT $run
    wait $run || true
    python -m dora run --resume "$1"/* --set status.port=0 >/dev/null
}
# docs/pictures/page-timeline.webp is of a run of the default job: take runs/<run id> docs/pictures/page- timeline
take small docs/pictures/page- light dark phone lost use axe
take finished docs/pictures/page-finished- wide axe
take large docs/pictures/page-1000-servers- wide times
take markup "${TMPDIR:-/tmp}/page-markup-" details
home=$(mktemp -d)
resumed "$home"
take "$home"/* docs/pictures/page-resumed- light samples axe
rm -r "$home"
take growing "${TMPDIR:-/tmp}/page-" growing
