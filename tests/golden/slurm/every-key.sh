#!/bin/bash
# Run r1, stage train, attempt 1. Written by trainwright and submitted as it stands;
# what only the submit knows, the jobs to wait for, is on sbatch's command line (see run/events).
#SBATCH --job-name=first-run-lane
#SBATCH --comment='trainwright:r1:train:1 second try, longer'
#SBATCH --partition=gpu,big
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --time=2-12:00:00
#SBATCH --signal=USR1@300
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --gres=gpu:a100:8
#SBATCH --constraint='efa&a100'
#SBATCH --nodelist='n[1-4]'
#SBATCH --exclude=n9
#SBATCH --reservation=maintenance
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=someone@example.org
#SBATCH --output=/fsx/experiments/gpt_small/r1/run/logs/train-a1-job.log
#SBATCH --open-mode=append
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --no-requeue
#SBATCH --licenses=matlab:1
#SBATCH --nice

module load cuda
ulimit -n 65536
# One task per node: the worker, which starts the ranks. Their output is in files of their own, not here.
code=0
srun \
  --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 --cpu-bind=none \
  --cpus-per-task=96 \
  --mpi=pmix \
  python3 /fsx/experiments/gpt_small/r1/run/worker.pyz /fsx/experiments/gpt_small/r1 --stage train --attempt 1 \
  > /dev/null || code=$?

exit "$code"
