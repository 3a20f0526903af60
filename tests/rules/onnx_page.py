"""docs/onnx-operators.md, the table of functions with ONNX operators.

``python tests/rules/onnx_page.py --write`` writes it (it needs the packages onnx and onnxruntime); a test keeps it
current where they are installed.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "onnx-operators.md"
HEAD = """# Functions with ONNX operators

`python tests/rules/onnx_page.py --write` makes this page: it exports every function of `dbrdist.functions` with small
inputs and compares what onnxruntime computes with what dbrdist computes, to 1e-5. How to export a network:
[export.md](export.md).

{num} of {total} functions can be exported. A function can have arguments for which there is no operator; the export
then says so and names the layer.

| function | ONNX operators |
|---|---|
"""


def text() -> str:
    """The page."""
    import dbrdist.functions as F
    from tests.onnx.examples import tried

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = tried(Path(folder))
    exported = {name: kinds for name, kinds in found.items() if isinstance(kinds, list)}
    rows = [f"| `{name}` | {', '.join(kinds) or 'none needed'} |" for name, kinds in sorted(exported.items())]
    rest = [name for name in sorted(F.__all__) if name not in exported]
    end = "\n\nWithout an operator: " + ", ".join(f"`{name}`" for name in rest) + ".\n"
    return HEAD.format(num=len(exported), total=len(F.__all__)) + "\n".join(rows) + end


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
    if "--write" in sys.argv:
        PAGE.write_text(text())
    else:
        print(text())
