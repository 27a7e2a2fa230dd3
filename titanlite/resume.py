"""What a run's checkpoint holds, saving it and going on from it."""

import hashlib
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint.fingerprint import fingerprints
from titanlite.checkpoint.integrity import read_manifest
from titanlite.checkpoint.state import copy_tied, init_optimizer_state, model_state, optimizer_state
from titanlite.checkpoint.store import (
    AsyncSaver,
    abandon_after,
    load,
    quarantine,
    save,
    step_folders,
    verify_step,
)
from titanlite.config import Config, to_toml
from titanlite.data.loader import TrainLoader
from titanlite.parallel.mesh import on_rank_0
from titanlite.trainer import Run
from titanlite.utils import ConfigError, logger


def run_state(run: Run, positions: Tensor, *, copies: bool) -> dict[str, Tensor]:
    """Everything later steps depend on, live tensors under the same keys in every layout but for the ranks' RNG.

    positions [V, 2] int64: where each logical shard of the data stands. `copies`: with those of tied parameters.
    """
    state = {
        **model_state(run.parts, copies=copies),
        **optimizer_state(run.optimizer, run.parts, copies=copies),
        "train.step": torch.tensor(run.step),
        "train.tokens": torch.tensor(run.tokens),
        "data.positions": positions,
    }
    return state | {f"rng_{run.mesh.rank}.{key}": value for key, value in _rng_state().items()}


class Saver:
    """Saves a run's steps into its folder, at once or by a thread. Made and used by all ranks together.

    It has a gloo group of its own, with time for slow disks.
    """

    def __init__(self, run: Run, loader: TrainLoader, folder: Path, *, data: str):
        self.run, self.loader, self.folder, self.data = run, loader, folder, data
        self.group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        self.background = AsyncSaver(self.group) if run.cfg.checkpoint.async_mode == "async" else None

    def save(self, *, last: bool) -> bool:
        """Whether the step is on its way to the disk. A failure to write is told, on all ranks, and training may go on."""
        run, cfg = self.run, self.run.cfg.checkpoint
        positions = _gathered_positions(run, self.loader.positions)
        model_only = last and cfg.last_save_model_only
        state = model_state(run.parts, copies=False) if model_only else run_state(run, positions, copies=False)
        facts = {
            "tokens": run.tokens,
            "logical_shards": len(positions),
            "data": self.data,
            "seed": run.cfg.debug.seed,
            "model_only": model_only,
            "degrees": str(run.mesh.degrees),
            "config_sha256": hashlib.sha256(to_toml(run.cfg).encode()).hexdigest(),
        }
        options = {"extra": facts, "keep_latest_k": cfg.keep_latest_k}
        self.wait()  # here, so that a failure of the save before does not keep this one from being tried
        try:
            if self.background:
                self.background.start(self.folder, run.step, state, **options)
            else:
                save(self.folder, run.step, state, **options, process_group=self.group)
        except OSError as e:
            return self._failed(e)
        return self.wait() if last else True

    def wait(self) -> bool:
        """Returns when nothing is being written any more; whether it was written."""
        try:
            if self.background:
                self.background.wait()
        except OSError as e:
            return self._failed(e)
        return True

    def _failed(self, error: OSError) -> bool:
        logger.error(f"checkpoint_failed step={self.run.step} {error}: training goes on, the last good checkpoint is kept")
        return False


class NoGoodCheckpoint(RuntimeError):
    """There are checkpoints, and none can be trusted: training must not start anew as if there were none."""


def find_checkpoint(cfg: Config, folder: Path) -> int | None:
    """The step to go on from: `checkpoint.load_step`, else the newest whose files are as they were written, or None where
    there is none. A damaged one is quarantined. Raises NoGoodCheckpoint where there are some and all are damaged.
    """
    steps = on_rank_0(lambda: step_folders(folder))
    wanted = cfg.checkpoint.load_step
    if wanted != -1 and wanted not in steps:
        raise ConfigError(
            f"checkpoint.load_step={wanted}: {folder} holds {', '.join(map(str, steps)) or 'no checkpoint'}", "checkpoint.load_step"
        )
    for step in reversed(steps) if wanted == -1 else [wanted]:
        if not (problems := verify_step(folder / f"step-{step}")):
            return step
        on_rank_0(partial(quarantine, folder, step, problems))
    if steps or on_rank_0(lambda: any(folder.glob("quarantine-step-*"))):
        raise NoGoodCheckpoint(
            f"{folder} holds checkpoints, and {'none is' if wanted == -1 else f'step {wanted} is not'} as it was written: they are quarantined there, "
            f"with the reasons; to start anew, give the run another --job.name"
        )
    return None


def resume(run: Run, folder: Path, step: int, global_batch_size: int, data: str) -> Tensor:
    """Brings the run to where it was after `step`; returns the data positions [V, 2]. Later steps are moved into abandoned/.

    The ranks' random states come back only on as many ranks as wrote them.
    """
    path = folder / f"step-{step}"
    manifest = on_rank_0(lambda: read_manifest(path))
    if manifest["model_only"]:
        raise ConfigError(
            f"{path} holds the model only (it was written with checkpoint.last_save_model_only): training cannot go on from "
            f"it; start another run under another --job.name",
            "checkpoint.last_save_model_only",
        )
    if manifest["logical_shards"] != global_batch_size:
        raise ConfigError(
            f"{path} was written with {manifest['logical_shards']} rows a step, this run has {global_batch_size}: the order of "
            f"samples would change; set training.global_batch_size={manifest['logical_shards']}",
            "training.global_batch_size",
        )
    if manifest["data"] != data:
        raise ConfigError(
            f"{path} was written while training on other data than training.dataset={run.cfg.training.dataset!r} now gives: "
            f"positions in it mean nothing here; bring the data back, or start another run under another --job.name",
            "training.dataset",
            "training.dataset_path",
        )
    if manifest["seed"] != run.cfg.debug.seed:
        raise ConfigError(
            f"{path} was written with debug.seed={manifest['seed']}, this run has {run.cfg.debug.seed}: the order of samples "
            f"would change; set debug.seed={manifest['seed']}",
            "debug.seed",
        )
    init_optimizer_state(run.optimizer)
    state = run_state(run, torch.zeros(global_batch_size, 2, dtype=torch.int64), copies=True)
    if manifest["world_size"] != run.mesh.world_size:
        state = {key: value for key, value in state.items() if not key.startswith("rng_")}
    load(folder, step, state)
    copy_tied(run.parts, run.optimizer)
    run.step, run.tokens = int(state["train.step"]), int(state["train.tokens"])
    _check_loaded(path, run_state(run, state["data.positions"], copies=False), manifest["tensors"])
    _set_rng_state({key.split(".", 1)[1]: value for key, value in state.items() if key.startswith("rng_")})
    on_rank_0(lambda: abandon_after(folder, step))
    logger.info(f"resumed={path} step={run.step} tokens={run.tokens}")
    return state["data.positions"]


def _check_loaded(path: Path, state: dict[str, Tensor], written: dict[str, dict]) -> None:
    keys = [key for key in written if not key.startswith("rng_")]  # of ranks that may not be
    for key, found in fingerprints(state, keys, None).items():
        if found != written[key]["fingerprint"]:
            raise NoGoodCheckpoint(
                f"{path}: {key} is not what was written, although its file is: fingerprint {found}, not {written[key]['fingerprint']}"
            )


def _gathered_positions(run: Run, mine: Tensor) -> Tensor:
    """[V, 2]: every batch rank's `mine` [R, 2], in the order of rows."""
    group = run.mesh.data.get_group("batch")
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return torch.cat(everyone)


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_rng_state(state: dict[str, Tensor]) -> None:
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
