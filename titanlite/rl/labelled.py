"""Answers with the verdict that they deserve, for every verifier: python -m titanlite.rl.labelled counts where it errs.

A wrong answer must never be taken. A right one that is not taken costs a reward: what such answers look like is listed.
"""

import json
import re
import sys
from dataclasses import dataclass
from typing import Any

from titanlite.rl.tasks import Problem, Task, build_task

KINDS = ("right", "reformatted", "wrong", "truncated", "hedged")


@dataclass(frozen=True)
class Set:
    """Answers to one problem, by kind; the first two kinds are right."""

    task: str
    right_answer: Any  # None: that of the task's problem 0, a whole number; RIGHT is it, WRONG the next one
    right: tuple[str, ...]
    reformatted: tuple[str, ...]
    wrong: tuple[str, ...]
    truncated: tuple[str, ...]
    hedged: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    task: str
    kind: str
    answer: str
    reward: float

    @property
    def false_accept(self) -> bool:
        return KINDS.index(self.kind) > 1 and self.reward == 1

    @property
    def false_reject(self) -> bool:
        return KINDS.index(self.kind) < 2 and self.reward != 1


def _fenced(code: str) -> str:
    return f"So:\n```python\n{code}\n```\nThat is all."


DATA = ("path=unused.jsonl",)
DOUBLE = "def double(n):\n    return n * 2"
CALLS = ["assert double(4) == 8", "assert double('ab') == 'abab'"]
LINES = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}

SETS = (
    Set("arithmetic", "12", ("12",), (" 12 ", "12\n"), ("13", "112", "twelve", "-12"), ("1", ""), ("12 or 13", "13. No wait, 12", "12, 13", "12 13")),
    Set("sorting", [1, 2, 3], ("1 2 3",), ("1  2 3", "1,2,3"), ("3 1 2", "1 3 2", "1 2 3 3"), ("1 2", "1", ""), ("1 2 3 or 3 1 2",)),
    Set(
        "calculator", [1, 2, 3], ("1+2;=3 3+3;=6 6", "6"), ("1+2;=3 3+3;=6  6",), ("1+2;=3 5", "66", "5"), ("1+2;=3 ", "1+2;", ""), ("6 7", "6 or 7", "7. No wait, 6"),
    ),
    Set(
        "math", "42", ("\\boxed{42}", "6 times 7 is 42.\n#### 42", "So 6 \\cdot 7 = 42.\nThe answer is 42.", "<think>41? No.</think>\\boxed{42}"),
        ("42", "$42$", "\\boxed{42.0}", "\\boxed{84/2}", "\\boxed{42\\%}", "\\boxed{x = 42}", "\\boxed{42\\text{ apples}}", "**Answer:** 42", "\\boxed{\\frac{84}{2}}", "42 apples", "So it is 42", "\\boxed{42}, as 6 \\cdot 7 = 42"),
        ("\\boxed{41}", "#### 4.2", "\\boxed{-42}", "\\boxed{420}", "\\boxed{41 = 42}", "The answer is 24.", "\\boxed{42 \\cdot 2}", "no idea", "\\boxed{\\text{forty-two}}"),
        ("\\boxed{42", "\\boxed{4", "#### ", "The answer is", "", "<think>\\boxed{42}", "\\boxed{}"),
        ("It's 41 or 42", "41. No wait, 42", "42. No wait, 41", "\\boxed{41} or \\boxed{42}", "\\boxed{41}. No wait, \\boxed{42}", "\\boxed{41, 42}", "\\boxed{42 \\text{ or } 41}", "\\boxed{\\{41, 42\\}}", "\\boxed{42}, or perhaps 41", "The answer is 41. The answer is 42.",
         "#### 41\n#### 42", "The answer is either 42 or 41", "\\boxed{42 \\pm 1}", "\\boxed{42 \\quad 41}", "\\boxed{[41, 42]}", "42 41", "42; 41", "The answer is 42. 41", "\\boxed{42}. Or 41?", "The answer is 42 (or 41)", "\\boxed{x=41, x=42}", "\\boxed{42 \\vee 41}"),
        DATA,
    ),
    Set(
        "reasoning_gym:chain_sum", None, ("RIGHT", "The answer is RIGHT.", "\\boxed{RIGHT}"), ("1 + 2 = RIGHT.", "The sum of 1 and 2 is RIGHT", "**RIGHT**", "It equals RIGHT.", "RIGHT, the answer"),
        ("WRONG", "1 + RIGHT = WRONG", "RIGHT + WRONG", "RIGHT0", "RIGHT.5", "nothing"), ("1 + 2 =", "The answer is", "", "We get RIGHT + 1 ="), ("RIGHT or WRONG", "WRONG. No wait, RIGHT", "RIGHT. No wait, WRONG", "The answer is WRONG. The answer is RIGHT.", "1 + 2 = WRONG or RIGHT", "1 + 2 = WRONG. Wait, 1 + 2 = RIGHT", "RIGHT, WRONG", "\\boxed{WRONG} \\boxed{RIGHT}", "either RIGHT or WRONG"),
        ("min_digits=3", "min_terms=2", "max_terms=2"),
    ),
    Set(
        "math", "\\frac{1}{2}", ("\\boxed{\\frac{1}{2}}", "#### 1/2"), ("\\boxed{0.5}", "\\boxed{1/2}", "\\boxed{\\frac12}", "\\boxed{\\dfrac{2}{4}}", "\\boxed{2^{-1}}", "\\boxed{50\\%}", "one half"),
        ("\\boxed{\\frac{2}{1}}", "\\boxed{12}", "\\boxed{-\\frac12}", "\\boxed{0.51}"), ("\\boxed{\\frac{1}{2", "\\boxed{\\frac", "1/"), ("\\boxed{1, 2}", "\\boxed{\\pm\\frac12}", "1/2 or 2", "\\boxed{\\frac12 \\text{ or } \\frac13}"), DATA,
    ),
    Set(
        "math", "(x+1)^2", ("\\boxed{(x+1)^2}",), ("\\boxed{x^2+2x+1}", "\\boxed{1+2x+x^2}", "\\boxed{(x+1)(x+1)}"), ("\\boxed{x^2+1}", "\\boxed{(x-1)^2}", "\\boxed{x+1}"), ("\\boxed{(x+1", "(x+1)^"), ("\\boxed{(x+1)^2, (x-1)^2}", "\\boxed{(x\\pm1)^2}"), DATA,
    ),
    Set(
        "math", "\\{-2, 2\\}", ("\\boxed{\\{-2, 2\\}}",), ("\\boxed{2, -2}", "\\boxed{\\{2,-2\\}}", "\\boxed{x=2 \\text{ or } x=-2}", "\\boxed{\\pm 2}"), ("\\boxed{2}", "\\boxed{-2}", "\\boxed{\\{-2, 3\\}}"), ("\\boxed{\\{-2,", "\\{-2, 2"), ("\\boxed{\\{-2, 2, 3\\}}", "\\boxed{2} or \\boxed{-2}"), DATA,
    ),
    Set(
        "math", "1,234,567", ("\\boxed{1,234,567}", "#### 1,234,567"), ("\\boxed{1234567}", "$1,234,567", "\\boxed{1{,}234{,}567}", "\\boxed{\\$1234567}", "\\boxed{1.234567 \\times 10^6}"), ("\\boxed{1234}", "\\boxed{1,234}", "\\boxed{1.234567}"), ("\\boxed{1,234,", "1,234,56"),
        ("\\boxed{1,234,567 \\text{ or } 1,234}",), DATA,
    ),
    Set(
        "code", CALLS, (_fenced(DOUBLE), _fenced("double = lambda n: n + n")), (DOUBLE, f"```\n{DOUBLE}\n```", f"<think>```python\ndef double(n): return 0\n```</think>\n{_fenced(DOUBLE)}"),
        (_fenced("def double(n):\n    return n * 3"), _fenced("def twice(n):\n    return n * 2"), _fenced("def double(n):\n    return 8"), "It doubles n."), (_fenced(DOUBLE)[:-20], f"```python\n{DOUBLE[:-2]}", ""),
        (_fenced(DOUBLE) + _fenced("def double(n):\n    return n * 3"), _fenced("def double(n):\n    return [n * 2, n * 3]"), _fenced("import sys\nsys.exit(0)")), DATA,
    ),
    Set(
        "code", LINES, (_fenced("print(sum(map(int, input().split())))"),), (_fenced("a, b = map(int, input().split())\nprint(a + b, '')\nprint()"),),
        (_fenced("print(3)"), _fenced("print(sum(map(int, input().split())), 0)"), _fenced("print(input())"), "3"), (_fenced("print(sum(map(int, input().split(")[:-30], "```python\nprint(3)"), (_fenced("print(3)\nprint(7)"), _fenced("print(sum(map(int, input().split())), 'or 5')")), DATA,
    ),
)  # fmt: skip


def verdicts(task_of: dict[tuple, Task]) -> list[Verdict]:
    """Of every answer; `task_of` keeps what was built."""
    found = []
    for one in SETS:
        key = one.task, one.options
        task = task_of[key] = task_of.get(key) or build_task(one.task, one.options, 0)
        problem, words = Problem("", one.right_answer, one.task), {}
        if one.right_answer is None:
            problem = task.problem(0)
            words = {"RIGHT": problem.answer["answer"], "WRONG": str(int(problem.answer["answer"]) + 1)}
        for kind in KINDS:
            for answer in getattr(one, kind):
                said = re.sub("RIGHT|WRONG", lambda found, words=words: words[found[0]], answer)
                found.append(Verdict(one.task, kind, answer, task.reward(problem, said)))
    return found


def report(found: list[Verdict]) -> str:
    """A table in Markdown, and the right answers that were not taken."""
    lines = [f"| verifier | {' | '.join(KINDS)} | false accepts | false rejects |", f"|---{'|---' * (len(KINDS) + 2)}|"]
    for name in dict.fromkeys(verdict.task for verdict in found):
        of = [verdict for verdict in found if verdict.task == name]
        counts = [sum(verdict.kind == kind for verdict in of) for kind in KINDS] + [sum(v.false_accept for v in of), sum(v.false_reject for v in of)]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    rejects = [f"- {verdict.task}: `{json.dumps(verdict.answer)[1:-1]}`" for verdict in found if verdict.false_reject]
    return "\n".join([*lines, "", "Right, and not taken:", "", *rejects])


if __name__ == "__main__":
    found = verdicts({})
    print(report(found))
    sys.exit(any(verdict.false_accept for verdict in found))
