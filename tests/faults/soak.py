"""Kills runs at random, seeded points, one kill a run, starts them again, and compares them with runs that nothing befell.

    python -m tests.faults.soak --kills 100
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.gang import LAYOUTS, MODES, STEPS, Run, differences
from tests.faults.points import POINTS


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    started, bad, golden = time.monotonic(), 0, {}
    with tempfile.TemporaryDirectory() as root, open(Path(root) / "output.txt", "w") as output:
        for descriptor in (1, 2):  # the ranks' own, of which nobody reads
            os.dup2(output.fileno(), descriptor)
        for i in range(args.kills):
            generator = random.Random(f"{args.seed} {i}")
            layout, mode = generator.choice(list(LAYOUTS)), generator.choice(MODES)
            if (layout, mode) not in golden:
                golden[layout, mode] = Run(Path(root) / f"golden-{layout}-{mode}", layout, mode)
                assert golden[layout, mode].leg() == 0
            original = golden[layout, mode]
            fault = original.draw(generator.choice([point for point in POINTS if any(original.last.times[point])]), f"{args.seed} {i}")
            run = Run(Path(root) / str(i), layout, mode)
            problems = [] if run.killed(fault) else ["it was not killed"]
            problems += ["a process outlived its rank"] * run.last.outlived()
            before = len(run.records()) if (run.base / "records.jsonl").exists() else 0
            problems += [] if run.leg() == 0 else ["it did not go on"]
            problems += differences(run, original)
            records = run.records()
            reached, back_to = (records[before - 1]["step"] if before else 0), records[before]["step"] - 1 if len(records) > before else STEPS
            result = "; ".join(problems[:3]) or f"{STEPS}/{STEPS} steps equal"
            print(f"{i + 1:3} {layout:8} {mode:21} {fault.point:27} rank {fault.rank} time {fault.nth:<5} after step {reached:2}, on from {back_to:2}: {result}", file=out)
            bad += bool(problems)
    print(f"{args.kills} kills, {bad} runs that differ, {time.monotonic() - started:.0f} s", file=out)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
