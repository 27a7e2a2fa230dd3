"""CPU time of titanlite's step on 2 processes over that of hand-written FSDP2 and tensor parallel on the same model.

    python benchmarks/parallel_step.py

Both loops start from the same weights and see the same batch; they take turns, a block of steps each, and the ratio is the
median over the rounds of the two ranks' CPU time together. A second hand-written loop shows the noise. Last, the chunked
loss over the plain one, in one process.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from titanlite.batch import Batch
from titanlite.config import ActivationCheckpoint, Config, LRScheduler, Model, Parallelism, Training
from titanlite.losses import chunk_loss, cross_entropy
from titanlite.models import get_model
from titanlite.models.llama import FLAVORS, LlamaArgs
from titanlite.parallel.parallelize import materialize
from titanlite.trainer import join, setup, train_step
from titanlite.verify.gang import Gang

SIZES = {"6M": (LlamaArgs(256, 8, 8, 4, 704, vocab_size=257), 8, 256), "tiny": (LlamaArgs(32, 2, 4, 2, 64, vocab_size=257), 2, 16)}
TARGET, LOSS_TARGET = 1.05, 1.1
TP_PLAN = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}
TP_BLOCK_PLAN = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
}


def handwritten(form: str, cfg: Config, batch: Batch, mesh) -> Callable[[], float]:
    """What one writes by hand: wrap, average over ranks, clip, step."""
    from titanlite.models.llama import plan

    model = get_model(cfg.model, torch.float32)
    device_mesh = mesh.dense["fsdp"] if form == "fsdp" else mesh.dense["tp"]
    if form == "fsdp":
        for block in model.layers.values():
            fully_shard(block, mesh=device_mesh)
        fully_shard(model, mesh=device_mesh)
    else:
        parallelize_module(model, device_mesh, TP_PLAN)
        for block in model.layers.values():
            parallelize_module(block, device_mesh, TP_BLOCK_PLAN)
    materialize([model], mesh, plan(model.args), cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optimizer.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss_and_backward() -> torch.Tensor:
        logits = model(batch.tokens, batch.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        return loss.detach()

    def step() -> float:
        if form == "tp":
            with loss_parallel():
                loss = loss_and_backward().full_tensor()
        else:
            loss = loss_and_backward()
            dist.all_reduce(loss)
            loss /= 2
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def measure(form: str, size: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """CPU seconds a step on this rank, of every round."""
    FLAVORS[size], rows, seq_len = SIZES[size]
    cfg = Config(
        model=Model(flavor=size),
        lr_scheduler=LRScheduler(warmup_steps=0, decay_ratio=0.0),
        training=Training(local_batch_size=rows, seq_len=seq_len, steps=10**6, mixed_precision_param="float32"),
        parallelism=Parallelism(tensor_parallel_degree=2 if form == "tp" else 1),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
    )
    mesh = join(cfg)
    generator = torch.Generator().manual_seed(mesh.batch_rank)
    tokens = torch.randint(0, 257, (rows, seq_len + 1), generator=generator)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(seq_len).repeat(rows, 1), None)
    run = setup(cfg, mesh)
    loops = {
        "titanlite": lambda: train_step(run, [batch], run.loss_fn).loss,
        "hand": handwritten(form, cfg, batch, mesh),
        "hand again": handwritten(form, cfg, batch, mesh),
    }
    first = {name: [loop() for _ in range(3)] for name, loop in loops.items()}
    for ours, theirs in zip(first["titanlite"], first["hand"]):
        assert abs(ours - theirs) < 1e-4 * theirs, f"the loops compute different things: {first}"
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for i in range(rounds):
        for name in [*loops][i % 3 :] + [*loops][: i % 3]:  # each goes first in turn
            dist.barrier()
            began = time.process_time()
            for _ in range(steps):
                loops[name]()
            seconds[name].append((time.process_time() - began) / steps)
    return seconds


def measure_loss(vocab_size: int, tokens: int, dim: int, rounds: int) -> float:
    """Time of the chunked loss, forward and backward, over that of head and plain loss."""
    hidden = torch.randn(1, tokens, dim, requires_grad=True)
    labels = torch.randint(0, vocab_size, (1, tokens))
    batch = Batch(labels, labels, labels, None)
    plain, chunked = nn.Linear(dim, vocab_size, bias=False), nn.Linear(dim, vocab_size, bias=False)
    losses = {"plain": (plain, cross_entropy), "chunked": (chunked, chunk_loss(chunked, 512))}
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for i in range(rounds + 1):
        for name, (head, loss_fn) in losses.items():
            began = time.process_time()
            loss_fn(head(hidden), batch).backward()
            if i:
                seconds[name].append(time.process_time() - began)
    return statistics.median(c / p for c, p in zip(seconds["chunked"], seconds["plain"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="6M")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    print(f"{'form':<8}{'titanlite ms':>14}{'by hand ms':>12}{'ratio':>8}{'noise':>8}{'target':>8}")
    for form in ("fsdp", "tp"):
        gang = Gang(2)
        ranks = gang.run(measure, form, args.size, args.rounds, args.steps)
        gang.close()
        totals = {name: [sum(both) for both in zip(*(rank[name] for rank in ranks))] for name in ranks[0]}
        ratio = statistics.median(a / b for a, b in zip(totals["titanlite"], totals["hand"]))
        noise = statistics.median(a / b for a, b in zip(totals["hand again"], totals["hand"]))
        ours, hand = (1000 * statistics.median(totals[name]) for name in ("titanlite", "hand"))
        print(f"{form:<8}{ours:>14.1f}{hand:>12.1f}{ratio:>8.3f}{noise:>8.3f}{TARGET:>8}", flush=True)
    torch.set_num_threads(1)
    size = (32_000, 2048, 256) if args.size != "tiny" else (500, 64, 16)
    print(f"chunked loss over plain, vocabulary {size[0]:,}: {measure_loss(*size, args.rounds):.3f} (target {LOSS_TARGET})")


if __name__ == "__main__":
    main()
