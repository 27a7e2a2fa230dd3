"""From the configuration to sources of documents, or to the user's mistake."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from titanlite.config import Config, DataSource, training_sources
from titanlite.data.files import SUFFIX, build_stdlib, build_text, find_files
from titanlite.data.huggingface import build_hub, build_stream
from titanlite.data.records import build_records
from titanlite.data.sources import BadRecord, Source, fingerprint_of
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokens import build_tokenized, build_tokens
from titanlite.models import get_args
from titanlite.utils import ConfigError, logger

C4 = {"c4": "train", "c4_test": None, "c4_validation": "validation"}  # torchtitan's names -> split on the Hub
ORDER = 2  # of the documents and of what a checkpoint's positions mean: a new number refuses old ones


def build_sources(cfg: Config) -> list[Source]:
    """What training reads. Raises ConfigError as `build_source`."""
    options = {"vocab_size": get_args(cfg.model).vocab_size, "skip_bad_records": cfg.training.skip_bad_records}
    if not cfg.data.sources:
        return [build_source(*training_sources(cfg), **options)]
    return [
        build_source(source, key=f"data.sources[{i}].path", format_key=f"data.sources[{i}].format", **options)
        for i, source in enumerate(cfg.data.sources)
    ]


def build_heldout(cfg: Config) -> Source:
    """What validation reads."""
    v, t = cfg.validation, cfg.training
    source = DataSource(v.dataset, v.dataset_path, text_key=t.text_key)
    options = {"vocab_size": get_args(cfg.model).vocab_size, "skip_bad_records": t.skip_bad_records}
    return build_source(source, key="validation.dataset_path", format_key="validation.dataset", **options)


def check_tokens(sources: Iterable[Source], tokenizer: Tokenizer) -> None:
    """Raises ConfigError where ids on disk are not this tokenizer's, as far as is known."""
    for source in sources:
        made_by = getattr(source, "tokenizer", None)
        if made_by not in (None, tokenizer.fingerprint):
            raise ConfigError(
                f"{source.prefix}.bin was written by titanlite tokenize with another tokenizer ({made_by}) than this run's ({tokenizer.fingerprint}): "
                f"its ids mean other text; name that one as model.hf_assets_path, or tokenize again",
                "model.tokenizer",
                "model.hf_assets_path",
                "data.sources",
                "training.dataset_path",
            )


def order_fingerprint(cfg: Config, sources: Sequence[Source]) -> str:
    """Of all that the positions in a checkpoint depend on, but the seed and the number of rows."""
    return fingerprint_of(ORDER, cfg.data.packing, [source.fingerprint for source in sources])


def build_source(
    source: DataSource,
    *,
    key: str = "training.dataset_path",
    format_key: str = "training.dataset",
    vocab_size: int = 2**31,
    skip_bad_records: bool = False,
) -> Source:
    """The source that stands in the configuration under `key`.

    Raises ConfigError where files are missing, unreadable, empty or hold bad records; with `skip_bad_records` those
    are counted, told of and left out. JSONL and parquet are converted to an Arrow file in the user's cache, by the first rank to get there.
    """
    if source.format in C4:
        split = C4[source.format]
        if source.path is None and split is not None:
            source = replace(source, format="hf_stream", path="allenai/c4", subset="en", split=split)
        else:
            source = replace(source, format="jsonl")
    path, name, involved = source.path, source.format, key.partition("[")[0]
    if name in ("stdlib", "stdlib_heldout"):
        if path is not None:
            raise ConfigError(f"{key}={path} is not read with {format_key}={name}: use text or jsonl", involved, format_key)
        return build_stdlib(heldout=name == "stdlib_heldout")
    if path is None:
        raise ConfigError(f"{format_key}={name} needs {key}, a file, folder or glob", involved, format_key)
    try:
        built, where = _build(source, os.path.expanduser(path), key, vocab_size, skip_bad_records)
    except (FileNotFoundError, PermissionError) as error:
        raise ConfigError(f"{key}={path}: {error.filename or path}: {error.strerror}", involved) from error
    except BadRecord as error:
        raise ConfigError(f"{key}={path}: {error}{_fix(source)}", involved, "training.text_key", "training.skip_bad_records") from None
    if built.skipped:
        logger.warning(f"{key}={path} skipped_records={built.skipped} first={where!r}")
    if len(built) == 0:
        raise ConfigError(f"{key}={path}: no documents: all is empty, {built.skipped} bad records", involved)
    return built


def _build(source: DataSource, path: str, key: str, vocab_size: int, skip: bool) -> tuple[Source, str]:
    """The source, and where its first bad record lies."""
    if source.format == "megatron":
        return build_tokens(path, vocab_size), ""
    if source.format == "tokens":
        return build_tokenized(path, vocab_size), ""
    if source.format == "hf":
        built = build_hub(source, path, skip)
        return built, built.first_skipped
    if source.format == "hf_stream":
        return build_stream(source, path, skip), ""
    suffix = SUFFIX[source.format]
    files = find_files(path, suffix)
    if not files:
        raise ConfigError(f"{key}={source.path}: no file found (of a folder, all {' and '.join(f'*{s}' for s in suffix)} are read)", key.partition("[")[0])
    if source.format == "text":
        return build_text(files, skip)
    return build_records(source.format, files, source.text_key, skip)


def _fix(source: DataSource) -> str:
    """What the user can do about a bad record."""
    if source.format in ("megatron", "tokens"):
        return ""
    fix = "convert the file to UTF-8" if source.format == "text" else f"see text_key={source.text_key!r}"
    return f"; {fix}, or set training.skip_bad_records=true to leave such records out"
