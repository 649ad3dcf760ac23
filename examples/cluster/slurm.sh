#!/usr/bin/env bash
# A Ray cluster on a Slurm allocation, and `headrace train` on it. See docs/cluster.md.
#
#   sbatch examples/cluster/slurm.sh RECIPE [KEY=VALUE ...]
#
# Needs on every node, under the same path: this checkout with its .venv, the model, and the folder of run_dir.
# HEAD_ADDRESS, RAY_PORT and WORKERS may be set in the environment of sbatch.
#SBATCH --job-name=headrace
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=%x-%j.log
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "usage: sbatch $0 RECIPE.yaml [KEY=VALUE ...]" >&2
  exit 2
fi
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"
bin="$PWD/.venv/bin"

cpus=${SLURM_CPUS_PER_TASK:-1}
gpus=${SLURM_GPUS_ON_NODE:-0}
nodes=$SLURM_JOB_NUM_NODES
settings=(
  data_plane.impl=transfer_queue
  data_plane.num_storage_units="$nodes"
  cluster.num_nodes="$nodes"
  cluster.gpus_per_node="$gpus"
  logging.progress=off
)
# At most one per GPU, less one GPU per node: the rollout actor takes one. Without GPUs, one per node. A recipe may allow
# fewer only: policy.train_global_batch_size must divide by the data-parallel part of the workers.
most=$((gpus > 1 ? nodes * (gpus - 1) : nodes))
workers=$("$bin/python" - "${WORKERS:-$most}" "${WORKERS:-$nodes}" "$nodes" "$1" "${settings[@]}" "${@:2}" <<'CHOOSE'
import sys
from headrace.errors import ConfigError
from headrace.utils.recipe import load_recipe

most, fewest, step, recipe, *settings = sys.argv[1:]
reasons = []
for workers in range(int(most), int(fewest) - 1, -int(step)):
    try:
        load_recipe(recipe, [f"policy.workers={workers}", *settings])
    except ConfigError as error:
        reasons.append(f"{workers} workers: {error}")
        continue
    if reasons:
        print(f"slurm.sh: {workers} workers, the most that the recipe allows; {reasons[0]}", file=sys.stderr)
    print(workers)
    break
else:
    sys.exit(f"slurm.sh: {reasons[0]}")
CHOOSE
)
# Jobs that share a node must not share a port.
port=${RAY_PORT:-$((20000 + SLURM_JOB_ID % 10000))}

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# The batch script runs on the first node. Of several addresses, the first that is no IPv6; the others must reach it.
address=${HEAD_ADDRESS:-$(hostname --ip-address | tr ' ' '\n' | grep -v : | head -n 1)}

# Only processes with this job's token may use the cluster. It lies where all nodes read it, and goes with the job.
token="$PWD/.ray-token-$SLURM_JOB_ID"
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token"

# Actors get the environment of `ray start`, not the driver's: what they need goes here, before it.
export RAY_TMPDIR="/tmp/ray-$SLURM_JOB_ID"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0   # where the default route is not the fast network

ray_on() { # HOST ARGUMENTS: a node of the cluster, in the foreground of an srun step
  local host=$1
  shift
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" --cpus-per-task="$cpus" \
    "$bin/ray" start --block --disable-usage-stats --num-cpus="$cpus" --num-gpus="$gpus" "$@" &
  steps+=($!)
}

steps=()
driver=

stop_driver() { # Slurm's warning before the time limit, or scancel: leave a checkpoint
  if [ -z "$driver" ]; then exit 143; fi
  kill -INT "$driver" 2>/dev/null || true
}
stop_cluster() { # ends `ray start --block` on every node, and the actors with it
  trap - EXIT
  if [ "${#steps[@]}" -gt 0 ]; then
    kill -TERM "${steps[@]}" 2>/dev/null || true
    wait "${steps[@]}" 2>/dev/null || true
  fi
  srun --overlap --nodes="$nodes" --ntasks="$nodes" rm -rf "${RAY_TMPDIR:?}" || true
  rm -f "$token"
}
trap stop_driver TERM INT
trap stop_cluster EXIT

ray_on "${hosts[0]}" --head --node-ip-address="$address" --port="$port" --include-dashboard=false
for _ in $(seq 60); do
  if (exec 3<>"/dev/tcp/$address/$port") 2>/dev/null; then break; fi
  sleep 1
done
for host in "${hosts[@]:1}"; do
  ray_on "$host" --address="$address:$port"
done

export RAY_ADDRESS="$address:$port"
"$bin/python" - "$nodes" <<'PY'
import sys, time, ray

wanted, deadline = int(sys.argv[1]), time.monotonic() + 120
ray.init(logging_level="ERROR")  # at RAY_ADDRESS
while (found := sum(node["Alive"] for node in ray.nodes())) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"{found} of {wanted} Ray nodes are up after 120 s")
    time.sleep(1)
PY

"$bin/headrace" train "$1" policy.workers="$workers" "${settings[@]}" "${@:2}" &
driver=$!
# A trapped signal ends `wait` early; the driver then writes its checkpoint and ends by itself.
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2>/dev/null; do
  code=0
  wait "$driver" || code=$?
done
exit "$code"
