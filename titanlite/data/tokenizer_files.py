"""A run's tokenizer as files of a Hugging Face folder."""

import json
import shutil
from pathlib import Path
from typing import Any

from titanlite.config import Model
from titanlite.data.tokenizer import BPE_END, Tokenizer, build_tokenizer, tokenizer_kind
from titanlite.utils import logger

# What a Hugging Face folder may hold besides weights and code.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def copy_assets(folder: Path, to: Path) -> None:
    """Tokenizer, chat template and generation settings of a Hugging Face folder, as far as it has them."""
    for name in FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)


def export_tokenizer(cfg: Model, run_folder: Path, to: Path) -> dict[str, Any]:
    """Writes tokenizer files and generation_config.json into `to`; returns what config.json should say: the ids of marks."""
    kind = tokenizer_kind(cfg)
    if kind == "hf":
        copy_assets(Path(cfg.hf_assets_path).expanduser(), to)
        if not (to / "tokenizer.json").exists():
            logger.warning(f"exported={to}: without a tokenizer, since model.hf_assets_path={cfg.hf_assets_path} has none")
            return {}
        tokenizer = build_tokenizer(cfg, run_folder, None)
        marks = {"bos_token_id": tokenizer.begin_id, "eos_token_id": tokenizer.end_id}
    else:
        tokenizer = build_tokenizer(cfg, run_folder, None)
        _with_marks(_byte_backend() if kind == "byte" else tokenizer.backend, tokenizer).save(str(to / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BPE_END, "eos_token": BPE_END, "clean_up_tokenization_spaces": False}
        (to / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        marks = {"bos_token_id": tokenizer.end_id, "eos_token_id": tokenizer.end_id}
    if not (to / "generation_config.json").exists():
        (to / "generation_config.json").write_text(json.dumps(marks, indent=2) + "\n")
    return marks


def _byte_backend() -> "tokenizers.Tokenizer":  # noqa: F821
    """Every byte a token with its own value as id, nothing merged."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # A byte is written as one character: itself where that is printable, else one from 256 on (as GPT-2's tokenizer has it).
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    other = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(other)): byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BPE_END, special=True, normalized=False)])
    return backend


def _with_marks(backend: "tokenizers.Tokenizer", tokenizer: Tokenizer) -> "tokenizers.Tokenizer":  # noqa: F821
    """A text begins with the end mark, as every document did in training."""
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(single=f"{BPE_END} $A", special_tokens=[(BPE_END, tokenizer.end_id)])
    return backend
