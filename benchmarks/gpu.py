"""What one GPU gives a Llama-8B-shaped cut: its ceilings, then speed and memory over length, recompute and compile.

    python benchmarks/gpu.py --json gpu.json     one CUDA GPU, at most 5 minutes
    python benchmarks/gpu.py --tiny              the same code on CPU, in seconds

Widths and vocabulary are the 8B model's, with a few of its layers. Parameters, gradients and AdamW's moments are bf16, 8 bytes
a parameter, so that they leave room on 80 GB: a measure of kernels and activations, not a way to train.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a clone is enough: nothing but torch need be installed

from titanlite.batch import Batch
from titanlite.config import ActivationCheckpoint, Compile
from titanlite.losses import cross_entropy
from titanlite.models.llama import FLAVORS, LlamaArgs, Model, flops_per_token, plan
from titanlite.observe.metrics import GIB, peak_tflops
from titanlite.parallel.compile import apply_recompute_and_compile

RECOMPUTE = {
    "none": ActivationCheckpoint(mode="none"),
    "op": ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    "full": ActivationCheckpoint(mode="full"),
}
COLUMNS = {  # name -> (width, format)
    "seq_len": (8, "d"), "rows": (5, "d"), "recompute": (10, ""), "compile": (8, ""), "step_ms": (10, ",.1f"),
    "tokens_per_s": (13, ",.0f"), "tflops": (11, ",.4g"), "mfu": (7, ".1%"), "of_matmul": (10, ".1%"),
    "allocated_gib": (14, ".2f"), "reserved_gib": (13, ".2f"), "first_step_s": (13, ".1f"),
}  # fmt: skip
WHICH = ("seq_len", "rows", "recompute", "compile")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n_layers", type=int, default=4)
    parser.add_argument("--seq_lens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument(
        "--tokens", type=int, default=8192, help="a step has as many rows as fit in these, at least one"
    )
    parser.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=list(RECOMPUTE))
    parser.add_argument("--compile", nargs="+", choices=["off", "on"], default=["off", "on"])
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--steps", type=int, default=5, help="timed steps a row, after two others")
    parser.add_argument("--budget_s", type=float, default=300, help="rows that don't fit in are skipped")
    parser.add_argument("--json", type=Path, help="write the result here, after every row")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU: --tiny runs the same code with tiny sizes on CPU")
    if args.tiny:
        args.seq_lens, args.tokens, args.n_layers, args.steps, args.backend = [32, 64], 64, 2, 2, "aot_eager"
    return args


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(fn: Callable[[], Any], device: torch.device, *, calls: int, rounds: int = 5) -> float:
    """Seconds a call, of the best round."""
    best = float("inf")
    for timed in range(rounds + 1):  # the first round warms up
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        synchronize(device)
        if timed:
            best = min(best, (time.perf_counter() - start) / calls)
    return best


def matmul_ceiling_tflops(device: torch.device, *, tiny: bool) -> float:
    """The best of square bf16 products, of random numbers: zeros draw less power and run faster than real work."""
    best = 0.0
    for n in [256] if tiny else [8192, 16384]:
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        best = max(best, 2 * n**3 / seconds_of(lambda: torch.mm(a, b, out=out), device, calls=10) / 1e12)  # noqa: B023
    return best


def copy_ceiling_gb_per_s(device: torch.device, *, tiny: bool) -> float:
    """Bytes read plus bytes written by a copy within the device's memory."""
    source = torch.ones((2**20 if tiny else 2**31), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), device, calls=10) / 1e9


def build_step(args: LlamaArgs, recompute: str, compiled: Compile, batch: Batch) -> Callable[[], None]:
    """One optimizer step of a new model with the real passes, on the batch's device."""
    device = batch.tokens.device
    with torch.device("meta"):
        model = Model(args).to(torch.bfloat16)
    apply_recompute_and_compile(model, plan(args), RECOMPUTE[recompute], compiled)
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers(device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.init_parameter(name, parameter, generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    loss_fn = torch.compile(cross_entropy, backend=compiled.backend) if compiled.enable else cross_entropy

    def step() -> None:
        loss = loss_fn(model(batch.tokens, batch.positions, batch.documents), batch) / batch.labels.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def random_batch(vocab_size: int, rows: int, seq_len: int, device: torch.device) -> Batch:
    tokens = torch.randint(vocab_size, (rows, seq_len + 1), device=device)
    positions = torch.arange(seq_len, device=device).expand(rows, seq_len)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, None)


def time_steps(step: Callable[[], None], steps: int, device: torch.device) -> tuple[float, float]:
    """(seconds of the first step with whatever it compiles, median seconds of a later one)."""
    times = []
    for _ in range(2 + steps):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[2:])


def measure(args: LlamaArgs, batch: Batch, recompute: str, compiled: Compile, steps: int) -> dict[str, float | None]:
    """One row's figures. Raises torch.OutOfMemoryError where the device is too small."""
    torch.compiler.reset()  # or another length would be compiled with a symbolic one
    device, n_tokens = batch.tokens.device, batch.tokens.numel()
    first_step_s, step_s = time_steps(build_step(args, recompute, compiled, batch), steps, device)
    tokens_per_s = n_tokens / step_s
    on_gpu = device.type == "cuda"
    return {
        "step_ms": step_s * 1e3,
        "tokens_per_s": tokens_per_s,
        "tflops": flops_per_token(args, batch.tokens.shape[1]) * tokens_per_s / 1e12,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if on_gpu else None,
        "first_step_s": first_step_s,
    }


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def line(row: dict[str, Any]) -> str:
    cells = {name: "n/a" if row.get(name) is None else format(row[name], form) for name, (_, form) in COLUMNS.items()}
    known = COLUMNS if "outcome" not in row else WHICH
    return "".join(cells[name].rjust(COLUMNS[name][0]) for name in known) + f"  {row.get('outcome', '')}".rstrip()


def main(argv: list[str] | None = None) -> int:
    start = time.perf_counter()
    options = parse_args(argv)
    device = torch.device("cpu" if options.tiny else "cuda")
    args = dataclasses.replace(FLAVORS["8B"], n_layers=options.n_layers)
    if options.tiny:
        args = LlamaArgs(64, options.n_layers, 4, 2, 128, vocab_size=256)
    result = {
        "device": "cpu" if options.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": dataclasses.asdict(args),
        "peak_tflops": peak_tflops(device),
        "matmul_tflops": matmul_ceiling_tflops(device, tiny=options.tiny),
        "copy_gb_per_s": copy_ceiling_gb_per_s(device, tiny=options.tiny),
        "rows": [],
    }
    free(device)
    print(
        "device={device} torch={torch} python={python} matmul={matmul_tflops:.4g} TFLOP/s copy={copy_gb_per_s:.4g} GB/s "
        "data_sheet={sheet}".format(**result, sheet=f"{result['peak_tflops'] or 'n/a'} TFLOP/s")
    )
    print(args)
    print("".join(name.rjust(width) for name, (width, _) in COLUMNS.items()), flush=True)

    expected_s = {"off": 10.0, "on": 60.0}  # of a row, until one was measured
    for compiled, seq_len, recompute in itertools.product(options.compile, options.seq_lens, options.recompute):
        rows = max(1, options.tokens // seq_len)
        row: dict[str, Any] = {"seq_len": seq_len, "rows": rows, "recompute": recompute, "compile": compiled}
        used_s = time.perf_counter() - start
        if used_s + expected_s[compiled] > options.budget_s:
            row["outcome"] = (
                f"skipped: {used_s:.0f} s of --budget_s {options.budget_s:.0f} are used, a row takes {expected_s[compiled]:.0f}"
            )
        else:
            cfg = Compile(enable=compiled == "on", backend=options.backend)
            try:
                row |= measure(
                    args, random_batch(args.vocab_size, rows, seq_len, device), recompute, cfg, options.steps
                )
            except torch.OutOfMemoryError:
                row["outcome"] = "out of memory"
            else:
                row["mfu"] = result["peak_tflops"] and row["tflops"] / result["peak_tflops"]
                row["of_matmul"] = row["tflops"] / result["matmul_tflops"]
            free(device)
            expected_s[compiled] = time.perf_counter() - start - used_s
        result["rows"].append(row)
        print(line(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")

    measured = [row for row in result["rows"] if "outcome" not in row]
    print(f"{len(measured)} of {len(result['rows'])} rows measured in {time.perf_counter() - start:.0f} s")
    if measured:
        best = max(measured, key=lambda row: row["tflops"])
        print(
            f"best: {best['tflops']:.4g} TFLOP/s, {best['of_matmul']:.1%} of the matmul ceiling, with "
            + " ".join(f"{k}={best[k]}" for k in WHICH)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
