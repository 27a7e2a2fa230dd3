"""Mathematics with a right answer, compared by math-verify (extra `math`): rl.task = "math"."""

import logging
import re
from functools import partial
from typing import Any

from titanlite.rl.problems import Problems
from titanlite.rl.tasks import Problem
from titanlite.utils import ConfigError

PROMPT = "{question}\nThe last line is the answer, in \\boxed{}."
MARK = re.compile(r"####|\banswer(?:\s+is\b|\**\s*:)\s*:?", re.IGNORECASE)
DOUBT = re.compile(r"\b(or|and|either|maybe|perhaps|wait|not|no|actually|between)\b", re.IGNORECASE)
RELATION = re.compile(r"=|\\approx|\\ne|\\neq|\\pm|\\mp|\\sim|\\vee|\\lor|\\to\b|\\text\s*\{\s*(?:or|and)\s*\}")


class Math:
    """Problems of a file with one right answer each: a plain one, a solution that ends with `#### 42`, as GSM8K's, or one with a \\boxed{}.

    A sample says its answer once, as `final_answer` finds it; 1 where math-verify takes it for equal to the right one, else 0. It works until
    the process is killed, without time-outs of its own: their alarm fails in a thread, and then every answer is wrong.
    """

    def __init__(self, seed: int, **data: Any):
        try:
            import math_verify
        except ImportError as e:
            raise ConfigError('rl.task="math" needs the package math-verify: pip install "titanlite[math]"', "rl.task") from e
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # that its time-outs are off
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
        right = self.read(f"${_number(problem.answer)}$")
        if not right:
            raise ValueError(f"math-verify cannot read the right answer {problem.answer!r}")
        said = final_answer(answer)
        if said is None or RELATION.search(said) and not RELATION.search(problem.answer) and not re.match(r"[a-zA-Z]\s*(=|\\in\b)[^=]*$", said):
            return 0.0
        return float(bool(said) and self.same(right, self.read(f"${said}$")))

    def reply(self, problem: Problem, answer: str) -> None:
        return None


def boxes(text: str) -> list[tuple[str, int]] | None:
    """(what stands in it, where it ends) of each \\boxed{} or \\fbox{}; None where one does not end."""
    found = []
    for start in re.finditer(r"\\f?box(?:ed)?\s*\{", text):
        depth, end = 1, start.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
            end += 1
        if depth:
            return None
        found.append((text[start.end() : end - 1].strip(), end))
    return found


def final_answer(text: str) -> str | None:
    """The one answer that a text commits itself to, as LaTeX; None where it names none or several.

    In this order: what is in its boxes; the rest of the line after `####` or `answer is`; the whole text where that is an expression and
    no sentence. Only what follows </think> counts. Several that are written differently, or numbers after a box, are no answer.
    """
    if "<think>" in text and "</think>" not in text:
        return None
    text = text.rpartition("</think>")[2].strip()
    boxed = boxes(text)
    if boxed is None:
        return None
    found, rest = [text], ""
    if boxed:
        found, rest = [one for one, _ in boxed], text[boxed[-1][1] :]
    elif marks := list(MARK.finditer(text)):
        found = [text[mark.end() :].strip().partition("\n")[0] for mark in marks]
        rest = text[marks[-1].end() :].strip().partition("\n")[2]
    found = [_bare(one) for one in found]
    if None in found or len(set(found)) > 1 or re.search(r"\d", rest) or DOUBT.search(rest):
        return None
    return found[0]


def _bare(text: str) -> str | None:
    """An expression without marks and units around it; None for a sentence."""
    text = text.strip().strip("*").strip()
    text = text.removesuffix(".").strip().strip("*").strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left):
            text = text[len(left) : -len(right)].strip()
    if "$" in text.removeprefix("$").replace("\\$", ""):
        return None
    words = re.sub(r"\\(text|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+", " ", text)
    if DOUBT.search(words) or re.search(r"[A-Za-z]{2,}.*\d", words) or len(re.findall(r"[A-Za-z]{2,}", words)) > 3:
        return None
    return _number(re.sub(r"\s+[A-Za-z]{2,}[A-Za-z ]*$", "", text))


def _number(text: str) -> str:
    """Without currency and the commas of thousands."""
    text = text.strip().removeprefix("\\$").removeprefix("$").strip()
    return re.sub(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3}(?:\D|$))", "", text)
