#!/bin/sh
# Epilog= of slurm.conf, for nodes that serve one job at a time: canaries between two jobs, on all
# GPUs side by side, 15 s at most. Slurm drains a node whose epilog fails, so this fails if a GPU
# became slow or computes wrongly; what could not be tried (somebody is still on a GPU, no torch)
# drains nothing.
PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none
gpuwatch resume canaries >/dev/null
# With the daemon's config: its [canary] python is the one that the baselines are of.
told=$(gpuwatch canary run --between-jobs --budget 15s --config /etc/gpuwatch/config.toml 2>&1)
if [ $? -eq 2 ]; then
  echo "gpuwatch: $told"
  exit 1
fi
exit 0
