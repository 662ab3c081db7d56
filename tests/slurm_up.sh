#!/usr/bin/env bash
# Starts a one-node Slurm on this machine for the tests: as root, without systemd, on the loopback interface only.
#
#     tests/slurm_up.sh up|down|status
#     export SLURM_CONF=/tmp/slurm/slurm.conf      # printed by up; then sbatch, squeue and sinfo work
#
# Needs apt-get install slurm-wlm munge. All its files are in SLURM_ROOT, /tmp/slurm by default.
set -euo pipefail

root=${SLURM_ROOT:-/tmp/slurm}
export SLURM_CONF=$root/slurm.conf

write_config() {
  local node cores megabytes
  node=$(hostname -s)
  cores=$(nproc)
  megabytes=$(awk '/^MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
  cat >"$SLURM_CONF" <<END
ClusterName=test
SlurmUser=root
SlurmdUser=root
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=26817
SlurmdPort=26818
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket=$root/munge.socket
SlurmctldPidFile=$root/slurmctld.pid
SlurmdPidFile=$root/slurmd.pid
SlurmctldLogFile=$root/slurmctld.log
SlurmdLogFile=$root/slurmd.log
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool
# No cgroups: containers rarely permit them.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2
ReturnToService=2
KillWait=30
NodeName=$node NodeAddr=127.0.0.1 CPUs=$cores RealMemory=$megabytes
PartitionName=main Nodes=$node Default=YES MaxTime=INFINITE State=UP
END
}

up() {
  mkdir -p "$root"/state "$root"/spool
  chmod 755 "$root"
  if [ ! -s "$root/munge.key" ]; then
    (umask 077 && head -c 128 /dev/urandom >"$root/munge.key")
  fi
  write_config
  # --force: munged objects to a key file owned by root
  munged --force --key-file="$root/munge.key" --socket="$root/munge.socket" --pid-file="$root/munged.pid" \
    --seed-file="$root/munge.seed" --log-file="$root/munged.log" 2>/dev/null
  slurmctld
  slurmd
  for _ in $(seq 60); do
    if sinfo --noheader --format=%t 2>/dev/null | grep -qE '^(idle|mix|alloc)$'; then
      echo "export SLURM_CONF=$SLURM_CONF"
      return
    fi
    sleep 0.5
  done
  echo "error: Slurm did not start within 30 s; see $root/slurmctld.log and $root/slurmd.log" >&2
  return 1
}

# Whether a process runs; one that has ended, but that nobody waits for, does not.
runs() {  # PID
  grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status"
}

down() {
  local name pid
  for name in slurmd slurmctld munged; do
    pid=$(cat "$root/$name.pid" 2>/dev/null || true)
    if [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$name" ]; then
      kill "$pid"
      while runs "$pid"; do sleep 0.1; done
    fi
  done
}

case ${1:-} in
up) down && up ;;
down) down ;;
status) sinfo --Node --long ;;
*)
  echo "usage: $0 up|down|status" >&2
  exit 2
  ;;
esac
