"""Data that lie elsewhere, brought to where all ranks see them. Called on rank 0 alone: ten thousand ranks would be turned away."""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from titanlite.config import Config, DataSource, override
from titanlite.data.files import SUFFIX
from titanlite.data.huggingface import loaded
from titanlite.data.records import without_progress_bars
from titanlite.data.sources import fingerprint_of, sample_of
from titanlite.utils import ConfigError, logger

T = TypeVar("T")
DELAYS_S = (1, 2, 4, 8, 16)  # before another try
HOPELESS = (FileNotFoundError, PermissionError, ValueError, ImportError)  # what another try would not change
WHOLE_FOLDERS = ("tokens", "hf")  # formats of which a folder's files keep their names


def with_local_data(cfg: Config) -> Config:
    """`cfg` with the paths of copies, in job.dump_folder/data, for URLs and names on the Hub. Raises ConfigError where one cannot be had."""
    folder = Path(cfg.job.dump_folder).expanduser() / "data"

    def local(source: DataSource, key: str) -> str | None:
        path = source.path
        if path is not None and "://" in path:
            fetch = _download
        elif path is not None and source.format == "hf" and not os.path.exists(os.path.expanduser(path)):
            fetch = _from_hub
        else:
            return path
        try:
            return fetch(source, folder)
        except Exception as error:  # of many libraries
            raise ConfigError(f"{key}={path} cannot be fetched: {error}", key.partition("[")[0]) from error

    t, v = cfg.training, cfg.validation
    return override(
        cfg,
        {
            "data.sources": tuple(
                dataclasses.replace(source, path=local(source, f"data.sources[{i}].path")) for i, source in enumerate(cfg.data.sources)
            ),
            "training.dataset_path": local(DataSource(t.dataset, t.dataset_path), "training.dataset_path"),
            "validation.dataset_path": local(DataSource(v.dataset, v.dataset_path), "validation.dataset_path"),
        },
    )


def _download(source: DataSource, folder: Path) -> str:
    """The local path of a URL's files; files that changed there are fetched anew, into another folder."""
    try:
        from upath import UPath
    except ImportError as error:
        raise ImportError(f"{error}; URLs need pip install universal_pathlib and the store's own package, s3fs or gcsfs say") from error
    root = UPath(source.path)
    files, path = _patiently(lambda: _files_of(root, source))
    if not files:
        raise FileNotFoundError("no file found")
    states = _patiently(lambda: [file.fs.ukey(file.path) for file in files])
    target = folder / fingerprint_of(source.path, source.format, states)

    def fill(part: Path) -> None:
        for i, file in enumerate(files):
            to = part / (f"{i:06}-{file.name}" if path == "*" else file.name)
            _patiently(lambda file=file, to=to: file.fs.get_file(file.path, str(to)))

    _make(target, fill, source.path)
    return str(target / path)


def _files_of(root: Path, source: DataSource) -> tuple[list[Path], str]:
    """(the files behind a URL, what is to be read in the folder of their copies: the folder itself, one file, or all of many)."""
    if source.format == "megatron":
        prefix = root.name.removesuffix(".bin").removesuffix(".idx")
        return [root.parent / f"{prefix}{suffix}" for suffix in (".bin", ".idx")], prefix
    if "*" in source.path:
        base = next(parent for parent in root.parents if "*" not in str(parent))
        return _files(base.glob(str(root.relative_to(base)))), "*"
    if root.is_file():
        return [root], root.name
    if source.format in WHOLE_FOLDERS:
        return _files(root.iterdir()), ""
    return _files(f for f in root.rglob("*") if f.name.endswith(SUFFIX[source.format])), "*"


def _files(found: Iterable[Path]) -> list[Path]:
    return sorted((path for path in found if path.is_file()), key=str)


def _from_hub(source: DataSource, folder: Path) -> str:
    with without_progress_bars():
        data = _patiently(lambda: loaded(source, source.path))
        states = [sample_of(file["filename"], pages=4) for file in data.cache_files]
        target = folder / fingerprint_of(source.path, source.subset, source.split, states)
        _make(target, lambda part: data.save_to_disk(str(part)), source.path)
    return str(target)


def _make(target: Path, fill: Callable[[Path], None], name: str) -> None:
    """A folder that is there whole or not at all."""
    if target.exists():
        logger.info(f"data={name} copy={target}")
        return
    part = target.with_name(f"{target.name}.{uuid4().hex}.part")
    part.mkdir(parents=True)
    try:
        fill(part)
        os.replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    logger.info(f"data={name} fetched={target}")


def _patiently(fn: Callable[[], T]) -> T:
    """`fn()`, tried again after ever longer waits where it fails."""
    for delay_s in DELAYS_S:
        try:
            return fn()
        except HOPELESS:
            raise
        except Exception as error:  # of many libraries
            logger.warning(f"fetching failed, trying again in {delay_s} s: {error!r}")
            time.sleep(delay_s)
    return fn()
