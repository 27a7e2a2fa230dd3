"""Programs, judged by tests that run in a sandbox: rl.task = "code"."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from titanlite.rl.answers import last_block
from titanlite.rl.problems import Problems
from titanlite.rl.sandbox import Limits, hold, run
from titanlite.rl.tasks import Problem
from titanlite.utils import ConfigError

PROMPT = "{question}\nAnswer with one block of Python, between ```python and ```."


class Code:
    """Problems of a file, whose `answer_key` holds tests, as themselves or as JSON:

    {"inputs": [text, ...], "outputs": [text, ...]}: a program reads the one and prints the other;
    the same with "fn_name": inputs are lists of arguments, outputs what the function returns;
    [python, ...] or python: asserts on what the program defines. `entry_key` names the function that a `check(candidate)` is given.

    A sample is worth the share of tests that it passes, with `reward=all` 1 or 0. `seconds` are for all tests of a sample.
    """

    def __init__(
        self, seed: int, *, reward: Literal["all", "share"] = "all", seconds: float = 6.0, memory_mb: int = 512, entry_key: str = "", **data: Any
    ):
        if reward not in ("all", "share"):
            raise ValueError(f"reward={reward}: expected all or share")
        self.problems = Problems(seed, **({"prompt": PROMPT, "answer_key": "tests"} | data))
        self.limits, self.by_share, self.entry_key = Limits(seconds, memory_mb << 20), reward == "share", entry_key

    def problem(self, number: int) -> Problem:
        return self._problem(self.problems.row(number))

    def held_out(self, number: int) -> Problem:
        return self._problem(self.problems.held_out(number))

    def _problem(self, row: dict) -> Problem:
        tests = row[self.problems.answer_key]
        if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
            tests = json.loads(tests)
        if isinstance(tests, dict) and tests.get("fn_name"):
            tests = [f"assert {tests['fn_name']}(*{given!r}) == {wanted!r}" for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True)]
        elif isinstance(tests, dict):
            tests = {"inputs": list(tests["inputs"]), "outputs": list(tests["outputs"])}
        else:
            tests = [tests] if isinstance(tests, str) else list(tests)
            if self.entry_key:
                tests = [f"{test}\ncheck({row[self.entry_key]})" for test in tests]
        if not tests or tests == {"inputs": [], "outputs": []}:
            raise ConfigError(f"rl.task_options: path={self.problems.path}: a problem has no tests: {self.problems.asked(row)[:200]!r}", "rl.task_options")
        return Problem(self.problems.asked(row), tests, self.problems.source(row, "code"))

    def demonstration(self, number: int) -> list[str]:
        raise ConfigError("rl.task='code' has tests and no answers to be shown: use rl.warm_up_steps=0", "rl.warm_up_steps")

    def reward(self, problem: Problem, answer: str) -> float:
        code, tests = last_block(answer), problem.answer
        if code is None:
            return 0.0
        passed = hold(code, tests, self.limits) if isinstance(tests, list) else _printed(code, tests["inputs"], tests["outputs"], self.limits)
        return sum(passed) / len(passed) if self.by_share else float(all(passed))

    def reply(self, problem: Problem, answer: str) -> None:
        return None


def _printed(code: str, inputs: Sequence[str], outputs: Sequence[str], limits: Limits) -> list[bool]:
    """Whether each input makes it print its output, but for blanks that end lines and the text. One process each; their time is shared."""
    passed, end = [], time.monotonic() + limits.seconds
    for given, wanted in zip(inputs, outputs, strict=True):
        left = end - time.monotonic()
        ran = run(code, given, replace(limits, seconds=left)) if left > 0 else None
        passed.append(ran is not None and not ran.fault and _lines(ran.output) == _lines(wanted))
    return passed


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
