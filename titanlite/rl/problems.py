"""Problems from users' files: JSONL, parquet and Hugging Face datasets."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from titanlite.config import DataSource
from titanlite.data.huggingface import is_saved, loaded
from titanlite.data.order import shuffled_index
from titanlite.data.records import lines, read_record, without_progress_bars
from titanlite.utils import ConfigError, nearest


@dataclass(frozen=True)
class Problems:
    """Rows of `path`, a .jsonl or .parquet file or hf:NAME; every pass over them has an order of its own.

    `prompt` is what the policy is asked: {question} is the row's `question_key`, another {key} the row's value of that name.
    """

    seed: int
    path: str
    split: str = "train"  # of a Hugging Face dataset
    subset: str | None = None
    question_key: str = "question"
    answer_key: str = "answer"
    held_out_path: str = ""  # where problems to be judged by are
    held_out_split: str = "test"
    source_key: str = ""  # metrics are told for each of its values
    prompt: str = "{question}"

    @cached_property
    def rows(self) -> Sequence[dict]:
        """Read when first asked for: a process that only compares answers does without. Raises ConfigError."""
        try:
            rows = _read(self)
        except ConfigError:
            raise
        except Exception as e:  # of many libraries
            raise ConfigError(f"rl.task_options: path={self.path}: {type(e).__name__}: {e}", "rl.task_options") from e
        if not len(rows):
            raise ConfigError(f"rl.task_options: path={self.path}: it has no rows", "rl.task_options")
        for key in filter(None, (self.question_key, self.answer_key, self.source_key)):
            if key not in rows[0]:
                raise ConfigError(f"rl.task_options: path={self.path}: no {key!r} among {', '.join(rows[0])}{nearest(key, rows[0])}", "rl.task_options")
        return rows

    def row(self, number: int) -> dict:
        """The row of problem `number`, a pure function of (seed, number). Below 0 are earlier passes."""
        epoch, i = divmod(number, len(self.rows))
        return self.rows[shuffled_index(i, len(self.rows), seed=self.seed, epoch=epoch)]

    def held_out(self, number: int) -> dict:
        """Row `number` of those to be judged by, in their order. Raises ConfigError where there are none."""
        if not self.held_out_path:
            raise ConfigError("rl.validation_problems needs rl.task_options held_out_path=FILE.jsonl, FILE.parquet or hf:NAME", "rl.task_options")
        return self._others.rows[number % len(self._others.rows)]

    @cached_property
    def _others(self) -> "Problems":
        return replace(self, path=self.held_out_path, split=self.held_out_split)

    def asked(self, row: dict) -> str:
        values = row | {"question": row[self.question_key]}
        if not isinstance(values["question"], str):
            raise ConfigError(f"rl.task_options: path={self.path}: a {self.question_key!r} must be a string, not {values['question']!r}", "rl.task_options")
        return re.sub(r"\{(\w+)\}", lambda found: str(values.get(found[1], found[0])), self.prompt)

    def source(self, row: dict, otherwise: str) -> str:
        return str(row[self.source_key]) if self.source_key else otherwise


def _read(of: Problems) -> Sequence[dict]:
    from datasets import Dataset, DatasetDict, load_from_disk

    with without_progress_bars():
        if of.path.startswith("hf:"):
            name = of.path.removeprefix("hf:")
            data = load_from_disk(name) if is_saved(name) else loaded(DataSource("hf", subset=of.subset, split=of.split), name)
            return data[of.split] if isinstance(data, DatasetDict) else data
        if of.path.endswith(".parquet"):
            return Dataset.from_parquet(of.path)
    if not of.path.endswith((".jsonl", ".json")):
        raise ConfigError(f"rl.task_options: path={of.path}: expected FILE.jsonl, FILE.parquet or hf:NAME", "rl.task_options")
    return [_checked(line, number, of) for number, line in lines(of.path)]


def _checked(line: bytes, number: int, of: Problems) -> dict:
    try:
        row = read_record(line)
        if not isinstance(row, dict):
            raise ValueError("a record must be an object")
        for key in filter(None, (of.question_key, of.answer_key, of.source_key)):
            if key not in row:
                raise ValueError(f"no key {key!r} among {', '.join(row)}{nearest(key, row)}")
    except ValueError as error:
        raise ConfigError(f"rl.task_options: {of.path}:{number}: {error}", "rl.task_options") from None
    return row
