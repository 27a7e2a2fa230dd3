"""The `titanlite` command. It imports no torch: help and mistakes answer at once."""

import argparse
import importlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from titanlite.checkpoint.folder import checkpoint_folder, step_folders
from titanlite.checkpoint.integrity import read_manifest
from titanlite.config import KEYS, Config, Origins, to_dict
from titanlite.launch import EXIT_CODE_FILE, run_as_command, run_dir
from titanlite.parallel.degrees import resolve_degrees
from titanlite.rl.validate import validate_rl
from titanlite.torchtitan import LACKING
from titanlite.utils import EXIT_DONE, EXIT_FAULT, EXIT_STOPPED, EXIT_USER, ConfigError, explain, nearest, setup_logging

RL_USAGE = "titanlite rl CONFIG.toml [--nproc N] [--section.key value ...]"
TRAIN_USAGE = "titanlite train CONFIG.toml [--nproc N] [--section.key value ...]"
CONFIG_USAGE = "titanlite config [--from-torchtitan] CONFIG.toml [--section.key value ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code: 0 done, 1 a fault, 2 the user's mistake, 75 stopped with all saved."""
    commands = {"train": _train, "config": _config, "verify": _verify, "generate": _generate, "checkpoint": _checkpoint, "import": _import, "export": _export, "tokenize": _tokenize, "rl": _rl, "rollouts": _rollouts}
    argv = list(sys.argv[1:] if argv is None else argv)
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        print("usage: titanlite COMMAND ...\n")
        for command, fn in commands.items():
            print(f"  {command:<10}{fn.__doc__.splitlines()[0]}")
        print("\n`titanlite COMMAND --help` says more.")
        return EXIT_DONE
    try:
        if name not in commands:
            raise ConfigError(f"unknown command {name!r}: expected one of {', '.join(commands)}{nearest(name, commands)}")
        return commands[name](rest)
    except ConfigError as error:
        print(explain(error, {}), file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        return EXIT_STOPPED
    except BrokenPipeError:  # the reader, `head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE


def _train(argv: list[str], module: str = "titanlite.train", usage: str = TRAIN_USAGE, also: Callable[[Config], None] = lambda cfg: None) -> int:
    """Train a model; with --nproc N on N processes of this machine, under torchrun."""
    nproc, argv = _take_nproc(argv)
    if nproc is None or not argv or argv[0].startswith("-") or {"-h", "--help"} & set(argv):
        return run_as_command(lambda *args: importlib.import_module(module).train(*args), argv, usage)
    timeout_s = 0

    def check(cfg: Config, _: Origins) -> int:
        """Mistakes are answered here, once, before a gang is started."""
        nonlocal timeout_s
        resolve_degrees(cfg.parallelism, nproc)
        also(cfg)
        timeout_s = shutdown_timeout_s(cfg)
        return EXIT_DONE

    return run_as_command(check, argv, usage) or _torchrun(nproc, timeout_s, ["-m", module, *argv])


def _take_nproc(argv: list[str]) -> tuple[int | None, list[str]]:
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == "--nproc":
            value = value if equals else "".join(argv[i + 1 : i + 2])
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"{' '.join(['--nproc', value]).strip()}: expected a number of processes, at least 1")
            return int(value), argv[:i] + argv[i + (1 if equals else 2) :]
    return None, argv


def shutdown_timeout_s(cfg: Config) -> int:
    """How long the gang may take to end after a signal, for torchrun's --shutdown-timeout, which kills it then (after 30 s by default).

    It has to end its step and perhaps a save, and then to save: twice the time that these took last, and 10 s.
    """
    folder, last_s = run_dir(cfg), {"step_time_s": 0.0, "save_s": 0.0}
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        last_s |= next(record for line in reversed(lines) if "step_time_s" in (record := json.loads(line)))
        checkpoints = checkpoint_folder(cfg, folder)
        last_s |= read_manifest(checkpoints / f"step-{step_folders(checkpoints)[-1]}")
    except (OSError, ValueError, IndexError, StopIteration):  # nothing to learn from: what is damaged is the gang's to tell
        pass
    return max(30, math.ceil(10 + 2 * (last_s["step_time_s"] + 2 * last_s["save_s"])))


def _torchrun(nproc: int, timeout_s: int, args: list[str]) -> int:
    """The exit code of rank 0 under torchrun, which itself only knows 0 and 1.

    torchrun runs in this process: it would take a signal that comes twice, from a terminal and from us, for an order to
    leave its workers behind.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    failure = None
    with tempfile.TemporaryDirectory() as folder:
        code_file = Path(folder) / "code"
        os.environ[EXIT_CODE_FILE] = str(code_file)
        try:
            launch = parse_args(["--standalone", f"--nproc_per_node={nproc}", *args])
            launch.shutdown_timeout = timeout_s
            run(launch)
        except (ChildFailedError, SignalException) as e:
            failure = e
        del os.environ[EXIT_CODE_FILE]
        code = int(code_file.read_text()) if code_file.exists() else EXIT_DONE
    if failure is None or code not in (EXIT_DONE, EXIT_FAULT):
        return code
    print(failure, file=sys.stderr)
    return EXIT_FAULT


def _rl(argv: list[str]) -> int:
    """Train a policy by reinforcement; with --nproc N on N processes of this machine, under torchrun."""
    return _train(argv, "titanlite.rl.train", RL_USAGE, validate_rl)


def _rollouts(argv: list[str]) -> int:
    """Show the samples that a run of reinforcement kept, and a summary of every step."""
    parser = argparse.ArgumentParser(prog="titanlite rollouts", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, e.g. outputs/rl_debug")
    parser.add_argument("--step", type=int, help="whose samples are shown; the newest if not given")
    parser.add_argument("--sort", choices=("reward", "length"), help="highest first; in the order of problems if not given")
    parser.add_argument("--source", help="only samples of this source")
    parser.add_argument("--failed", action="store_true", help="only samples whose reward failed")
    parser.add_argument("--limit", type=int, default=8, help="so many samples at most")
    args = parser.parse_args(argv)
    from titanlite.rl.show import show_rollouts

    show_rollouts(args.run, step=args.step, sort=args.sort, source=args.source, failed=args.failed, limit=max(args.limit, 0))
    return EXIT_DONE


def _config(argv: list[str]) -> int:
    """Print the resolved configuration, and where each value comes from; or what a torchtitan file says here."""
    if argv[:1] == ["--from-torchtitan"]:
        if len(argv) != 2:
            raise ConfigError(f"--from-torchtitan takes one TOML file. usage: {CONFIG_USAGE}")
        from titanlite.convert import report

        lines, missing = report(Path(argv[1]))
        print("\n".join(lines))
        print(f"\n{missing} of these ask for what is missing here" if missing else "\nit runs as it is")
        return EXIT_USER if missing else EXIT_DONE
    return run_as_command(_print_config, argv, CONFIG_USAGE)


def _print_config(cfg: Config, origins: Origins) -> int:
    if any(key.startswith("rl.") for key in origins):
        validate_rl(cfg)
    values = {key: f"{key} = {json.dumps(value, default=vars)}" for key, value in to_dict(cfg).items()}
    width = max(map(len, values.values()))
    for key, value in values.items():
        print(f"{value:<{width}}  # {origins.get(key, 'default')}")
    for key in origins.keys() - KEYS:
        print(f"# {key} has no effect: {LACKING[key].why} ({origins[key]})")
    return EXIT_DONE


def _verify(argv: list[str]) -> int:
    """Compare layouts with one rank, tensor by tensor; exit 0 where all agree, 1 where one differs."""
    parser = argparse.ArgumentParser(prog="titanlite verify", epilog="--section.key value changes the configuration.")
    parser.add_argument("config", type=Path, help="a TOML file: its model and optimizer are compared")
    parser.add_argument("--layouts", nargs="+", metavar="LAYOUT", help="e.g. tp=2 fsdp=2,tp=2 hsdp=2x2,recompute=full")
    parser.add_argument("--full", action="store_true", help="every legal triple of choices instead of every pair")
    parser.add_argument("--plant", metavar="FAULT", help="run with a planted fault, which must be found; `list` shows them")
    args, overrides = parser.parse_known_args(["list", *argv] if argv == ["--plant", "list"] else argv)
    from titanlite.verify.command import verify_command

    return run_as_command(
        lambda cfg, _: verify_command(cfg, args.layouts, full=args.full, plant=args.plant),
        [str(args.config), *overrides],
        "titanlite verify CONFIG.toml [--layouts LAYOUT ...] [--plant FAULT]",
    )


def _generate(argv: list[str]) -> int:
    """Print text from a checkpoint of a run."""
    parser = argparse.ArgumentParser(prog="titanlite generate", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, e.g. outputs/debug")
    parser.add_argument("-p", "--prompt", default="", help="what the text starts with")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: it is put by the model's chat template")
    parser.add_argument("--step", type=int, help="the checkpoint's step; the newest if not given")
    parser.add_argument("--max_new_tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top_p", type=float, default=1.0, help="sample from the likeliest tokens of this share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help='print {"prompt_ids", "ids", "text", "step"} at the end instead')
    args = parser.parse_args(argv)
    from titanlite.generate import generate_command

    generate_command(
        args.run,
        args.prompt,
        chat=args.chat,
        step=args.step,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        as_json=args.json,
    )
    return EXIT_DONE


def _import(argv: list[str]) -> int:
    """Make a run of a Hugging Face folder, or of a model of its Hub."""
    parser = argparse.ArgumentParser(prog="titanlite import", epilog="--section.key value sets the run's configuration; training.dtype is its weights'.")
    parser.add_argument("model", help="a folder with config.json and safetensors, or the id of a model of the Hub")
    parser.add_argument("run", type=Path, help="the run's folder to be made; train it with titanlite train RUN/config.toml")
    parser.add_argument("--config", type=Path, help="a TOML file with the run's other settings; its model is not used")
    args, overrides = parser.parse_known_args(argv)

    def import_(cfg: Config, _: Origins) -> int:
        from titanlite.huggingface import import_command

        setup_logging(None, console=True)
        import_command(args.model, args.run, cfg)
        return EXIT_DONE

    with tempfile.TemporaryDirectory() as folder:
        config = args.config or Path(folder) / "import.toml"
        if not args.config:
            config.touch()
        return run_as_command(import_, [str(config), *overrides], "titanlite import MODEL RUN [--config FILE.toml] [--section.key value ...]")


def _export(argv: list[str]) -> int:
    """Write a step of a run as a Hugging Face folder."""
    parser = argparse.ArgumentParser(prog="titanlite export")
    parser.add_argument("run", type=Path, help="the run's folder, e.g. outputs/debug")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the folder to be made")
    parser.add_argument("--step", type=int, help="the checkpoint's step; the newest if not given")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="of the weights; the run's checkpoint.export_dtype if not given")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="files hold so many GB (10^9 bytes), or one tensor")
    parser.add_argument("--no-check", action="store_true", help="do not compare the folder's logits with the run's, for which each must fit in memory")
    args = parser.parse_args(argv)
    if not (args.run / "config.toml").is_file():
        raise ConfigError(f"{args.run} is not a run's folder: it has no config.toml")
    if not args.max_shard_gb > 0:
        raise ConfigError(f"--max-shard-gb={args.max_shard_gb}: expected more than 0")

    def export(cfg: Config, _: Origins) -> int:
        from titanlite.huggingface import export_command

        setup_logging(None, console=True)
        options = {"step": args.step, "dtype": args.dtype, "shard_bytes": round(args.max_shard_gb * 1e9), "check": not args.no_check}
        export_command(args.run, cfg, args.output, **options)
        return EXIT_DONE

    return run_as_command(export, [str(args.run / "config.toml")], "titanlite export RUN -o DIR")


def _tokenize(argv: list[str]) -> int:
    """Write a configuration's text as tokens, once, for training runs to read in place."""
    parser = argparse.ArgumentParser(prog="titanlite tokenize", epilog="--section.key value changes the configuration.")
    parser.add_argument("config", type=Path, help="a TOML file: its data and tokenizer are used")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the folder to be made")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes; by default one a core")
    args, overrides = parser.parse_known_args(argv)
    if args.workers < 1:
        raise ConfigError(f"--workers={args.workers}: expected at least 1")

    def tokenize(cfg: Config, _: Origins) -> int:
        from titanlite.data.tokenize import tokenize_command

        setup_logging(None, console=True)
        tokenize_command(cfg, args.output, args.workers)
        return EXIT_DONE

    return run_as_command(tokenize, [str(args.config), *overrides], "titanlite tokenize CONFIG.toml -o DIR [--section.key value ...]")


def _checkpoint(argv: list[str]) -> int:
    """List, verify, compare or prune the checkpoints of a run."""
    from titanlite.checkpoint.command import checkpoint_command

    return checkpoint_command(argv)


if __name__ == "__main__":
    sys.exit(main())
