#!/bin/sh
# Prolog= of slurm.conf: no canary begins while the job runs, and one that runs is gone when this ends.
# It never keeps a job from starting: without gpuwatch there is no canary either.
PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none
gpuwatch pause canaries --for 7d >/dev/null || echo "gpuwatch: canaries are not paused"
exit 0
