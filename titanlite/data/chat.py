"""A message put as a model was trained to be asked: by the chat template of its Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

from titanlite.config import Model
from titanlite.data.tokenizer import Tokenizer, tokenizer_kind
from titanlite.utils import ConfigError


def chat_prompt(cfg: Model, tokenizer: Tokenizer, message: str) -> list[int]:
    """Token ids of the user's message, up to where the model answers. Raises ConfigError where the model has no chat template."""
    return _encoded(tokenizer, _rendered(cfg, tokenizer, [{"role": "user", "content": message}]))


def chat_reply(cfg: Model, tokenizer: Tokenizer, message: str) -> list[int]:
    """Token ids of another message of the user's, which follow the end mark of an answer, up to where the model answers again.

    What stands before is not rendered anew: its tokens are those that the model has drawn.
    """
    answer = "<<the answer before>>"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}, {"role": "user", "content": message}]
    ids = _encoded(tokenizer, _rendered(cfg, tokenizer, messages).rpartition(answer)[2])
    return ids[1:] if ids[:1] == [tokenizer.end_id] else ids


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


def _rendered(cfg: Model, tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    folder = Path(cfg.hf_assets_path or "").expanduser()
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_bytes()) if cfg.hf_assets_path and settings_file.exists() else {}
    template = _template(folder, settings) if tokenizer_kind(cfg) == "hf" else None
    if template is None:
        raise ConfigError(f"--chat needs a chat template: model.hf_assets_path={cfg.hf_assets_path} has none in chat_template.jinja or tokenizer_config.json")
    marks = {key: mark["content"] if isinstance(mark, dict) else mark for key in ("bos_token", "eos_token") if (mark := settings.get(key))}
    try:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **marks)
    except TemplateError as error:
        raise ConfigError(f"the chat template of {folder} fails: {error}", "model.hf_assets_path") from error


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {one["name"]: one["template"] for one in template}.get("default")
    return template
