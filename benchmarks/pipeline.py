"""Idle time of each pipeline schedule as executed, against its closed form.

    python benchmarks/pipeline.py

Each of 2 processes records when it computes: forward F, backward B, or its two halves I (inputs) and W (weights), of one
microbatch of one stage. What lies between the first start and the last end on any rank and is not computing is idle. The
closed forms are given the means of the recorded times, p ranks and stages numbered over all ranks:

    GPipe, 1F1B, Interleaved1F1B, LoopedBFS   (p - 1) (F + B)            arXiv 2104.04473
    InterleavedZeroBubble                     (p - 1) (F + I - W)        arXiv 2401.10241, ZB-H1
    ZBVZeroBubble                             (p - 1) (F + I - 2 W)      arXiv 2401.10241, ZB-V
    DualPipeV                                 (p - 1) (F + 2 B - 3 W)    arXiv 2412.19437, without overlap of F and B

The last three hold where F, I and W are near one another. Two shared cores are noisy: the median over steps is shown.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from titanlite.batch import Batch
from titanlite.config import ActivationCheckpoint, Config, LRScheduler, Model, Parallelism, Training
from titanlite.losses import cross_entropy
from titanlite.models.llama import FLAVORS, LlamaArgs
from titanlite.parallel.stages import ONE_STAGE
from titanlite.trainer import join, setup, train_step
from titanlite.verify.gang import Gang

SIZES = {"6M": (LlamaArgs(256, 8, 8, 4, 704, vocab_size=257), 256), "tiny": (LlamaArgs(32, 4, 4, 2, 64, vocab_size=257), 16)}
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
Action = tuple[str, float, float]  # F, B, I or W; start and end in seconds of one clock


def actions_of(schedule: str, size: str, microbatches: int, steps: int) -> list[list[Action]]:
    """What this rank computed in each step."""
    from torch.distributed.pipelining import PipelineStage

    FLAVORS[size], seq_len = SIZES[size]
    cfg = Config(
        model=Model(flavor=size),
        lr_scheduler=LRScheduler(warmup_steps=0, decay_ratio=0.0),
        training=Training(local_batch_size=microbatches, seq_len=seq_len, steps=10**6, mixed_precision_param="float32"),
        parallelism=Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
    )
    run = setup(cfg, join(cfg))
    tokens = torch.randint(0, 257, (microbatches, seq_len + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(seq_len).repeat(microbatches, 1), None)
    actions: list[Action] = []

    def timed(fn, kind):
        def wrapper(*args, **kwargs):
            began = time.perf_counter()
            result = fn(*args, **kwargs)
            actions.append((kind if kwargs.get("full_backward", True) else "I", began, time.perf_counter()))
            return result

        return wrapper

    def loss_fn(logits: Tensor, batch: Batch) -> Tensor:  # a part of the last stage's forward
        return cross_entropy(logits, batch)

    recorded = []
    with (
        mock.patch.object(PipelineStage, "forward_one_chunk", timed(PipelineStage.forward_one_chunk, "F")),
        mock.patch.object(PipelineStage, "backward_one_chunk", timed(PipelineStage.backward_one_chunk, "B")),
        mock.patch.object(PipelineStage, "backward_weight_one_chunk", timed(PipelineStage.backward_weight_one_chunk, "W")),
    ):
        for _ in range(steps + 2):
            train_step(run, [batch], timed(loss_fn, "loss"))
            recorded.append(list(actions))
            actions.clear()
    return recorded[2:]


def idle(ranks: list[list[Action]]) -> tuple[float, dict[str, float]]:
    """(seconds a rank is idle in a step, on the mean; mean seconds of each kind of action)."""
    flat = [action for rank in ranks for action in rank]
    span = max(end for _, _, end in flat) - min(start for _, start, _ in flat)
    busy = sum(end - start for _, start, end in flat) / len(ranks)
    means = {}
    for kind in "FBIW":
        times = [end - start for k, start, end in flat if k == kind]
        means[kind] = sum(times) / len(times) if times else 0.0
    return (span - busy) / span, means | {"busy": busy}


def closed_form(schedule: str, ranks: int, t: dict[str, float]) -> float:
    """Share of a step that a rank is idle."""
    if schedule == "InterleavedZeroBubble":
        bubble = t["F"] + t["I"] - t["W"]
    elif schedule == "ZBVZeroBubble":
        bubble = t["F"] + t["I"] - 2 * t["W"]
    elif schedule == "DualPipeV":
        bubble = t["F"] + 2 * (t["I"] + t["W"]) - 3 * t["W"]
    else:
        bubble = t["F"] + t["B"]
    bubble = max(bubble, 0.0) * (ranks - 1)
    return bubble / (t["busy"] + bubble)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="6M")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    args = parser.parse_args()
    print(f"{'schedule':<24}{'stages':>7}{'F ms':>8}{'B ms':>8}{'I ms':>8}{'W ms':>8}{'idle':>8}{'closed form':>13}")
    gang = Gang(2)
    try:
        for schedule in SCHEDULES:
            ranks = gang.run(actions_of, schedule, args.size, args.microbatches, args.steps)
            results = [idle([rank[step] for rank in ranks]) for step in range(args.steps)]
            shares = [share for share, _ in results]
            means = {kind: statistics.median(m[kind] for _, m in results) for kind in results[0][1]}
            times = "".join(f"{1000 * means[kind]:>8.1f}" for kind in "FBIW")
            stages = 2 if schedule in ONE_STAGE else 4
            print(f"{schedule:<24}{stages:>7}{times}{statistics.median(shares):>8.1%}{closed_form(schedule, 2, means):>13.1%}", flush=True)
    finally:
        gang.close()


if __name__ == "__main__":
    main()
