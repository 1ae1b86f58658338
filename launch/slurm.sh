#!/usr/bin/env bash
# A multi-node run under Slurm: one task per accelerator.
#
#   sbatch --nodes=2 --gpus-per-node=4 --ntasks-per-node=4 launch/slurm.sh [arguments for recipes/bert_classify.py]
#
# It starts the ranks with srun rather than with the launcher, which would need ssh between the nodes. DeepSpeed reads the
# same environment variables either way.
#SBATCH --job-name=avgpipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --requeue
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch, from the repository}"
# shellcheck disable=SC1091
source .venv/bin/activate

MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# Jobs that share a node need different ports.
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# --resume: a job that Slurm requeues continues from its last checkpoint; the first start finds none and begins anew.
# shellcheck disable=SC2016  # the inner shell expands these, once per task
srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_SIZE=$SLURM_NTASKS_PER_NODE
    exec python -u recipes/bert_classify.py --local_rank "$LOCAL_RANK" "$@"' recipe \
    --deepspeed_config ds_configs/bert_classify.json --stages 4 \
    --save-dir "checkpoints/$SLURM_JOB_ID" --save-every 100 --resume "$@"
