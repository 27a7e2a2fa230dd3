"""What every layer may use: the user's mistakes as one exception type, exit codes and the log."""

import logging
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

EXIT_DONE, EXIT_FAULT, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 75

logger = logging.getLogger("titanlite")


class ConfigError(ValueError):
    """A mistake of the user's: shown as one message without a traceback, exit code 2.

    `keys` names the configuration keys involved, so that `explain` can add where each was set.
    """

    def __init__(self, message: str, *keys: str):
        super().__init__(message)
        self.keys = keys

    def __reduce__(self):  # it travels between processes
        return ConfigError, (str(self), *self.keys)


class Fault(RuntimeError):
    """What the user must know of and did not cause by the configuration: one message without a traceback, exit code 1.

    All ranks raise it together.
    """


def explain(error: ConfigError | Fault, origins: Mapping[str, str]) -> str:
    """The message for the user: what is wrong, then where each key involved was set."""
    places = [f"  {key} is set at {origins[key]}" for key in getattr(error, "keys", ()) if key in origins]
    return "\n".join([f"titanlite: error: {error}", *places])


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name closest to `name`, or nothing when none is close."""
    known = list(known)
    same = [k for k in known if k.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]  # a right key in the wrong section
    cutoff = 0 if same else 0.7 if "." in name else 0.6  # a section in common is not much of a likeness
    found = get_close_matches(name, same or known, n=1, cutoff=cutoff)
    return f"; did you mean {found[0]!r}?" if found else ""


def is_utf8(text: str) -> bool:
    """Whether no word of a command line held other bytes, which Python turns into halves of surrogate pairs."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def setup_logging(log_file: Path | None, *, console: bool) -> None:
    """Sends the log to `log_file` on every rank and to stdout where `console` is true (rank 0)."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if console:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log_file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
