#!/bin/sh
# HealthCheckProgram= of slurm.conf: drains a node that gpuwatch wants drained, reset or rebooted, and
# takes it back once that is over. It reads the cached verdict: no GPU is touched, and a job waits for
# nothing. A node that somebody else drained is left as it is.
PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none
node=$(hostname -s)
told=$(gpuwatch verdict)
code=$?
is=$(scontrol show node "$node")
case "$code" in
  2)
    case "$is" in
      *DRAIN*) ;;
      *) scontrol update nodename="$node" state=drain reason="gpuwatch: $told" ;;
    esac
    ;;
  0 | 1)
    case "$is" in
      *Reason=gpuwatch:*) scontrol update nodename="$node" state=resume ;;
    esac
    ;;
esac
exit 0
