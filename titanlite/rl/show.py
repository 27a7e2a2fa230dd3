"""The samples that a run of reinforcement kept, for the terminal: `titanlite rollouts RUN`. No torch."""

import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from titanlite.utils import ConfigError, nearest

SORTS = {"reward": lambda sample: (sample["reward"] is None, -(sample["reward"] or 0)), "length": lambda sample: -sum(sample["drawn"])}


def show_rollouts(run: Path, *, step: int | None, sort: str | None, source: str | None, failed: bool, limit: int) -> None:
    """Prints a line a step, then the samples of one step, the newest if none is given. Raises ConfigError where there is none to show."""
    if not run.is_dir():
        raise ConfigError(f"{run} is no run's folder{nearest(run.name, [p.name for p in run.parent.glob('*/')])}")
    files = {int(found[1]): file for file in (run / "rollouts").glob("step-*.jsonl") if (found := re.fullmatch(r"step-(\d+)\.jsonl", file.name))}
    if not files:
        raise ConfigError(f"{run / 'rollouts'} holds no samples: titanlite rl keeps them there, a file a step")
    step = max(files) if step is None else step
    if step not in files:
        raise ConfigError(f"--step={step}: no samples of it are kept: the nearest is step {min(files, key=lambda other: abs(other - step))}, the last {max(files)}")
    print(f"{'step':>8} {'samples':>8} {'reward':>8} {'spread':>8} {'tokens':>8} {'longest':>8} {'cut':>6} {'failed':>6}")
    for number in sorted(files):
        samples = _read(files[number])
        print(f"{number:>8} {_summary(samples)}")
        if number == step:
            shown = samples
    means = _means_by_problem(shown)
    sources = sorted({sample["source"] for sample in shown})
    if source is not None and source not in sources:
        raise ConfigError(f"--source={source}: step {step} has {', '.join(sources)}{nearest(source, sources)}")
    shown = [sample for sample in shown if source in (None, sample["source"]) and (sample["reward"] is None or not failed)]
    for sample in sorted(shown, key=SORTS[sort]) if sort else shown[:]:
        if not limit:
            print(f"\n{len(shown)} samples; --limit shows more of them")
            break
        limit -= 1
        print(f"\n{_told(sample, means)}")


def _read(file: Path) -> list[dict[str, Any]]:
    """Its samples; damaged lines are named and left out."""
    samples = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            sample = json.loads(line)
            _told(sample, {})
            samples.append(sample)
        except (ValueError, KeyError, TypeError) as error:
            print(f"{file}:{number} is damaged and left out: {type(error).__name__}: {error}", file=sys.stderr)
    return samples


def _summary(samples: list[dict[str, Any]]) -> str:
    rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
    lengths = [sum(sample["drawn"]) for sample in samples] or [0]
    mean = sum(rewards) / len(rewards) if rewards else math.nan
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) if rewards else math.nan
    cut = sum(not sample["ended"] for sample in samples)
    return f"{len(samples):>8} {mean:>8.3f} {spread:>8.3f} {sum(lengths) / len(lengths):>8.1f} {max(lengths):>8} {cut:>6} {len(samples) - len(rewards):>6}"


def _means_by_problem(samples: list[dict[str, Any]]) -> dict[int, float]:
    rewards = defaultdict(list)
    for sample in samples:
        if sample["reward"] is not None:
            rewards[sample["ordinal"]].append(sample["reward"])
    return {ordinal: sum(of) / len(of) for ordinal, of in rewards.items()}


def _told(sample: dict[str, Any], means: dict[int, float]) -> str:
    if sample["reward"] is None:
        reward = f"failed ({sample['failure']})"
    else:
        reward = f"{sample['reward']:g} ({sample['reward'] - means.get(sample['ordinal'], 0.0):+.3g} against its group)"
    head = f"problem={sample['ordinal']} sample={sample['sample']} source={sample['source']} reward={reward} tokens={sum(sample['drawn'])}"
    return _printable(f"--- {head} {'ended' if sample['ended'] else 'cut'}\n{sample.get('prompt', '')}\n>>> {sample['text']}")


def _printable(text: str) -> str:
    """What a policy says may hold a terminal's commands: they are shown, not sent."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
