"""Seconds from python's start to the end of step 1: `python -m titanlite.train` over a bare script that does the same work.

    python benchmarks/startup.py

Both train the debug recipe's model on Python's standard library and are ended when they have printed step 1. They take
turns; the figures are medians. What torchrun adds is not counted.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET_S = 1.2  # most that titanlite may take over the bare script

BARE = """
import sysconfig
from pathlib import Path
import torch
import torch.nn.functional as F
from titanlite.models.llama import FLAVORS, Model

model = Model(FLAVORS["debugmodel"])
for name, parameter in model.named_parameters():
    with torch.no_grad():
        model.init_parameter(name, parameter, torch.Generator().manual_seed(0))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True)
text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
rows = torch.frombuffer(bytearray(text[: 8 * 257]), dtype=torch.uint8).long().view(8, 257)
logits = model(rows[:, :-1], torch.arange(256).expand(8, 256))
loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print(f"step 1 loss {loss.item():.4f}", flush=True)
"""


def command(name: str, folder: str) -> list[str]:
    if name.startswith("bare"):
        return ["-c", BARE]
    return ["-m", "titanlite.train", "train_configs/debug.toml", "--job.dump_folder", folder]


def run_to_step_1(name: str, *options: str) -> tuple[float, float, str]:
    """(wall seconds, CPU seconds, what went to stderr)."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *options, *command(name, folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        reached = any(line.startswith("step") for line in process.stdout)
        wall_s = time.perf_counter() - start
        process.kill()
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0  # already waited for
        process.stdout.close()
        errors.seek(0)
        text = errors.read()
        if not reached:
            raise RuntimeError(f"{name} ended before step 1:\n{text[-2000:]}")
        return wall_s, usage.ru_utime + usage.ru_stime, text


def import_seconds(name: str) -> dict[str, float]:
    """Module -> seconds of its own import, without what it imports."""
    _, _, text = run_to_step_1(name, "-X", "importtime")
    seconds = {}
    for line in text.splitlines():
        if line.startswith("import time:") and "self [us]" not in line:
            own_us, _, module = line.removeprefix("import time:").split("|")
            seconds[module.strip()] = int(own_us) / 1e6
    return seconds


def package(module: str) -> str:
    """The part of a module's name to sum by: two names deep in torch, where most modules are."""
    return ".".join(module.split(".")[: 2 if module.startswith("torch") else 1])


def print_imports(most: int = 8) -> None:
    bare, full = import_seconds("bare"), import_seconds("titanlite")
    extra: Counter[str] = Counter()
    for module in full.keys() - bare.keys():
        extra[package(module)] += full[module]
    print(
        f"imports: bare {sum(bare.values()):.2f} s, titanlite {sum(full.values()):.2f} s; of modules that bare lacks:"
    )
    for name, seconds in extra.most_common(most):
        print(f"  {name:30}{seconds:7.3f} s")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    names = ["bare", "bare again", "titanlite"]
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    print_imports()  # first: it fills the file cache too
    for turn in range(options.rounds):
        for name in names[turn % 3 :] + names[: turn % 3]:
            runs[name].append(run_to_step_1(name)[:2])

    print(f"{'':12}{'wall s':>8}{'over bare':>11}{'cpu s':>8}{'over bare':>11}")
    over = {}
    for name in names:
        wall_s, cpu_s = (statistics.median(column) for column in zip(*runs[name]))
        pairs = list(zip(runs[name], runs["bare"]))
        over[name] = [statistics.median(a[i] - b[i] for a, b in pairs) for i in (0, 1)]
        print(f"{name:12}{wall_s:8.2f}{over[name][0]:11.2f}{cpu_s:8.2f}{over[name][1]:11.2f}")
    wall_s, cpu_s = over["titanlite"]
    print(
        f"titanlite over bare to the end of step 1: {wall_s:.2f} s wall, {cpu_s:.2f} s CPU (target at most {TARGET_S} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
