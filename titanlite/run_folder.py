"""A run's folder: who may write to it, and what it records about how the run was started."""

import contextlib
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import titanlite
from titanlite.checkpoint.lock import RunLock
from titanlite.config import Config, to_toml
from titanlite.launch import run_dir
from titanlite.parallel.collective import on_all_ranks, on_rank_0
from titanlite.parallel.mesh import Mesh
from titanlite.utils import ConfigError, setup_logging


@contextlib.contextmanager
def open_run_folder(cfg: Config, mesh: Mesh) -> Iterator[Path]:
    """The run's folder, locked against a second gang, with this rank's log in it."""
    folder = run_dir(cfg)
    lock = RunLock(folder)

    def prepare() -> None:
        with _mistakes_of(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if mesh.rank == 0:
                lock.acquire()
            setup_logging(folder / "logs" / f"rank_{mesh.rank}.log", console=mesh.rank == 0)

    try:
        on_all_ranks(prepare)
        yield folder
    finally:
        if mesh.rank == 0:
            lock.release()


def record_start(folder: Path, cfg: Config, mesh: Mesh) -> None:
    """Writes config.toml and env.json: not before the run is known to go on from here, or a refused one would leave its own."""

    def write() -> None:
        with _mistakes_of(folder):
            (folder / "config.toml").write_text(to_toml(cfg), encoding="utf-8")
            (folder / "env.json").write_text(json.dumps(_environment(mesh), indent=2) + "\n")

    on_rank_0(write)


@contextlib.contextmanager
def _mistakes_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise ConfigError(f"cannot write to the run's folder {folder}: {e.strerror} ({e.filename})", "job.dump_folder") from e


def _environment(mesh: Mesh) -> dict[str, object]:
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        check=False,
        cwd=Path(titanlite.__file__).parent,
        capture_output=True,
        text=True,
    )
    device = torch.cuda.get_device_name() if mesh.device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "titanlite": titanlite.__version__,
        "git": git.stdout.strip() or None,
        "python": platform.python_version(),
        "packages": {d.name: d.version for d in importlib.metadata.distributions() if d.name},
        "device": device,
        "world_size": mesh.world_size,
        "degrees": str(mesh.degrees),
        "command": shlex.join([sys.executable, *sys.argv]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
