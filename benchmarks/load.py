"""A load for the GPUs of this host: matmuls heavy enough to be held by the power limit.

    python load.py --seconds 60 [--busy 6 --idle 3]

With --busy and --idle the load works and rests in turn, so a recording beside it has edges.
"""

import argparse
import time

import torch

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--seconds", type=float, default=60.0)
PARSER.add_argument("--busy", type=float, default=0.0)
PARSER.add_argument("--idle", type=float, default=0.0)


def main() -> None:
    options = PARSER.parse_args()
    operands = []
    for index in range(torch.cuda.device_count()):
        generator = torch.Generator(device=f"cuda:{index}").manual_seed(index)
        operands.append(
            [
                torch.randn(
                    8192, 8192, device=f"cuda:{index}", dtype=torch.bfloat16, generator=generator
                )
                for _ in range(3)
            ]
        )
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        rest = min(end, time.monotonic() + (options.busy or options.seconds))
        while time.monotonic() < rest:
            for left, right, out in operands:
                for _ in range(10):
                    torch.matmul(left, right, out=out)
            for index in range(len(operands)):
                torch.cuda.synchronize(index)
        time.sleep(min(options.idle, max(0.0, end - time.monotonic())))


if __name__ == "__main__":
    main()
