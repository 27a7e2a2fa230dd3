"""Writes docs/composability.md from the rules of `validate`: python -m titanlite.verify.composability > docs/composability.md"""

from titanlite.config import load_config
from titanlite.utils import ConfigError
from titanlite.verify.command import check_layout
from titanlite.verify.layouts import CHOICES, base_config, parse_layout

HEADER = """# What composes with what

Made by `python -m titanlite.verify.composability` from the rules that `validate` applies before any device work; a test
compares it with them. `ok`: allowed, and `titanlite verify train_configs/qwen3_moe_debug.toml` compares the pair with one rank, tensor by
tensor. A number: refused, for the reason of that number.
"""
def composability() -> str:
    """The page: a table of every pair of choices, then the reasons for refusals in the words of the error."""
    base = base_config(load_config("train_configs/qwen3_moe_debug.toml")[0])
    choices = [choice for group in CHOICES for choice in group if choice]
    group_of = {choice: i for i, group in enumerate(CHOICES) for choice in group}
    reasons: list[str] = []

    def cell(a: str, b: str) -> str:
        if group_of[a] == group_of[b]:
            return ""
        try:
            check_layout(parse_layout(f"{a},{b}", base))
        except ConfigError as e:
            reason = str(e).split(": ", 1)[1].splitlines()[0]
            if reason not in reasons:
                reasons.append(reason)
            return str(reasons.index(reason) + 1)
        return "ok"

    lines = ["| | " + " | ".join(choices) + " |", "|---" * (len(choices) + 1) + "|"]
    lines += [f"| {a} | " + " | ".join(cell(a, b) for b in choices) + " |" for a in choices]
    return "\n".join([HEADER, *lines, "", *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))]) + "\n"




if __name__ == "__main__":
    print(composability(), end="")
