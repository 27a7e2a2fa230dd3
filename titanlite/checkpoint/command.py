"""`titanlite checkpoint list | verify | diff | prune | pin | unpin`: what a run's checkpoints are worth. Imports no torch."""

import argparse
from pathlib import Path

from titanlite.checkpoint.folder import checkpoint_folder, delete_step, is_pinned, pin, step_folders
from titanlite.checkpoint.integrity import problems_of, read_manifest
from titanlite.config import load_config
from titanlite.utils import ConfigError


def checkpoint_command(argv: list[str]) -> int:
    """Exit code: 0 where all is good, 1 where something is wrong (or, of `diff`, different), and named."""
    parser = argparse.ArgumentParser(prog="titanlite checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (
        ("list", "the steps of a run, and whether each is whole"),
        ("verify", "read every file of every step and compare it with its checksum"),
        ("prune", "delete all but the newest good steps and pinned ones"),
        ("pin", "keep a step from being deleted by prune, and by training (checkpoint.keep_latest_k)"),
        ("unpin", "let it be deleted again"),
    ):
        command = commands.add_parser(name, help=words, description=words)
        command.add_argument("run", type=Path, help="a run's folder, or that of its checkpoints")
        if name == "prune":
            command.add_argument("--keep", type=int, default=1, help="how many good steps stay (default: 1)")
        if name in ("pin", "unpin"):
            command.add_argument("step", type=int)
    command = commands.add_parser("diff", help="tensors that two steps do not have alike", description="tensors that two steps do not have alike")
    command.add_argument("a", type=Path, help="a step's folder, .../step-N")
    command.add_argument("b", type=Path)
    args = parser.parse_args(argv)
    if args.command == "diff":
        return _diff(args.a, args.b)
    folder = _folder(args.run)
    if args.command == "prune":
        return _prune(folder, args.keep)
    if args.command in ("pin", "unpin"):
        return _pin(folder, args.step, args.command == "pin")
    return _report(folder, every_byte=args.command == "verify")


def _folder(run: Path) -> Path:
    if not run.is_dir():
        raise ConfigError(f"there is no folder {run}")
    folder = run
    if (run / "config.toml").is_file():
        cfg, _ = load_config(run / "config.toml")
        folder = checkpoint_folder(cfg, run)
    if not step_folders(folder):
        raise ConfigError(f"{folder} holds no checkpoint: expected folders step-N")
    return folder


def _report(folder: Path, *, every_byte: bool) -> int:
    bad = 0
    for step in step_folders(folder):
        path = folder / f"step-{step}"
        problems = problems_of(path, every_byte=every_byte)
        bad += bool(problems)
        if problems:
            print(f"{path.name:<12} DAMAGED {'; '.join(problems)}", flush=True)
            continue
        manifest = read_manifest(path)
        size = sum(file["size"] for file in manifest["files"].values()) / 2**20
        print(
            f"{path.name:<12} {'good' if every_byte else 'whole'}  {manifest['time']}  {len(manifest['tensors'])} tensors  {size:,.1f} MiB"
            f"{'  pinned' if is_pinned(folder, step) else ''}",
            flush=True,
        )
    print(f"{len(step_folders(folder))} steps, {bad} damaged")
    return int(bad > 0)


def _diff(a: Path, b: Path) -> int:
    tensors = []
    for path in (a, b):
        try:
            tensors.append(read_manifest(path)["tensors"])
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is not a whole step: {error}") from error
    different = 0
    for key in sorted(tensors[0].keys() | tensors[1].keys()):
        ours, theirs = tensors[0].get(key), tensors[1].get(key)
        if ours == theirs:
            continue
        different += 1
        if ours is None or theirs is None:
            print(f"{key}: only in {a if theirs is None else b}")
        else:
            print(f"{key}: " + ", ".join(f"{what} {ours[what]} and {theirs[what]}" for what in ours if ours[what] != theirs[what]))
    print(f"{len(tensors[0].keys() | tensors[1].keys())} tensors, {different} differ")
    return int(different > 0)


def _prune(folder: Path, keep: int) -> int:
    if keep < 1:
        raise ConfigError(f"--keep={keep}: expected at least 1, or nothing would be left to go on from")
    steps = step_folders(folder)
    good = [step for step in reversed(steps) if not problems_of(folder / f"step-{step}", every_byte=True)]
    if not good:
        print(f"{len(steps)} steps, none of them good: nothing is deleted")
        return 1
    kept = [step for step in steps if step in good[:keep] or is_pinned(folder, step)]
    for step in [step for step in steps if step not in kept]:
        delete_step(folder, step)
        print(f"deleted step-{step}{'' if step in good else ' (damaged)'}")
    print(f"kept {', '.join(f'step-{step}' for step in kept)}")
    return 0


def _pin(folder: Path, step: int, pinned: bool) -> int:
    if step not in step_folders(folder):
        raise ConfigError(f"step {step}: {folder} holds {', '.join(map(str, step_folders(folder)))}")
    pin(folder, step).touch() if pinned else pin(folder, step).unlink(missing_ok=True)
    print(f"step-{step} is {'' if pinned else 'not '}pinned")
    return 0
