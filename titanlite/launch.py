"""From a command line to an exit code: configuration, the user's mistakes as one message, and who reports them."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from titanlite.config import Config, Help, Origins, defaults_help, load_config
from titanlite.utils import EXIT_DONE, EXIT_FAULT, EXIT_STOPPED, EXIT_USER, ConfigError, Fault, explain

EXIT_CODE_FILE = "TITANLITE_EXIT_CODE_FILE"  # where rank 0 leaves its exit code for `titanlite train --nproc N`


def run_as_command(fn: Callable[[Config, Origins], int], argv: Sequence[str], usage: str) -> int:
    """Exit code of `fn` on the configuration, and where its values come from, that `argv` (a TOML file, then --section.key value) gives.

    A ConfigError becomes one message and exit code 2, a Fault one and 1. Every rank meets it, rank 0 reports it: the others
    wait for the launcher to end them, so that it has time to. A signal that `fn` does not handle ends it at once with 75.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    origins: Origins = {}
    rank = int(os.environ.get("RANK", "0"))
    try:
        if not argv or argv[0].startswith("-"):
            if set(argv) & {"-h", "--help"}:
                raise Help(defaults_help())
            raise ConfigError(f"the TOML file is missing. usage: {usage}")
        cfg, origins = load_config(argv[0], argv[1:])
        code = fn(cfg, origins)
    except Help as text:
        if rank == 0:
            print(f"usage: {usage}\n{text}")
        return EXIT_DONE
    except (ConfigError, Fault) as error:
        if rank != 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(10)
        else:
            print(explain(error, origins), file=sys.stderr, flush=True)
        code = EXIT_FAULT if isinstance(error, Fault) else EXIT_USER
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once another rank has ended
        if rank == 0:
            print("titanlite: stopped by a signal before there was anything new to save", file=sys.stderr, flush=True)
        code = EXIT_STOPPED
    except BaseException:
        _leave_exit_code(rank, EXIT_FAULT)
        raise
    _leave_exit_code(rank, code)
    return code


def run_dir(cfg: Config) -> Path:
    """`job.dump_folder`/`job.name`: the same folder is the same run."""
    return Path(cfg.job.dump_folder).expanduser() / cfg.job.name


def _leave_exit_code(rank: int, code: int) -> None:
    if rank == 0 and (path := os.environ.get(EXIT_CODE_FILE)):
        Path(path).write_text(str(code))

