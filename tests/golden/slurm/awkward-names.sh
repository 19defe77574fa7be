#!/bin/bash
# Run r1, stage train, attempt 1. Written by trainwright and submitted as it stands;
# what only the submit knows, the jobs to wait for, is on sbatch's command line (see run/events).
#SBATCH --job-name=r1-train
#SBATCH --comment=trainwright:r1:train:1
#SBATCH --time=0-12:00:00
#SBATCH --signal=USR1@180
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output='/fsx/it'"'"'s a $HOME 100%%/r1/run/logs/train-a1-job.log'
#SBATCH --open-mode=append
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --exclusive
#SBATCH --requeue

# One task per node: the worker, which starts the ranks. Their output is in files of their own, not here.
code=0
srun \
  --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 --cpu-bind=none \
  '/opt/my python/bin/python' '/fsx/it'"'"'s a $HOME 100%/r1/run/worker.pyz' '/fsx/it'"'"'s a $HOME 100%/r1' --stage train --attempt 1 \
  > /dev/null || code=$?

# 75: told in time that the limit is near, state saved. Slurm runs this job again, as the next attempt.
if [ "$code" -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
  '/opt/my python/bin/python' '/fsx/it'"'"'s a $HOME 100%/r1/run/worker.pyz' '/fsx/it'"'"'s a $HOME 100%/r1' --stage train --attempt 1 --announce-requeue
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
