#!/usr/bin/env bash
# A real SLURM on this machine, for tests: one node, no accounting, everything it writes under one folder.
#
#   tests/slurm/cluster.sh install        Debian packages, as root
#   tests/slurm/cluster.sh up DIR [CPUS]  start it; then `export SLURM_CONF=DIR/slurm.conf` and use sbatch, squeue, ...
#   tests/slurm/cluster.sh down DIR       stop what `up DIR` started
#
# Where this user may make memory groups (root, cgroup v1), SLURM kills a task that takes more memory than it asked for.
# Its two GPUs are links to other devices: SLURM counts them and tells each task its own. Partitions: `main`, whose jobs
# are requeued when a job of `urgent` wants their place, and `whole`, whose jobs get the node alone.
set -euo pipefail
PATH=$PATH:/usr/sbin

packages() {
    apt-get update --quiet
    apt-get install --yes --quiet --no-install-recommends munge slurmctld slurmd slurm-client
}

configure() {
    local dir=$1 cpus=$2 host memory user track=linuxproc task=none
    host=$(hostname -s) user=$(id -un)
    memory=$(free --mebi | awk '/^Mem:/ {print int($2 * 0.8)}')
    mkdir -p "$dir"/{spool,state,log,pid}
    install -d -m 700 "$dir/munge"
    [ -s "$dir/munge/key" ] || (umask 077 && head -c 128 /dev/urandom >"$dir/munge/key")
    ln -sf /dev/null "$dir/gpu0" && ln -sf /dev/zero "$dir/gpu1"  # gres/gpu leaves out what is no device
    echo "Name=gpu File=$dir/gpu[0-1]" >"$dir/gres.conf"
    if [ -w /sys/fs/cgroup/memory ] && mkdir -p /sys/fs/cgroup/memory/slurm 2>/dev/null; then
        track=cgroup task=cgroup
        printf '%s\n' CgroupPlugin=cgroup/v1 ConstrainRAMSpace=yes >"$dir/cgroup.conf"
    fi
    cat >"$dir/slurm.conf" <<CONF
ClusterName=kvsweep
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=$user
SlurmdUser=$user
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/pid/slurmctld
SlurmdPidFile=$dir/pid/slurmd
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/slurmd
PlugStackConfig=/dev/null
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for its credential to expire: two minutes unless told.
AuthInfo=socket=$dir/pid/munge.socket,cred_expire=5
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ProctrackType=proctrack/$track
TaskPlugin=task/$task
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=$((memory / 5))
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory Gres=gpu:2
PartitionName=main Nodes=$host Default=YES PriorityTier=1 GraceTime=0 DefaultTime=30
PartitionName=urgent Nodes=$host PriorityTier=9 PreemptMode=OFF DefaultTime=30
PartitionName=whole Nodes=$host OverSubscribe=EXCLUSIVE PriorityTier=1 DefaultTime=30
CONF
}

up() {
    local dir
    mkdir -p "$1" && dir=$(cd "$1" && pwd)
    configure "$dir" "${2:-2}"
    export SLURM_CONF=$dir/slurm.conf
    # --force: a scratch folder is writable by others higher up, which munge otherwise refuses.
    munged --force --key-file="$dir/munge/key" --socket="$dir/pid/munge.socket" --pid-file="$dir/pid/munged" \
        --log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
    slurmctld
    slurmd
    for _ in $(seq 100); do
        if sinfo --noheader --format=%T 2>/dev/null | grep -q idle; then return; fi
        sleep 0.2
    done
    echo "the node did not come up within 20 s; see $dir/log" >&2
    return 1
}

down() {
    local dir name pid
    dir=$(cd "$1" && pwd)
    export SLURM_CONF=$dir/slurm.conf
    scancel --quiet --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 50); do
        [ -n "$(squeue --noheader 2>/dev/null)" ] || break
        sleep 0.2
    done
    for name in slurmd slurmctld munged; do
        pid=$(cat "$dir/pid/$name" 2>/dev/null) || continue
        kill "$pid" 2>/dev/null || continue
        tail --pid="$pid" --sleep-interval=0.1 -f /dev/null &
        wait $! || true
    done
}

case "${1:-}" in
install) packages ;;
up) up "${2:?the folder to keep everything in}" "${3:-2}" ;;
down) down "${2:?the folder given to up}" ;;
*) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
