"""CPU time of titanlite's train step over that of a bare PyTorch loop with the same model, in one process.

    python benchmarks/train_step.py

All loops start from the same weights and see the same batches. They take turns, a block of steps each in random order, so that
whatever else the machine does hits all alike, and are built anew several times, because where their memory lies counts
too. The ratio is the median over the rounds; a second bare loop shows the noise. In bf16 the bare loop is the cheaper of
autocast and of a bf16 copy of fp32 weights.
"""

import argparse
import copy
import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from titanlite.batch import Batch
from titanlite.config import ActivationCheckpoint, Config, LRScheduler, Model, Optimizer, Training
from titanlite.models import get_model, get_plan
from titanlite.models.llama import FLAVORS, LlamaArgs
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.parallelize import materialize
from titanlite.trainer import join, next_microbatches, setup, train_step

SIZES = {"6M": LlamaArgs(256, 8, 8, 4, 704, vocab_size=257), "tiny": LlamaArgs(32, 2, 4, 2, 64, vocab_size=257)}
TARGETS = {2048: 1.02, 64: 1.05}  # tokens a step -> most that titanlite may take of the bare loop's time

Step = Callable[[], float]  # takes one optimizer step, returns its loss
Seconds = dict[str, list[float]]  # loop -> CPU seconds a step, of every round


def build_config(size: str, dtype: str, rows: int, seq_len: int, steps: int) -> Config:
    return Config(
        model=Model(flavor=size),
        lr_scheduler=LRScheduler(warmup_steps=0, decay_ratio=0.0),
        training=Training(local_batch_size=rows, seq_len=seq_len, steps=steps, mixed_precision_param=dtype),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
    )


def random_batches(cfg: Config, n: int = 32) -> list[Batch]:
    """Enough of them that the model does not learn them by heart: small gradients would need no clipping."""
    rows, seq_len = cfg.training.local_batch_size, cfg.training.seq_len
    tokens = torch.randint(257, (n, rows, seq_len + 1), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(seq_len).expand(rows, seq_len)
    return [Batch(t[:, :-1].contiguous(), t[:, 1:].contiguous(), positions, None) for t in tokens]


def titanlite_step(cfg: Config, mesh: Mesh, batches: list[Batch]) -> Step:
    run = setup(cfg, mesh)
    loader = itertools.cycle([batch] for batch in batches)
    return lambda: train_step(run, next_microbatches(run, loader), run.loss_fn).loss


def plain_model(cfg: Config, mesh: Mesh) -> nn.Module:
    """The model as it is, in fp32, with the initial weights of titanlite's."""
    model = get_model(cfg.model, torch.float32)
    materialize([model], mesh, get_plan(cfg.model), cfg)
    return model


def adamw(model: nn.Module, cfg: Optimizer) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps, cfg.weight_decay, fused=True)


def bare_step(cfg: Config, mesh: Mesh, batches: list[Batch], *, autocast: bool = False) -> Step:
    model = plain_model(cfg, mesh)
    optimizer = adamw(model, cfg.optimizer)
    loader = itertools.cycle(batches)

    def step() -> float:
        batch = next(loader)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(batch.tokens, batch.positions).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), batch.labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def bare_bf16_copy_step(cfg: Config, mesh: Mesh, batches: list[Batch]) -> Step:
    model = plain_model(cfg, mesh)
    optimizer = adamw(model, cfg.optimizer)
    loader = itertools.cycle(batches)
    bf16_model = copy.deepcopy(model)
    for p in bf16_model.parameters():
        p.data = p.data.to(torch.bfloat16)
    weights, bf16_weights = list(model.parameters()), list(bf16_model.parameters())

    def step() -> float:
        batch = next(loader)
        logits = bf16_model(batch.tokens, batch.positions).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), batch.labels.flatten())
        loss.backward()
        for p, q in zip(weights, bf16_weights):
            p.grad, q.grad = q.grad.float(), None
        nn.utils.clip_grad_norm_(weights, cfg.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(bf16_weights, weights)
        return loss.item()

    return step


def build_loops(cfg: Config, mesh: Mesh, batches: list[Batch]) -> dict[str, Step]:
    if cfg.training.mixed_precision_param == "float32":
        bare = {"bare": bare_step(cfg, mesh, batches), "bare again": bare_step(cfg, mesh, batches)}
    else:
        bare = {
            "bare, autocast": bare_step(cfg, mesh, batches, autocast=True),
            "bare, bf16 copy": bare_bf16_copy_step(cfg, mesh, batches),
            "bare, bf16 copy again": bare_bf16_copy_step(cfg, mesh, batches),
        }
    return bare | {"titanlite": titanlite_step(cfg, mesh, batches)}


def interleave(
    loops: dict[str, Step], rounds: int, steps: int, order: random.Random
) -> tuple[Seconds, dict[str, float]]:
    """(CPU seconds a step of every round, loss of step 4) of every loop. By then losses tell loops that do other work."""
    losses = {name: [step() for _ in range(4)][-1] for name, step in loops.items()}  # warms up too
    seconds: Seconds = {name: [] for name in loops}
    for _ in range(rounds):
        for name in order.sample(list(loops), len(loops)):
            start = time.process_time()
            for _ in range(steps):
                loops[name]()
            seconds[name].append((time.process_time() - start) / steps)
    return seconds, losses


def ratio(seconds: Seconds, name: str, reference: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[reference]))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6, help="of each build")
    parser.add_argument(
        "--block_tokens", type=int, default=640, help="a block has as many steps as fit in these, at least one"
    )
    parser.add_argument("--threads", type=int, default=1, help="more wait for one another, which counts as CPU time")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model: whether it runs")
    args = parser.parse_args(argv)
    if args.tiny:
        args.builds, args.rounds, args.block_tokens = 1, 2, 1
    return args


def main(argv: list[str] | None = None) -> int:
    options = parse_args(argv)
    torch.set_num_threads(options.threads)
    gc.disable()  # for all alike
    size = "tiny" if options.tiny else "6M"
    FLAVORS[size] = SIZES[size]
    shapes = [(2, 16)] if options.tiny else [(8, 256), (1, 64)]
    results = []
    print(f"torch={torch.__version__} threads={options.threads} rounds={options.builds}x{options.rounds} {SIZES[size]}")
    print(f"{'dtype':10}{'tokens':>7}  {'loop':24}{'cpu ms':>9}{'ratio':>8}{'loss 4':>11}")
    mesh, order = None, random.Random(0)
    for dtype, (rows, seq_len) in itertools.product(options.dtypes, shapes):
        steps = max(1, options.block_tokens // (rows * seq_len))
        cfg = build_config(size, dtype, rows, seq_len, steps=4 + options.rounds * steps)
        batches = random_batches(cfg)
        mesh = mesh or join(cfg)
        seconds: Seconds = {}
        for _ in range(options.builds):
            found, losses = interleave(build_loops(cfg, mesh, batches), options.rounds, steps, order)
            seconds = {name: seconds.get(name, []) + times for name, times in found.items()}
            gc.collect()

        bare = [name for name in seconds if name.startswith("bare") and not name.endswith("again")]
        reference = min(bare, key=lambda name: statistics.median(seconds[name]))
        again = next(name for name in seconds if name.endswith("again"))
        for name, times in seconds.items():
            print(
                f"{dtype:10}{rows * seq_len:7}  {name:24}{statistics.median(times) * 1e3:9.2f}"
                f"{ratio(seconds, name, reference):8.3f}{losses[name]:11.4f}",
                flush=True,
            )
        noise = ratio(seconds, again, again.removesuffix(" again"))
        results.append((dtype, rows * seq_len, ratio(seconds, "titanlite", reference), reference, noise))
    for dtype, n_tokens, measured, reference, noise in results:
        target = f", target at most {TARGETS[n_tokens]}" if n_tokens in TARGETS else ""
        print(
            f"{dtype} {n_tokens} tokens a step: titanlite / {reference} = {measured:.3f}{target} (bare again / bare = {noise:.3f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
