"""Trains a model from a TOML file.

    torchrun --nproc_per_node=2 -m titanlite.train train_configs/debug.toml --training.steps 100
"""

import gc
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from titanlite.checkpoint.folder import checkpoint_folder
from titanlite.config import KEYS, Config, Origins, to_toml, training_sources
from titanlite.data.build import build_heldout, build_sources, check_tokens, order_fingerprint
from titanlite.data.loader import TrainLoader, build_train_loader, data_have_ended, validation_batches
from titanlite.data.remote import with_local_data
from titanlite.data.tokenizer import build_tokenizer, check_vocab
from titanlite.launch import run_as_command
from titanlite.models import get_args
from titanlite.observe.metrics import MetricsLogger, StepTimer
from titanlite.observe.profiler import profiling
from titanlite.parallel.collective import on_rank_0, rank_0_first
from titanlite.parallel.compat import set_timeout
from titanlite.resume import Saver, export_last, find_checkpoint, setup_from
from titanlite.run_folder import open_run_folder, record_start
from titanlite.torchtitan import LACKING
from titanlite.trainer import Run, join, next_microbatches, step_record, train_step, validation_loss
from titanlite.utils import EXIT_DONE, EXIT_FAULT, EXIT_STOPPED, logger
from titanlite.validate import global_batch_size


def train(cfg: Config, origins: Origins) -> int:
    """Trains up to `training.steps`, from the run's newest checkpoint where there is one. Returns the exit code."""
    mesh = join(cfg)
    t = cfg.training
    with open_run_folder(cfg, mesh) as folder:
        for key in origins.keys() - KEYS:
            logger.warning(f"{key} has no effect: {LACKING[key].why} ({origins[key]})")
        if cfg.job.print_config:
            logger.info(to_toml(cfg))
        checkpoints = checkpoint_folder(cfg, folder)
        start = find_checkpoint(cfg, checkpoints) if cfg.checkpoint.enable else None
        if start is not None and start >= t.steps:
            logger.info(f"run={folder} is finished: step {start} of {t.steps}; a higher --training.steps prolongs it")
            return EXIT_DONE

        local = on_rank_0(lambda: with_local_data(cfg))
        together = on_rank_0 if any(source.is_stream for source in training_sources(cfg)) else rank_0_first  # the files of a stream are found by rank 0 alone
        sources = together(lambda: build_sources(local))
        heldout = rank_0_first(lambda: build_heldout(local)) if cfg.validation.enable else None
        tokenizer = on_rank_0(lambda: build_tokenizer(cfg.model, folder, sources))
        check_tokens(sources if heldout is None else [*sources, heldout], tokenizer)
        check_vocab(tokenizer, get_args(cfg.model).vocab_size)

        rows = global_batch_size(cfg, mesh.degrees)
        fingerprint = order_fingerprint(cfg, sources)
        run, positions = setup_from(cfg, mesh, checkpoints, start, rows, fingerprint)
        if data_have_ended(cfg.data, sources, positions):
            logger.info(f"run={folder} is finished: data.epochs={cfg.data.epochs} were read at step {run.step}; a higher number prolongs it")
            return EXIT_DONE
        ranks = {"dp_rank": mesh.batch_rank, "dp_degree": mesh.degrees.batch}
        loader = build_train_loader(
            t, cfg.data, sources, tokenizer, seed=cfg.debug.seed, global_batch_size=rows, positions=positions, **ranks
        )
        record_start(folder, cfg, mesh)
        validate_now = None
        if heldout is not None:
            validate_now = lambda: validation_loss(run, validation_batches(cfg.validation, heldout, tokenizer, **ranks))  # noqa: E731
        saver = Saver(run, loader, checkpoints, data=fingerprint) if cfg.checkpoint.enable else None
        try:
            with profiling(cfg.profiling, folder, rank=mesh.rank, step=run.step) as step_ended:
                code = _loop(run, loader, folder, validate_now, saver, step_ended)
            if cfg.checkpoint.last_save_in_hf and code == EXIT_DONE:
                export_last(run, saver, folder)
            return code
        finally:
            if saver:
                saver.close()


def _loop(
    run: Run, loader: TrainLoader, folder: Path, validate_now: Callable[[], float | None] | None, saver: Saver | None, step_ended: Callable[[], None]
) -> int:
    cfg, steps = run.cfg, run.cfg.training.steps
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(run, "stop_asked", True))
    gc.disable()  # ranks that collect garbage at different times wait for each other
    metrics = _metrics(run, folder) if run.mesh.rank == 0 else None
    timer, first_step, saved, done = StepTimer(), run.step + 1, True, False
    while run.step < steps:
        timer.start()
        microbatches = next_microbatches(run, loader)
        run.has_more = loader.has_more()
        timer.data_ready()
        measured = train_step(run, microbatches, run.loss_fn)
        timer.stop()

        done = run.step == steps or measured.data_ended
        last = done or measured.stop
        heldout_loss = None
        if validate_now and (done or run.step % cfg.validation.freq == 0 and not last):
            heldout_loss = validate_now()
            last |= heldout_loss is None  # a rank was asked to stop
        if metrics and (run.step % cfg.metrics.log_freq == 0 or run.step == first_step or last or heldout_loss is not None):
            metrics.step(step_record(run, measured, *timer.take(), heldout_loss))
        if saver and (run.step % cfg.checkpoint.interval == 0 or last):
            saved = saver.save(last=last)
        if run.step == first_step:
            for group in run.mesh.groups():
                set_timeout(cfg.comm.train_timeout_seconds, group)
        if run.step % cfg.training.gc_freq == 0:
            gc.collect(1)
        step_ended()
        if measured.data_ended:
            logger.info(f"data_ended step={run.step} epochs={cfg.data.epochs}: all ranks stop here")
        if last:
            break
    loader.close()
    if metrics:
        metrics.event("done" if done else "stopped", step=run.step)
        metrics.close()
    unsaved = "" if saved else " (its last step is NOT saved)"
    logger.info(f"{'done' if done else 'stopped by a signal'}: step={run.step} of {steps} run={folder}{unsaved}")
    if not saved:
        return EXIT_FAULT
    return EXIT_DONE if done else EXIT_STOPPED


def _metrics(run: Run, folder: Path) -> MetricsLogger:
    cfg = run.cfg
    tensorboard_folder = folder / cfg.metrics.save_tb_folder if cfg.metrics.enable_tensorboard else None
    return MetricsLogger(
        folder, tensorboard_folder=tensorboard_folder, start_step=run.step, total_steps=cfg.training.steps
    )


def main() -> int:
    return run_as_command(train, sys.argv[1:], "torchrun -m titanlite.train CONFIG.toml [--section.key value ...]")


if __name__ == "__main__":
    sys.exit(main())
