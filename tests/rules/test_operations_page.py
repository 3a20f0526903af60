"""The code of docs/operations.md runs, in the order of the page."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def test_the_page_runs():
    from dbrdist.core.tape.elementwise_table import ROWS

    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 5
    scope = {}
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), scope)
    finally:
        ROWS.pop("gudermannian", None)
