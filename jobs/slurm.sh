#!/bin/bash
# Train a recipe on several machines:
#
#     sbatch --nodes 4 jobs/slurm.sh big.toml /shared/runs/big
#
# The machines share the recipe, the data and the folder of the run. Five minutes before the time
# limit the training saves and ends, and the job is queued again; it then resumes. The same holds
# where Slurm takes the machines for another job.
#SBATCH --job-name=dualkg
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
set -euo pipefail

recipe=$1
run=$2
processes=${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}  # on each machine

# srun does not take the cores of a task from sbatch: each machine would have one.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / processes > 0 ? SLURM_CPUS_PER_TASK / processes : 1))
# Without it, a restart uses addresses of the processes before.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# The time for the last checkpoint, before processes are killed.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(srun --nodes 1 --ntasks 1 --nodelist "$host" python -c \
  'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')

requeue=0
stop() {
  requeue=1
  # All steps of the job, and not this script: torchrun passes it on, and dualkg saves.
  scancel --signal TERM "$SLURM_JOB_ID"
}
trap stop USR1 TERM

srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$processes" \
  --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint "$host:$port" \
  --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
  -m dualkg train "$recipe" --out "$run" --resume &
training=$!
status=0
wait "$training" || status=$?
# A signal ends the first wait, and not the training.
while kill -0 "$training" 2> /dev/null; do
  status=0
  wait "$training" || status=$?
done

if ((requeue)); then
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$status"
