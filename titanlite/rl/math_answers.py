"""Mathematics with a right answer, compared by math-verify (extra `math`): rl.task = "math"."""

import logging
import re
from functools import partial
from typing import Any

from titanlite.rl.answers import boxes, final_answer, last_block, plain_number
from titanlite.rl.problems import Problems
from titanlite.rl.sandbox import Limits, run
from titanlite.rl.tasks import Problem
from titanlite.utils import ConfigError

PROMPT = "{question}\nThe last line is the answer, in \\boxed{}."
OUTPUT = "\n```output\n"
RELATION = re.compile(r"=|\\approx|\\ne|\\neq|\\pm|\\mp|\\sim|\\vee|\\lor|\\to\b|\\text\s*\{\s*(?:or|and)\s*\}")


class Math:
    """Problems of a file with one right answer each: a plain one, a solution that ends with `#### 42`, as GSM8K's, or one with a \\boxed{}.

    A sample says its answer once, as `final_answer` finds it; 1 where math-verify takes it for equal to the right one, else 0. It works until
    the process is killed, without time-outs of its own: their alarm fails in a thread, and then every answer is wrong.

    A turn that ends with a ``` block of Python is answered with what it prints, `tool_calls` times at most; the answer stands after the last of these.
    """

    def __init__(self, seed: int, *, tool_calls: int = 0, tool_seconds: float = 2.0, **data: Any):
        try:
            import math_verify
        except ImportError as e:
            raise ConfigError('rl.task="math" needs the package math-verify: pip install "titanlite[math]"', "rl.task") from e
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # that its time-outs are off
        self.tool_calls, self.limits = tool_calls, Limits(tool_seconds, output_bytes=2000)
        self.problems = Problems(seed, **({"prompt": PROMPT} | data))
        latex = [math_verify.LatexExtractionConfig()]
        self.read = partial(math_verify.parse, extraction_config=latex, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
        self.same = partial(math_verify.verify, timeout_seconds=None, raise_on_error=True)

    def problem(self, number: int) -> Problem:
        return self._problem(self.problems.row(number))

    def held_out(self, number: int) -> Problem:
        return self._problem(self.problems.held_out(number))

    def _problem(self, row: dict) -> Problem:
        solution = str(row[self.problems.answer_key])
        right = solution.rpartition("####")[2] if "####" in solution else (boxes(solution) or [(solution, 0)])[-1][0]
        return Problem(self.problems.asked(row), right.strip(), self.problems.source(row, "math"))

    def demonstration(self, number: int) -> list[str]:
        return [str(self.problems.row(number)[self.problems.answer_key])]

    def reward(self, problem: Problem, answer: str) -> float:
        right = self.read(f"${plain_number(problem.answer)}$")
        if not right:
            raise ValueError(f"math-verify cannot read the right answer {problem.answer!r}")
        said = final_answer(answer.rpartition(OUTPUT)[2].partition("\n```\n")[2] if OUTPUT in answer else answer)
        if said is None or RELATION.search(said) and not RELATION.search(problem.answer) and not re.match(r"[a-zA-Z]\s*(=|\\in\b)[^=]*$", said):
            return 0.0
        return float(bool(said) and self.same(right, self.read(f"${said}$")))

    def reply(self, problem: Problem, answer: str) -> str | None:
        code = last_block(answer) if answer.rstrip().endswith("```") and answer.count(OUTPUT) < self.tool_calls else None
        if code is None:
            return None
        ran = run(code, limits=self.limits, errors=True)
        return f"{OUTPUT}{ran.output}{ran.fault}\n```\n"
