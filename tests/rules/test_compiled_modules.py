"""What an installation compiles is there: pyproject.toml names modules, and C types lie beside them."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOOK = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]


def test_each_module_that_is_compiled_is_there():
    modules = HOOK["custom"]["modules"]
    assert len(modules) == len(set(modules)) > 5
    assert [path for path in modules if not (ROOT / path).is_file()] == []


def test_types_lie_beside_modules_that_are_compiled():
    types = [path.relative_to(ROOT).with_suffix(".py").as_posix() for path in (ROOT / "dbrdist").rglob("*.pxd")]
    assert set(types) <= set(HOOK["custom"]["modules"])


def test_each_module_in_cython_is_compiled():
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dbrdist").rglob("*.pyx")}
    assert found == {path for path in HOOK["custom"]["modules"] if not path.endswith(".py")} != set()
