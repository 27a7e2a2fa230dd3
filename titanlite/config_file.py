"""From a TOML file to values by dotted key, each checked against its type and with the line it came from."""

import dataclasses
import json
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from titanlite import torchtitan
from titanlite.utils import ConfigError, nearest

At = Callable[[str], str]  # a key -> "file:line"


def read_table(path: Path) -> tuple[str, dict[str, Any]]:
    """A TOML file's text and what it says. Raises ConfigError where it cannot be read."""
    import tomli

    try:
        text = path.read_bytes().decode("utf-8-sig")  # some editors put a byte order mark
    except OSError as e:
        raise ConfigError(f"cannot read the configuration {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 at byte {e.start}") from e
    try:
        return text, tomli.loads(text)
    except tomli.TOMLDecodeError as e:
        raise ConfigError(f"{path}:{min(e.lineno, max(len(text.splitlines()), 1))}: not TOML: {e.msg}") from e


def read_toml(
    path: Path, keys: Mapping[str, Any], sections: Collection[str], seen: tuple[Path, ...] = ()
) -> dict[str, tuple[Any, str]]:
    """Dotted key -> (value of the type that `keys` gives it, "file:line"), those of `extends` first.

    Raises ConfigError for a missing file, a syntax error, an unknown key, a wrong type or a value that is not allowed.
    """
    text, table = read_table(path)
    found: dict[str, tuple[Any, str]] = {}
    lacking: dict[str, tuple[Any, str]] = {}  # torchtitan's, of no effect here
    lines = key_lines(text)

    def at(key: str) -> str:
        """An entry of a list that is written in one statement is where that is."""
        return f"{path}:{next((lines[k] for k in (key, key[: key.rfind(']') + 1], key.partition('[')[0]) if k in lines), 1)}"

    base = table.pop("extends", None)
    if base is not None:
        where = at("extends")
        if not isinstance(base, str):
            raise ConfigError(f"{where}: extends = {base!r}: expected the path of a TOML file, relative to this one")
        base_path = path.parent / base
        if not base_path.is_file():
            raise ConfigError(f"{where}: extends = {base!r}: there is no file {base_path}")
        if base_path.resolve() in (*seen, path.resolve()):
            raise ConfigError(f"{where}: extends = {base!r} leads back to itself")
        found |= read_toml(base_path, keys, sections, (*seen, path.resolve()))

    def walk(node: dict[str, Any], prefix: str) -> None:
        for name, value in node.items():
            key = prefix + name
            if "." in name:
                raise ConfigError(f"{at(key)}: unknown key {prefix}{json.dumps(name)}: in quotes it is one name, not a path")
            elif key in keys:
                found[key] = (convert(value, keys[key], key, at), at(key))
            elif key in torchtitan.RENAMED:
                ours, values = torchtitan.RENAMED[key]
                if not isinstance(value, str) or values and value not in values:
                    raise ConfigError(f"{at(key)}: {key} = {value!r}: here {ours}, of torchtitan's values {list(values) or 'a path'}")
                found[ours] = (values.get(value, value), f"{at(key)} ({key})")
            elif key in torchtitan.LACKING:
                lacking[key] = (value, at(key))
            elif key in {*sections, *torchtitan.SECTIONS} and isinstance(value, dict):
                walk(value, key + ".")
            elif key in sections:
                raise ConfigError(f"{at(key)}: {key} = {value!r}: expected a section, [{key}]")
            elif isinstance(value, dict):
                raise ConfigError(f"{at(key)}: unknown section [{key}]{nearest(key, sections)}")
            else:
                raise ConfigError(f"{at(key)}: unknown key {key!r}{nearest(key, [*keys, 'extends'])}")

    walk(table, "")
    for key, (value, where) in lacking.items():
        if torchtitan.is_missed(key, value, {k: v for k, (v, _) in (found | lacking).items()}):
            why = torchtitan.LACKING[key].why
            raise ConfigError(f"{where}: {key} = {value!r}: titanlite has no such key: {why}; remove it, or leave it at {torchtitan.LACKING[key].default!r}")
    return found | lacking


def key_lines(text: str) -> dict[str, int]:
    """Dotted key or section -> the line its statement starts on (tomli gives lines for syntax errors only).

    The entries of [[a.list]] are a.list[0], a.list[1], ...
    """
    import tomli

    lines: dict[str, int] = {}
    section, statement = "", ""
    for number, line in enumerate(text.split("\n"), 1):
        statement += line + "\n"
        try:
            keys = list(_dotted(tomli.loads(statement), section))
        except tomli.TOMLDecodeError:  # a string, list or table that goes on in the next line
            continue
        if statement.lstrip().startswith("["):
            keys = [key.removeprefix(section) for key in keys]
            if statement.lstrip().startswith("[["):
                keys.append(f"{keys[-1]}[{sum(key.startswith(f'{keys[-1]}[') and key.endswith(']') for key in lines)}]")
            section = keys[-1] + "."
        for key in keys:  # a section may only ever appear inside a longer name
            lines.setdefault(key, number + 1 - statement.count("\n"))
        statement = ""
    return lines


def _dotted(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """The names of everything in `table`, outer tables before what is in them."""
    for name, value in table.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")


def convert(value: Any, kind: Any, key: str, at: At) -> Any:
    entry = get_args(kind)[0] if get_origin(kind) is tuple else None
    if dataclasses.is_dataclass(entry) and isinstance(value, list):
        return tuple(_entry(v, entry, f"{key}[{i}]", at) for i, v in enumerate(value))
    try:
        return _as(value, kind)
    except TypeError:
        raise ConfigError(f"{at(key)}: {key} = {value!r}: expected {expected(kind, value)}") from None


def _entry(table: Any, cls: type, key: str, at: At) -> Any:
    """A table of a list as the dataclass `cls`."""
    if not isinstance(table, dict):
        raise ConfigError(f"{at(key)}: {key} = {table!r}: expected {_allowed(cls)}")
    kinds = get_type_hints(cls)
    for name in table:
        if name not in kinds:
            raise ConfigError(f"{at(f'{key}.{name}')}: unknown key {name!r} in {key}{nearest(name, kinds)}")
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.name not in table:
            raise ConfigError(f"{at(key)}: {key} has no {field.name}: expected {_allowed(cls)}")
    return cls(**{name: convert(value, kinds[name], f"{key}.{name}", at) for name, value in table.items()})


def _as(value: Any, kind: Any) -> Any:
    """`value` as `kind`; raises TypeError where it is something else."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _as(value, next(k for k in get_args(kind) if k is not types.NoneType))
    if origin is Literal and isinstance(value, str) and value in get_args(kind):
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_as(v, get_args(kind)[0]) for v in value)
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise TypeError


def expected(kind: Any, value: Any) -> str:
    """What may stand in the place of `value`, and the nearest choice to it."""
    choices = _choices(kind)
    wrong = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str) and v not in choices]
    return _allowed(kind) + (nearest(wrong[0], choices) if wrong else "")


def _allowed(kind: Any) -> str:
    """A type in the user's words."""
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(kind))
    if origin in (Union, types.UnionType):
        return " or ".join(_allowed(k) for k in get_args(kind) if k is not types.NoneType)
    if origin is tuple:
        return f"a list, each {_allowed(get_args(kind)[0])}"
    if dataclasses.is_dataclass(kind):
        return f"a table with {', '.join(field.name for field in dataclasses.fields(kind))}"
    return {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}[kind]


def _choices(kind: Any) -> tuple[str, ...]:
    return get_args(kind) if get_origin(kind) is Literal else sum(map(_choices, get_args(kind)), ())
