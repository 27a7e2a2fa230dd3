"""What a run's checkpoint holds, saving it and going on from it."""

import base64
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint.asynchronous import SLOW_DISK, ProcessSaver, ThreadSaver
from titanlite.checkpoint.folder import abandon_after, quarantine, set_strangers_aside, step_folders
from titanlite.checkpoint.hf_export import SHARD_BYTES, export_step
from titanlite.checkpoint.hf_folder import load_hf, warn_of_unused_keys
from titanlite.checkpoint.integrity import DamagedStep, problems_of, read_manifest
from titanlite.checkpoint.state import copy_tied, init_optimizer_state, model_state, optimizer_state
from titanlite.checkpoint.store import load, read_rank_states, save
from titanlite.config import Config, to_toml, training_sources
from titanlite.data.loader import TrainLoader
from titanlite.parallel.collective import on_rank_0
from titanlite.parallel.mesh import Mesh
from titanlite.trainer import Run, setup
from titanlite.utils import ConfigError, Fault, logger

SAVERS = {"disabled": None, "async": ThreadSaver, "async_with_pinned_mem": ProcessSaver}


class Saver:
    """Saves a run's steps into its folder. Made and used by all ranks together.

    It has a gloo group of its own, with time for slow disks.
    """

    def __init__(self, run: Run, loader: TrainLoader, folder: Path, *, data: str):
        self.run, self.loader, self.folder, self.data = run, loader, folder, data
        self.group = dist.new_group(backend="gloo", timeout=SLOW_DISK)
        background = SAVERS[run.cfg.checkpoint.async_mode]
        self.background = background and background(self.group)
        if self.background:
            self.background.reserve(training_state(run))
        self.failures = 0  # in a row

    def save(self, *, last: bool) -> bool:
        """Whether the step is on its way to the disk. A failure to write is told, on all ranks, and training may go on until
        `checkpoint.max_failed_saves` have failed in a row; then raises Fault.
        """
        run, cfg = self.run, self.run.cfg.checkpoint
        model_only = last and cfg.last_save_model_only
        state = model_state(run.parts) if model_only else training_state(run)
        options = {
            "extra": {
                "tokens": run.tokens,
                "logical_shards": len(self.loader.positions) * run.mesh.degrees.batch,
                "data": self.data,
                "seed": run.cfg.debug.seed,
                "model_only": model_only,
                "degrees": str(run.mesh.degrees),
                "config_sha256": hashlib.sha256(to_toml(run.cfg).encode()).hexdigest(),
            },
            "rank_state": None if model_only else rank_state(run.mesh, self.loader.positions),
            "keep_latest_k": cfg.keep_latest_k,
        }
        self.wait()  # here, so that a failure of the save before does not keep this one from being tried
        try:
            if self.background:
                self.background.start(self.folder, run.step, state, **options)
            else:
                save(self.folder, run.step, state, **options, process_group=self.group)
                self.failures = 0
        except OSError as e:
            return self._failed(e)
        return self.wait() if last else True

    def wait(self) -> bool:
        """Returns when nothing is being written any more; whether it was written."""
        try:
            if self.background and self.background.wait():
                self.failures = 0
        except OSError as e:
            return self._failed(e)
        return True

    def close(self) -> None:
        """Lets what is being written be finished, whatever ended the run."""
        if self.background:
            self.background.close()

    def _failed(self, error: OSError) -> bool:
        self.failures += 1
        most = self.run.cfg.checkpoint.max_failed_saves
        what = f"checkpoint_failed step={self.run.step} failures={self.failures} {error}"
        if self.failures > most:
            raise Fault(f"{what}: more than checkpoint.max_failed_saves={most} in a row; the last good checkpoint is kept")
        logger.error(f"{what}: training goes on, the last good checkpoint is kept, the next save tries again")
        return False


def training_state(run: Run, *, copies: bool = False) -> dict[str, Tensor]:
    """What training goes on from, a critic's as `critic.<key>`; see `model_state` for copies."""
    state = model_state(run.parts, copies=copies) | optimizer_state(run.optimizer, run.parts, copies=copies)
    return state if run.critic is None else state | {f"critic.{key}": tensor for key, tensor in training_state(run.critic, copies=copies).items()}


def rank_state(mesh: Mesh, positions: Tensor) -> dict[str, Any]:
    """What this rank alone knows: its random state, and where the logical shards of the data stand whose rows it reads first.

    positions [R, W] int64, of the rows R * batch_rank, R * batch_rank + 1, ... of the global batch.
    """
    generators = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state()
    first = mesh.batch_rank * len(positions)
    rows = dict(enumerate(positions.tolist(), first)) if mesh.counts_labels else {}
    return {"rng": {key: base64.b64encode(bytes(state.tolist())).decode() for key, state in generators.items()}, "rows": rows}


class NoGoodCheckpoint(Fault):
    """There are checkpoints, and none can be trusted: training must not start anew as if there were none."""


def find_checkpoint(cfg: Config, folder: Path) -> int | None:
    """The step to go on from: `checkpoint.load_step`, else the newest that is whole, or None where there is none. One that is
    not is quarantined. Raises NoGoodCheckpoint where there are some and all are damaged.

    Files are checked for their sizes only; `load` reads them.
    """
    on_rank_0(lambda: set_strangers_aside(folder))
    steps = on_rank_0(lambda: step_folders(folder))
    wanted = cfg.checkpoint.load_step
    quarantined = on_rank_0(lambda: [path.name for path in folder.glob("quarantine-step-*")])
    if wanted != -1 and wanted not in steps and not any(name.startswith(f"quarantine-step-{wanted}-") for name in quarantined):
        raise ConfigError(
            f"checkpoint.load_step={wanted}: {folder} holds {', '.join(map(str, steps)) or 'no checkpoint'}", "checkpoint.load_step"
        )
    for step in reversed(steps) if wanted == -1 else {wanted} & set(steps):
        if not (problems := on_rank_0(partial(problems_of, folder / f"step-{step}", every_byte=False))):
            return step
        on_rank_0(partial(quarantine, folder, step, problems))
    if steps or quarantined:
        raise NoGoodCheckpoint(
            f"{folder} holds checkpoints, and {'none is' if wanted == -1 else f'step {wanted} is not'} as it was written: they are quarantined there, "
            f"with the reasons; to start anew, give the run another --job.name"
        )
    return None


def setup_from(
    cfg: Config, mesh: Mesh, folder: Path, step: int | None, rows: int, data: str, build: Callable[[Config, Mesh], Run] = setup
) -> tuple[Run, Tensor | None]:
    """A run as it was after `step`, and its data positions [rows, W]; or, without a step, a new one.

    Where loading shows that a step is not what was written it is quarantined, and the one before is loaded into a run that is
    built anew: a half-loaded one could keep a part of it.
    """
    run = build(cfg, mesh)
    if step is None:
        load_initial(run)
    while step is not None:
        try:
            return run, resume(run, folder, step, rows, data)
        except DamagedStep as damage:
            problems = [str(damage)]
        on_rank_0(partial(quarantine, folder, step, problems))
        run = None  # its memory
        run = build(cfg, mesh)
        step = find_checkpoint(cfg, folder)
    return run, None


def load_initial(run: Run) -> None:
    """The weights that a new run starts from, where `checkpoint.initial_load_path` or `initial_load_in_hf` says so."""
    cfg, state = run.cfg, model_state(run.parts, copies=True)
    path = cfg.checkpoint.initial_load_path or (cfg.model.hf_assets_path if cfg.checkpoint.initial_load_in_hf else None)
    if path is None:
        return
    path = Path(path).expanduser()
    if cfg.checkpoint.initial_load_in_hf:
        on_rank_0(lambda: warn_of_unused_keys(cfg.model))
        load_hf(cfg.model, path, state)
    else:
        load(path.parent, int(path.name.removeprefix("step-")), state, counted=model_state(run.parts), exclude=cfg.checkpoint.exclude_from_loading)
    init_optimizer_state(run.optimizer)
    copy_tied(run.parts, run.optimizer)
    logger.info(f"initial_load={path}")


def resume(run: Run, folder: Path, step: int, global_batch_size: int, data: str) -> Tensor | None:
    """Brings the run to where it was after `step`; returns the data positions [V, W], None where there are none or they are excluded.

    Later steps are moved into abandoned/. The ranks' random states come back only on as many ranks as wrote them.
    """
    path = folder / f"step-{step}"
    manifest = on_rank_0(lambda: read_manifest(path))
    exclude = run.cfg.checkpoint.exclude_from_loading
    if manifest.get("imported"):
        load(folder, step, model_state(run.parts, copies=True), counted=model_state(run.parts), exclude=exclude)
        init_optimizer_state(run.optimizer)
        copy_tied(run.parts, run.optimizer)
        on_rank_0(lambda: abandon_after(folder, step))
        logger.info(f"started_from={path}")
        return None
    if manifest["model_only"]:
        raise ConfigError(
            f"{path} holds the model only (it was written with checkpoint.last_save_model_only): training cannot go on from "
            f"it; start another run under another --job.name",
            "checkpoint.last_save_model_only",
        )
    if "data" not in exclude:
        _check_same_data(path, manifest, run.cfg, global_batch_size, data)
    init_optimizer_state(run.optimizer)
    load(folder, step, training_state(run, copies=True), counted=training_state(run), exclude=exclude)
    copy_tied(run.parts, run.optimizer)
    run.step, run.tokens = manifest["step"], manifest["tokens"]
    rank_states = read_rank_states(path, manifest)
    if manifest["world_size"] == run.mesh.world_size and "rng" not in exclude:
        _set_rng_state(rank_states[run.mesh.rank]["rng"])
    on_rank_0(lambda: abandon_after(folder, step))
    logger.info(f"resumed={path} step={run.step} tokens={run.tokens}")
    if "data" in exclude:
        return None
    rows = {int(row): place for one in rank_states.values() for row, place in one["rows"].items()}
    return torch.tensor([rows[row] for row in range(global_batch_size)])


def _check_same_data(path: Path, manifest: dict[str, Any], cfg: Config, global_batch_size: int, data: str) -> None:
    """Positions mean something only in the same data, in the same order."""
    if manifest["logical_shards"] != global_batch_size:
        raise ConfigError(
            f"{path} was written with {manifest['logical_shards']} rows a step, this run has {global_batch_size}: the order of "
            f"samples would change; set training.global_batch_size={manifest['logical_shards']}",
            "training.global_batch_size",
        )
    if manifest["data"] != data:
        now = ", ".join(" ".join(filter(None, (source.format, source.path))) for source in training_sources(cfg))
        raise ConfigError(
            f"{path} was written while training on other data than {now} with data.packing={cfg.data.packing!r} now gives: "
            f"positions in it mean nothing here; bring the data back, start another run under another --job.name, or begin the "
            f'new data from its start with checkpoint.exclude_from_loading=["data"]',
            "training.dataset",
            "training.dataset_path",
            "data.sources",
            "data.packing",
        )
    if manifest["seed"] != cfg.debug.seed:
        raise ConfigError(
            f"{path} was written with debug.seed={manifest['seed']}, this run has {cfg.debug.seed}: the order of samples "
            f"would change; set debug.seed={manifest['seed']}",
            "debug.seed",
        )


def _set_rng_state(state: dict[str, str]) -> None:
    tensors = {key: torch.tensor(list(base64.b64decode(value)), dtype=torch.uint8) for key, value in state.items()}
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def export_last(run: Run, saver: Saver, run_folder: Path) -> None:
    """The step that was just saved, as a Hugging Face folder hf/step-N in the run's folder: ranks share its files."""
    to = run_folder / "hf" / f"step-{run.step}"
    unused = lambda: next(path for path in (to, *(to.with_name(f"{to.name}-{k}") for k in range(1, 1000))) if not path.exists())  # noqa: E731
    options = {"dtype": getattr(torch, run.cfg.checkpoint.export_dtype), "shard_bytes": SHARD_BYTES, "process_group": saver.group}
    export_step(run.cfg, run_folder, saver.folder / f"step-{run.step}", on_rank_0(unused, saver.group), **options)
