"""A step of context parallel on 2 processes over the same step, all tokens, on one.

    python benchmarks/context.py

The two take turns. `wall` is the ratio of wall times (0.5 would be perfect), `cpu` that of the CPU time of all ranks (1.0 would be).
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from titanlite.batch import Batch
from titanlite.config import ActivationCheckpoint, Config, LRScheduler, Model, Parallelism, Training
from titanlite.models.llama import FLAVORS, LlamaArgs
from titanlite.trainer import join, place, setup, train_step
from titanlite.verify.gang import Gang

SIZES = {"6M": (LlamaArgs(256, 8, 8, 4, 704, vocab_size=257), 2048), "tiny": (LlamaArgs(32, 2, 4, 2, 64, vocab_size=257), 32)}

_runs: dict[tuple, tuple] = {}  # of this rank, kept between rounds


def measure(size: str, cp: int, method: str, steps: int) -> tuple[float, float]:
    """(wall, CPU) seconds a step on this rank."""
    key = (size, cp, method)
    if key not in _runs:
        FLAVORS[size], seq_len = SIZES[size]
        cfg = Config(
            model=Model(flavor=size),
            lr_scheduler=LRScheduler(warmup_steps=0, decay_ratio=0.0),
            training=Training(local_batch_size=1, seq_len=seq_len, steps=10**6, mixed_precision_param="float32"),
            parallelism=Parallelism(context_parallel_degree=cp, context_parallel_method=method),
            activation_checkpoint=ActivationCheckpoint(mode="none"),
        )
        run = setup(cfg, join(cfg))
        tokens = torch.randint(0, 257, (1, seq_len + 1), generator=torch.Generator().manual_seed(0))
        batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(seq_len)[None], None)
        _runs[key] = run, [place(run, batch)]
        for _ in range(2):
            train_step(run, _runs[key][1], run.loss_fn)
    run, batches = _runs[key]
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        train_step(run, batches, run.loss_fn)
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="6M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    print(f"{'method':<12}{'one rank ms':>12}{'cp=2 ms':>10}{'wall':>7}{'cpu':>7}")
    one, two = Gang(1), Gang(2)
    try:
        for method in ("allgather", "ring", "ulysses"):
            walls, cpus, ours, theirs = [], [], [], []
            for _ in range(args.rounds):
                ((wall, cpu),) = one.run(measure, args.size, 1, "allgather", args.steps)
                ranks = two.run(measure, args.size, 2, method, args.steps)
                ours.append(max(r[0] for r in ranks))
                theirs.append(wall)
                walls.append(ours[-1] / wall)
                cpus.append(sum(r[1] for r in ranks) / cpu)
            times = f"{1000 * statistics.median(theirs):>12.0f}{1000 * statistics.median(ours):>10.0f}"
            print(f"{method:<12}{times}{statistics.median(walls):>7.2f}{statistics.median(cpus):>7.2f}", flush=True)
    finally:
        one.close()
        two.close()


if __name__ == "__main__":
    main()
