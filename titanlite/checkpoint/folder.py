"""A run's folder of steps: which there are, what is set aside, what retention deletes. Imports no torch.

Where a step lies in a file system it appears by a rename. An object store has none: where `checkpoint.folder` is a URL a step is
written in its place, and counts once its manifest lies there, which is written last. Paths are then those of universal_pathlib.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from titanlite.checkpoint.integrity import MANIFEST, read_manifest
from titanlite.config import Config
from titanlite.utils import ConfigError, logger


def checkpoint_folder(cfg: Config, run_folder: Path) -> Path:
    """`checkpoint.folder` in the run's folder, or, where it is a URL, `job.name` in that."""
    if "://" not in cfg.checkpoint.folder:
        return run_folder / cfg.checkpoint.folder
    try:
        from upath import UPath

        return UPath(cfg.checkpoint.folder) / cfg.job.name
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"checkpoint.folder={cfg.checkpoint.folder!r}: {error}; remote stores need pip install universal_pathlib and "
            f"the store's own package, s3fs or gcsfs say",
            "checkpoint.folder",
        ) from error


def step_folders(folder: Path) -> list[int]:
    """Steps that have a folder, ascending, whole or not."""
    if not isinstance(folder, Path):
        folder.fs.invalidate_cache()
    found = []
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(0|[1-9]\d*)", path.name)
        if match and (isinstance(path, Path) or (path / MANIFEST).exists()):
            found.append(int(match[1]))
    return sorted(found)


def list_steps(folder: Path) -> list[int]:
    """Committed steps, ascending. What is not whole (no manifest, a file missing or of another size) does not count."""
    return list(_whole_steps(folder))


def _whole_steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Step -> manifest, ascending."""
    manifests = {}
    for step in step_folders(folder):
        try:
            manifests[step] = read_manifest(folder / f"step-{step}")
        except (OSError, ValueError) as error:
            logger.warning(f"checkpoint={folder}/step-{step} is ignored: {error}")
    return manifests


def newest_before(folder: Path, step: int) -> dict[str, Any] | None:
    """{"step", "uuid"} of the newest committed step before `step`: its parent."""
    earlier = [m for s, m in _whole_steps(folder).items() if s < step]
    return {key: earlier[-1][key] for key in ("step", "uuid")} if earlier else None


def set_strangers_aside(folder: Path) -> None:
    """Moves steps of another history than the newest one's into abandoned/, as somebody's copying may have left them.

    A manifest names its parent, the step that was the newest when it was written. A stranger's parent is not the one
    that lies there or was abandoned, or it lies itself between a step and that step's parent.
    """
    whole = _whole_steps(folder)
    gone = {uuid for path in (folder / "abandoned").glob("step-*") if (uuid := _uuid(path))}
    oldest_kept_parent = None
    for step, manifest in reversed(whole.items()):
        parent = manifest["parent"] or {"step": -1, "uuid": None}
        there = whole.get(parent["step"], parent)["uuid"]
        if there != parent["uuid"] or gone & {manifest["uuid"], parent["uuid"]}:
            _abandon(folder, step, f"it descends from another step-{parent['step']} than the one that is there")
        elif oldest_kept_parent is not None and step > oldest_kept_parent:
            _abandon(folder, step, "later steps do not descend from it")
        else:
            oldest_kept_parent = parent["step"]


def quarantine(folder: Path, step: int, problems: list[str]) -> None:
    """Renames step-N, which is damaged, so that nothing takes it for a checkpoint again; the reason lies beside it."""
    aside = _unused(folder, f"quarantine-step-{step}")
    move(folder / f"step-{step}", aside)
    (folder / f"{aside.name}.txt").write_text("\n".join(problems) + "\n")
    logger.error(f"checkpoint={folder}/step-{step} is damaged and quarantined as {aside.name}: {'; '.join(problems[:3])}")


def abandon_after(folder: Path, step: int) -> None:
    """Moves the steps after `step`, from which a run has gone back, into abandoned/: they would pass for what it trains now."""
    for later in reversed(step_folders(folder)):
        if later > step:
            _abandon(folder, later, f"the run goes on from step {step}")


def _abandon(folder: Path, step: int, why: str) -> None:
    aside = _unused(folder / "abandoned", f"step-{step}")
    if isinstance(folder, Path):
        aside.parent.mkdir(exist_ok=True)
    move(folder / f"step-{step}", aside)
    logger.warning(f"checkpoint={folder}/step-{step} is moved to abandoned/{aside.name}: {why}")


def set_torn_aside(folder: Path, step: int) -> None:
    """Makes room for a step that is written again; what is committed and whole must not come here."""
    aside = _unused(folder, f"bad-step-{step}")
    move(folder / f"step-{step}", aside)
    logger.warning(f"checkpoint={folder}/step-{step} is not whole and is moved to {aside.name}")


def delete_old_steps(folder: Path, written: int, keep_latest_k: int) -> None:
    """Deletes all but the newest `keep_latest_k` whole steps (0: none), never `written` nor a pinned one."""
    for step in list_steps(folder)[:-keep_latest_k] if keep_latest_k else []:
        if step != written and not is_pinned(folder, step):
            delete_step(folder, step)


def delete_step(folder: Path, step: int) -> None:
    """So that a deletion that is cut leaves no torn step."""
    path = folder / f"step-{step}"
    if isinstance(path, Path):
        path = path.rename(folder / f".tmp-deleted-step-{step}")
    else:
        (path / MANIFEST).unlink()
    remove(path)


def pin(folder: Path, step: int) -> Path:
    """The file that keeps a step from being deleted by retention and `prune`."""
    return folder / f"step-{step}.pinned"


def is_pinned(folder: Path, step: int) -> bool:
    return pin(folder, step).exists()


def clear_temporary(folder: Path) -> None:
    """Removes what a killed save or deletion left."""
    for stale in folder.glob(".tmp-*"):
        remove(stale)


def remove(path: Path) -> None:
    """Deletes a folder; what cannot be deleted (NFS keeps what a reader still has open) is left for a later call."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.fs.rm(path.path, recursive=True)


def move(path: Path, to: Path) -> None:
    """Durably. In an object store not at once: a copy, and then a deletion."""
    if isinstance(path, Path):
        path.rename(to)
        for changed in {path.parent, to.parent}:
            fsync(changed)
    else:
        path.fs.copy(path.path, to.path, recursive=True)
        (path / MANIFEST).unlink(missing_ok=True)
        path.fs.rm(path.path, recursive=True)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unused(folder: Path, name: str) -> Path:
    return next(path for k in range(1, 1000) if not (path := folder / f"{name}-{k}").exists())


def _uuid(path: Path) -> str | None:
    try:
        return read_manifest(path)["uuid"]
    except (OSError, ValueError):  # damaged: it can be nothing's parent
        return None
