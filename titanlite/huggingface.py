"""`titanlite import MODEL RUN` and `titanlite export RUN -o DIR`: a Hugging Face folder made a run, and a run's step made one."""

import dataclasses
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from titanlite.checkpoint.folder import checkpoint_folder, fsync, list_steps
from titanlite.checkpoint.hf_export import export_step
from titanlite.checkpoint.hf_folder import load_hf, tensor_maker, warn_of_unused_keys
from titanlite.checkpoint.integrity import DamagedStep
from titanlite.checkpoint.state import model_state
from titanlite.checkpoint.store import load, save
from titanlite.config import Config, Model, override, to_toml
from titanlite.data.tokenizer import build_tokenizer, check_vocab
from titanlite.data.tokenizer_files import copy_assets
from titanlite.models import get_args, get_model, get_plan
from titanlite.parallel.parallelize import allocate
from titanlite.utils import ConfigError, Fault, logger

ASSETS = "hf_assets"  # in the run's folder: config.json, tokenizer and the like


def import_command(source: str, run: Path, cfg: Config) -> None:
    """Makes the new run folder `run` with the model as step 0, in training.dtype; training, generation and export go on from it."""
    folder = find_folder(source)
    if run.exists():
        raise ConfigError(f"{run} exists already: give another folder, or remove it")
    given = override(cfg, {"model.name": "hf", "model.hf_assets_path": str(folder)})
    warn_of_unused_keys(given.model)
    if (folder / "tokenizer.json").exists():
        check_vocab(build_tokenizer(given.model, None, None), get_args(given.model).vocab_size)
    place = run.with_name(f".{run.name}-{uuid.uuid4().hex[:8]}")
    try:
        (place / ASSETS).mkdir(parents=True)
        copy_assets(folder, place / ASSETS)
        shutil.copyfile(folder / "config.json", place / ASSETS / "config.json")
        settings = {"model.hf_assets_path": str(run.resolve() / ASSETS), "job.name": run.name, "job.dump_folder": str(run.parent)}
        cfg = override(given, settings | {"checkpoint.enable": True})
        (place / "config.toml").write_text(to_toml(cfg), encoding="utf-8")
        state = model_state([_allocated(given.model, getattr(torch, cfg.training.dtype), "meta")])
        extra = {"tokens": 0, "model_only": True, "imported": source}
        save(checkpoint_folder(cfg, place), 0, state, extra=extra, keep_latest_k=0, make=tensor_maker(given.model, folder, state))
        place.rename(run)
        fsync(run.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {run}: {error}") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
    logger.info(f"imported={folder} run={run} parameters={sum(tensor.numel() for tensor in state.values()):,}")


def find_folder(source: str) -> Path:
    """A folder as it is, or that of a model of the Hugging Face Hub, from its cache or fetched."""
    folder = Path(source).expanduser()
    if folder.is_dir() or source.count("/") != 1 or source.startswith((".", "/", "~")):
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}")
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]))
    except Exception as error:  # the library raises those of several others
        raise ConfigError(f"{source}: there is no such folder, nor can it be had from the Hugging Face Hub: {error}") from error


def export_command(run: Path, cfg: Config, to: Path, *, step: int | None, dtype: str | None, shard_bytes: int, check: bool) -> None:
    """Writes the model of a step (None: the newest) to the new folder `to`, in `dtype` (None: checkpoint.export_dtype)."""
    checkpoints = checkpoint_folder(cfg, run)
    steps = list_steps(checkpoints)
    step = steps[-1] if step is None and steps else step
    if step not in steps:
        raise ConfigError(f"{'no step' if step is None else f'--step={step}'}: {checkpoints} holds {', '.join(map(str, steps)) or 'no checkpoint'}")
    narrow = getattr(torch, dtype or cfg.checkpoint.export_dtype)

    def compare(place: Path) -> None:
        _check_logits(cfg, checkpoints, step, place, narrow)

    try:
        export_step(cfg, run, checkpoints / f"step-{step}", to, dtype=narrow, shard_bytes=shard_bytes, check=compare if check else None)
    except DamagedStep as damage:
        raise ConfigError(f"{checkpoints}/step-{step} is damaged: {damage}; use another --step of {', '.join(map(str, steps))}") from damage
    except OSError as error:
        raise ConfigError(f"cannot write {to}: {error}") from error


def _check_logits(cfg: Config, checkpoints: Path, step: int, folder: Path, narrow: torch.dtype) -> None:
    """Raises Fault unless the folder, read as any other, gives the run's own logits bit for bit, up to the rounding of its weights."""
    exported = Model(name="hf", hf_assets_path=str(folder))
    ours = dataclasses.replace(cfg.model, attention=None, moe_capacity_factor=None)
    expected = _logits(ours, getattr(torch, cfg.training.dtype), narrow, lambda state: load(checkpoints, step, state))
    found = _logits(exported, torch.float32, narrow, lambda state: load_hf(exported, folder, state))
    if not torch.equal(expected, found):
        worst = (expected - found).abs().max().item()
        raise Fault(f"the exported model gives other logits than step {step}, by up to {worst:.3g}: nothing is exported")


@torch.inference_mode()
def _logits(cfg: Model, dtype: torch.dtype, narrow: torch.dtype, fill: Callable[[dict[str, Tensor]], object]) -> Tensor:
    """[2, S, V] in fp32, on random tokens, of a model that is loaded in `dtype` and has its parameters rounded to `narrow`."""
    tokens = torch.randint(get_args(cfg).vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    model = _allocated(cfg, dtype, "cpu")
    fill(model_state([model]))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(narrow)
    return model.float()(tokens, torch.arange(64).expand(2, 64))


def _allocated(cfg: Model, dtype: torch.dtype, device: str) -> nn.Module:
    model = get_model(cfg, dtype)
    allocate(model, get_plan(cfg), torch.device(device))
    return model
