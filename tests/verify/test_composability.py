from pathlib import Path

from titanlite.verify.composability import composability


def test_the_page_on_composability_says_what_validate_says_now():
    assert Path("docs/composability.md").read_text() == composability()
