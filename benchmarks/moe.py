"""CPU time of forward and backward of a model of experts over that of a dense one with equal active FLOPs, on one rank.

    python benchmarks/moe.py

A token's experts have together the width of the dense feed-forward layer; everything else is the same. Both are built anew several
times and take turns; the ratio is the median over the rounds. A second dense model shows the noise. What is left over 1 is routing,
moving rows to their experts and back, and products of fewer rows each.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from titanlite.batch import Batch
from titanlite.losses import cross_entropy
from titanlite.models.decoder import Decoder, DecoderArgs, flops_per_token
from titanlite.models.moe import MoEArgs

N_EXPERTS, TOP_K = 16, 4
TARGET = 1.3


def sizes(dim: int, n_layers: int, experts: bool) -> DecoderArgs:
    moe = MoEArgs(N_EXPERTS, TOP_K, 4 * dim // TOP_K) if experts else None
    return DecoderArgs(dim, n_layers, dim // 32, dim // 64, 4 * dim, 257, moe=moe)


def build(args: DecoderArgs, dtype: torch.dtype, batch: Batch) -> Callable[[], None]:
    """One forward and backward of a new model."""
    model = Decoder(args)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.init_parameter(name, parameter, generator)
    model.to(dtype)

    def step() -> None:
        cross_entropy(model(batch.tokens, batch.positions), batch).backward()
        model.zero_grad(set_to_none=False)

    return step


def measure(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """CPU seconds a step, in blocks that take turns."""
    seconds = dict.fromkeys(steps, 0.0)
    for step in steps.values():
        step()
    order = list(steps) * repeats
    random.shuffle(order)
    gc.disable()
    for name in order:
        start = time.process_time()
        steps[name]()
        seconds[name] += time.process_time() - start
    gc.enable()
    return {name: s / repeats for name, s in seconds.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--n_layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    tokens = torch.randint(257, (options.rows, options.seq_len + 1), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.arange(options.seq_len).expand(options.rows, -1), None)
    dense, experts = (sizes(options.dim, options.n_layers, e) for e in (False, True))
    flops = [flops_per_token(args, options.seq_len) for args in (dense, experts)]
    print(f"{N_EXPERTS} experts, {TOP_K} a token; active FLOPs over dense {flops[1] / flops[0]:.3f}")
    for dtype in (torch.float32, torch.bfloat16):
        rounds = []
        for _ in range(options.rounds):
            steps = {"dense": build(dense, dtype, batch), "again": build(dense, dtype, batch), "experts": build(experts, dtype, batch)}
            rounds.append(measure(steps, options.repeats))
        ratio, noise = (statistics.median(r[name] / r["dense"] for r in rounds) for name in ("experts", "again"))
        dense_ms = 1e3 * statistics.median(r["dense"] for r in rounds)
        print(f"{str(dtype).removeprefix('torch.'):<9} dense {dense_ms:7.1f} ms  experts / dense {ratio:.3f} (at most {TARGET})  dense / dense {noise:.3f}")


if __name__ == "__main__":
    main()
