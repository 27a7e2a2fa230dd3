"""What a text says in the end: an answer counts where the text commits itself to one."""

import re

MARK = re.compile(r"####|\banswer(?:\s+is\b|\**\s*:)\s*:?", re.IGNORECASE)
DOUBT = re.compile(r"\b(or|either|maybe|perhaps|wait|no|actually)\b", re.IGNORECASE)
SEVERAL = re.compile(rf"{DOUBT.pattern}|\b(and|not|between)\b", re.IGNORECASE)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


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
    if None in found or len(set(found)) > 1 or re.search(r"\d", rest) or SEVERAL.search(rest):
        return None
    return found[0]


def final_number(text: str) -> str | None:
    """The number that `final_answer` finds, else the one after the last `=`, `is` or `equals`; None with a doubt, or where there are several."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text)
    said = final_answer(text)
    if not MARK.search(text) and "\\box" not in text and not DOUBT.search(text):
        numbers = set(NUMBER.findall(re.split(r"=|\bis\b|\bequals\b|\bequal to\b", text)[-1]))
        said = numbers.pop() if len(numbers) == 1 else None
    return said if said is not None and NUMBER.fullmatch(said) else None


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
    if SEVERAL.search(words) or re.search(r"[A-Za-z]{2,}.*\d", words) or len(re.findall(r"[A-Za-z]{2,}", words)) > 3:
        return None
    return plain_number(re.sub(r"\s+[A-Za-z]{2,}[A-Za-z ]*$", "", text))


def plain_number(text: str) -> str:
    """Without currency and the commas of thousands."""
    text = text.strip().removeprefix("\\$").removeprefix("$").strip()
    return re.sub(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3}(?:\D|$))", "", text)


def last_block(text: str) -> str | None:
    """The last ``` block of a text after its </think>; the whole of one without any; None where a block or a thought does not end."""
    if "<think>" in text and "</think>" not in text:
        return None
    text = text.rpartition("</think>")[2]
    if not (fences := list(re.finditer(r"^[ \t]*```.*$\n?", text, re.MULTILINE))):
        return text
    return None if len(fences) % 2 else text[fences[-2].end() : fences[-1].start()]
