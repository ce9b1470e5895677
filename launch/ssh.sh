#!/bin/bash
# A run on a list of hosts, by ssh: the controller on the first one, `dora node` on all of them, each in a container.
#
#   DORA_TOKEN=$(head -c 24 /dev/urandom | base64) OPTIONS=--gpus=all SHM=110g \
#     launch/ssh.sh hosts.txt configs/nodes-2x8.toml
#
# hosts.txt has a name or address per line, which the other hosts reach too. The image `dora` must be on each host; the
# first has the folders `runs`, writable for user 10001, `configs` and `data` in its home. RUNTIME names what runs
# containers there (docker, podman), OPTIONS are more options of its `run`, for GPUs or mounts, and SHM is the shared
# memory of a node. The token travels in the standard input of ssh, so that no process list shows it.
#
# A node that is lost and comes back is joined again by a second call with a file of that host alone, and CONTROLLER
# set to the first host. This file starts processes, and supervises none: docker restarts a container that fails.
set -euo pipefail

: "${DORA_TOKEN:?choose a random one}"
config=${2:-}
[ -n "${CONTROLLER:-$config}" ] || { echo "give a configuration" >&2; exit 2; }
mapfile -t hosts < <(grep -vE '^\s*(#|$)' "${1:?a file with a host per line}")
controller=${CONTROLLER:-${hosts[0]}}
runtime="${RUNTIME:-docker} run --detach --network=host --restart=on-failure:10 --env=DORA_TOKEN"

on() { # HOST COMMAND: run it there with DORA_TOKEN in its environment
  # shellcheck disable=SC2029  # it is made here
  ssh -o BatchMode=yes "$1" "read -r DORA_TOKEN; export DORA_TOKEN; $2" <<<"$DORA_TOKEN"
}

for host in "${hosts[@]}"; do
  on "$host" "$runtime --name=dora-node ${OPTIONS:-} --shm-size=${SHM:-64g} --env=DORA_CONTROLLER=$controller:8423 \
    --no-healthcheck dora node"
done
if [ -z "${CONTROLLER:-}" ]; then
  on "$controller" "$runtime --name=dora-run --volume=\$PWD/runs:/work/runs --volume=\$PWD/configs:/work/configs:ro \
    --volume=\$PWD/data:/work/data:ro dora run $config --continue"
  echo "ssh -L 8421:127.0.0.1:8421 $controller    # then http://127.0.0.1:8421; docker logs --follow dora-run there"
fi
