"""What a torchtitan v0.2.2 file says here, key by key: `titanlite config --from-torchtitan FILE.toml`. No torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titanlite.config import KEYS
from titanlite.config_file import convert, key_lines, read_table
from titanlite.torchtitan import DEFAULTS_THAT_DIFFER, LACKING, RENAMED, is_missed
from titanlite.utils import ConfigError, nearest


def report(path: Path) -> tuple[list[str], int]:
    """(a line for each key of the file, then one for each default that differs and that it does not set; how many ask for what is missing)."""
    text, table = read_table(path)
    lines, values = key_lines(text), dict(_leaves(table))
    answers = {key: _answer(key, value, values, f"{path}:{lines.get(key, 1)}") for key, value in values.items()}
    width = max([len(f"{key} = {value!r}") for key, value in values.items()], default=0)
    said = [f"{f'{key} = {values[key]!r}':<{width}}  {answer}" for key, answer in answers.items()]
    for key, (theirs, ours, why) in DEFAULTS_THAT_DIFFER.items():
        if key not in values:
            said.append(f"{f'{key}, not set':<{width}}  default here {ours!r}, there {theirs!r}: {why}")
    return said, sum(answer.startswith("MISSING") for answer in answers.values())


def _answer(key: str, value: Any, values: Mapping[str, Any], where: str) -> str:
    if key in KEYS:
        try:
            convert(value, KEYS[key], key, lambda _: where)
        except ConfigError as e:
            return f"MISSING {str(e).rsplit(': ', 1)[-1]}"
        return "the same"
    if key in RENAMED:
        ours, renamed = RENAMED[key]
        return f"is {ours} = {renamed.get(value, value)!r}" if not renamed or value in renamed else f"MISSING {ours} is one of {list(renamed.values())}"
    if key in LACKING:
        lacking = LACKING[key]
        return f"MISSING {lacking.why}" if is_missed(key, value, values) else f"has no effect: {lacking.why}"
    return f"MISSING neither torchtitan v0.2.2 nor titanlite has this key{nearest(key, KEYS)}"


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
