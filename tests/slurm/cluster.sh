#!/bin/bash
# A Slurm cluster of NODES nodes n1, n2, ... on this machine, as root and without systemd: munged, slurmctld and a slurmd
# for each node. Its files, among them slurm.conf for SLURM_CONF, are in FOLDER.
#
#   unshare --mount --net --pid --fork --kill-child --mount-proc tests/slurm/cluster.sh FOLDER NODES
#
# In these namespaces all of it ends with the script, ports are free, and the names of the nodes lead to this machine.
set -euo pipefail

folder=$1 nodes=$2 port=17000
mkdir --parents "$folder"/{state,spool,munge}
{ cat /etc/hosts; seq --format='127.0.0.1 n%g' "$nodes"; } >"$folder/hosts"
ip link set lo up
ip address add 10.0.0.1/32 dev lo # or getaddrinfo() would find that there is no IPv4
mount --bind "$folder/hosts" /etc/hosts

cat >"$folder/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=0
InactiveLimit=0
SchedulerParameters=sched_interval=2,batch_sched_delay=1
KillWait=10
$(for i in $(seq "$nodes"); do
  echo "NodeName=n$i NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((port + i)) CPUs=$(nproc)"
done)
PartitionName=all Nodes=ALL Default=YES State=UP
END
export SLURM_CONF=$folder/slurm.conf

(umask 077 && head --bytes=128 /dev/urandom >"$folder/munge/key")
chmod 755 "$folder/munge"
munged --force --foreground --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
  --pid-file="$folder/munge/pid" --seed-file="$folder/munge/seed" --log-file="$folder/munge/log" &
until [ -S "$folder/munge/socket" ]; do sleep 0.1; done
slurmctld -D -c >"$folder/slurmctld.log" 2>&1 &
for i in $(seq "$nodes"); do
  slurmd -D -N "n$i" >"$folder/slurmd-n$i.log" 2>&1 &
done
wait
