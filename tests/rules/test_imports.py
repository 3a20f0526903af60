"""The house: a file imports its own room and rooms below it, never upward, never in a ring, never inside a function."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import dbrdist
from tests.each import each

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dbrdist"
FILES = sorted(PACKAGE.rglob("*.py"))

pytestmark = pytest.mark.slow  # parses all of the sources

# What each room may import besides itself, as in the table of docs/design: a floor and everything below it.
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "core": {"errors"},
    "kernels": {"core.array", "core.names", "errors"},
    "utils": {"core", "errors"},
    "backends": {"core", "errors"},
    "function_hooks": {"core", "errors"},
    "functions": {"core", "kernels", "errors"},
    "optimizers": {"core", "kernels", "errors"},
    "datasets": {"core", "kernels", "errors"},
}
BELOW["links"] = {"core", "kernels", "functions", "utils", "errors"}
BELOW["link_hooks"] = {*BELOW["links"], "links", "function_hooks"}
BELOW["distributions"] = {"core", "functions", "errors"}
BELOW["models"] = BELOW["training"] = {*BELOW["links"], "links", "optimizers", "datasets"}
BELOW["comm"] = {*BELOW["models"], "models", "training"}
BELOW["onnx"] = {"core", "errors"}
BELOW["testing"] = {"core", "functions", "links", "training", "utils", "backends", "errors"}
BELOW["cli"] = {*BELOW["comm"], "comm", "compat", "function_hooks", "onnx"}
BELOW["compat"] = {*BELOW["comm"], "comm"}
# What each package may import of its own room besides itself, in the order of the data's way.
WITHIN: dict[str, set[str]] = {
    "core.array": set(),
    "core.usage": {"core.array"},
    "core.tape": {"core.array", "core.usage"},
    "core.names": {"core.tape", "core.usage"},
    "core.model": {"core.array", "core.tape", "core.usage"},
    "core.update": {"core.array", "core.tape", "core.model", "core.names", "core.usage"},
    "core.files": {"core.array", "core.usage"},
    "core.chainer": {"core.array", "core.tape"},
    "kernels.geometry": set(),
    "kernels.unsupported": set(),
    "kernels.small_arrays": set(),
    "kernels.reference": {"kernels.geometry", "kernels.small_arrays", "kernels.unsupported"},
    "datasets.loading": set(),
    "datasets.image": {"datasets.loading"},
    "datasets.table": {"datasets.image", "datasets.loading"},
    "datasets.public": {"datasets.image", "datasets.loading", "datasets.table"},
    "cli.output": set(),
    "cli.configuration": {"cli.output"},
    "cli.builders": {"cli.configuration", "cli.output"},
    "comm.transport": set(),
    "comm.protocol": {"comm.transport"},
    "comm.failure": {"comm.transport"},
    "comm.gradients": {"comm.protocol", "comm.transport"},
    "comm.functions": {"comm.protocol"},
    "comm.links": {"comm.functions", "comm.protocol"},
}
WITHIN["kernels.cpu"] = {*WITHIN["kernels.reference"], "kernels.reference"}
WITHIN["kernels.gpu"] = {*WITHIN["kernels.cpu"], "kernels.cpu"}
WITHIN["kernels.providers"] = {*WITHIN["kernels.gpu"], "kernels.gpu"}
WITHIN["kernels.table"] = {*WITHIN["kernels.providers"], "kernels.providers"}
WITHIN["kernels.dispatch"] = {*WITHIN["kernels.table"], "kernels.table"}
WITHIN["kernels.host_dispatch"] = {*WITHIN["kernels.table"], "kernels.table"}
WITHIN["kernels.device_dispatch"] = {*WITHIN["kernels.table"], "kernels.table"}
WITHIN["kernels.fused_dispatch"] = {*WITHIN["kernels.table"], "kernels.table"}
WITHIN["cli.inspection"] = WITHIN["cli.data"] = {*WITHIN["cli.builders"], "cli.builders"}
WITHIN["cli.running"] = {*WITHIN["cli.inspection"], "cli.inspection"}
WITHIN["cli.train"] = {*WITHIN["cli.running"], "cli.running"}
WITHIN["comm.communicators"] = {*WITHIN["comm.gradients"], "comm.gradients", "comm.failure"}
WITHIN["comm.data"] = WITHIN["comm.steps"] = {*WITHIN["comm.communicators"], "comm.communicators"}
WITHIN["comm.run"] = {*WITHIN["comm.steps"], "comm.data", "comm.steps"}
EXPORTS = {"__init__", "__main__"}  # and files at the root that only re-export: checked below

# Libraries that one file alone may load, at their first use or behind a check.
OWNERS = {
    "cupy": "core/array/gpu/presence.py",
    "cupyx": "core/array/gpu/presence.py",
    "mpi4py": "comm/transport/mpi.py",
    "scipy": "core/array/scipy_parts.py",
    "h5py": "core/files/hdf5.py",
    "matplotlib": "training/plotting.py",
    "ctypes.CDLL libdnnl": "kernels/cpu/onednn.py",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(f): f for f in FILES}
IN_CYTHON = {module_of(f) for f in PACKAGE.rglob("*.pyx")}


def room_of(module: str) -> str:
    return module.split(".")[0]


@functools.cache
def imports_of(path: Path) -> list[tuple[str, bool]]:
    """Pairs of an imported name and whether the import is inside a function; imports for type checkers excluded."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, is_inside: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in {getattr(n, "id", "") for n in ast.walk(node.test)}:
            return
        if isinstance(node, ast.Import):
            found.extend((a.name, is_inside) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.extend(("." * node.level + f"{node.module or ''}.{a.name}", is_inside) for a in node.names)
        else:  # what holds statements, which alone hold imports
            is_inside = is_inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for field in ("body", "orelse", "handlers", "finalbody", "cases"):
                for child in getattr(node, field, ()):
                    visit(child, is_inside)

    visit(ast.parse(path.read_text()), False)
    return found


def own_imports(path: Path):
    for name, inside in imports_of(path):
        assert not name.startswith("."), f"{path}: a relative import hides the room"
        if name.split(".")[0] != "dbrdist":
            continue
        module = name.removeprefix("dbrdist").lstrip(".")
        while module and module not in MODULES and module not in IN_CYTHON:
            module = module.rpartition(".")[0]
        yield module, inside


def is_root(path: Path) -> bool:
    return path.parent == PACKAGE and path.stem != "errors"


# Files at the root are the public surface: names of all rooms but cli.
@each(path=[f for f in FILES if not is_root(f)])
def test_a_file_imports_its_own_room_and_rooms_below(path):
    room = room_of(module_of(path))
    assert room in BELOW, f"a new room {room!r}: give it a floor in this test and in the design"
    for module, _ in own_imports(path):
        assert module != "" or room == "cli", f"{path}: imports the package root, which is above every room but cli"
        if module == "":
            continue
        allowed = {room, *BELOW[room]}
        ok = any(module == a or module.startswith(a + ".") for a in allowed)
        assert ok, f"{path.relative_to(ROOT)}: {room} may not import {module}; allowed are {sorted(allowed)}"


def package_of(module: str) -> str:
    """The package inside a room, or the module that lies in the room itself."""
    return ".".join(module.split(".")[:2])


@each(path=[f for f in FILES if package_of(module_of(f)).split(".")[0] in {w.split(".")[0] for w in WITHIN}])
def test_a_file_imports_its_own_package_and_packages_below_in_its_room(path):
    package = package_of(module_of(path))
    room = room_of(package)
    if package == room:
        return  # a room's __init__, which only exports
    assert package in WITHIN, f"a new package {package!r}: say in this test what of {room} it may import"
    for module, _ in own_imports(path):
        if room_of(module) == room and module != room:
            allowed = {package, *WITHIN[package]}
            assert package_of(module) in allowed, f"{path.relative_to(ROOT)}: {package} may not import {module}"


@each(path=FILES)
def test_own_rooms_are_never_imported_inside_a_function(path):
    inside = [module for module, hidden in own_imports(path) if hidden]
    assert inside == [], f"{path.relative_to(ROOT)}: {inside} imported inside a function; pass a callback down instead"


def test_there_is_no_ring():
    graph = {m: {i for i, _ in own_imports(f) if i != m} for m, f in MODULES.items() if not is_root(f)}
    # a room's __init__ imports its files: a file that imports a sister through the room would be a ring
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> None:
        assert module not in way, "a ring of imports: " + " -> ".join([*way[way.index(module) :], module])
        if module in done or module not in graph:
            return
        for below in graph[module]:
            visit(below, [*way, module])
        done.add(module)

    for module in graph:
        visit(module, [])


@pytest.mark.parametrize("library", ["cupy", "cupyx", "h5py", "matplotlib", "mpi4py", "scipy"])
def test_one_file_alone_imports(library):
    for path in FILES:
        for name, inside in imports_of(path):
            if name.split(".")[0] == library:
                where = str(path.relative_to(PACKAGE))
                assert where == OWNERS[library], f"{where} imports {library}; only {OWNERS[library]} may"
                assert inside, f"{where} imports {library} at import time; it is to be loaded at its first use"


def test_ml_dtypes_is_imported_at_its_first_use():
    for path in FILES:
        for name, inside in imports_of(path):
            assert name.split(".")[0] != "ml_dtypes" or inside, f"{path}: ml_dtypes at import time"


def test_onednn_is_loaded_by_one_file():
    loads = [str(p.relative_to(PACKAGE)) for p in FILES if "libdnnl" in p.read_text() and "CDLL" in p.read_text()]
    assert loads == ["kernels/cpu/onednn.py"]


def test_the_files_at_the_root_only_export():
    for path in FILES:
        if is_root(path) and path.stem not in EXPORTS:
            tree = ast.parse(path.read_text())
            for node in tree.body:
                docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "__getattr__")
                assert docstring or names or isinstance(node, (ast.Import, ast.ImportFrom)), (
                    f"{path.relative_to(ROOT)}:{node.lineno}: a file at the root only re-exports"
                )


# ---- what an import loads -------------------------------------------------------------------------------------------

HEAVY = (
    "mpi4py",
    "cupy",
    "cupyx",
    "h5py",
    "pydantic",
    "rich",
    "click",
    "yaml",
    "torch",
    "PIL",
    "cv2",
    "simplejpeg",
    "ml_dtypes",
    "scipy",
)


def loaded_by(statement: str) -> tuple[set[str], str]:
    """Top-level modules and memory maps of a fresh interpreter after ``statement``."""
    code = (
        f"import sys\n{statement}\n"
        "print(' '.join(sorted({m.split('.')[0] for m in sys.modules})))\n"
        "import os\nprint(open('/proc/self/maps').read() if os.path.exists('/proc/self/maps') else '')\n"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    modules, _, maps = out.stdout.partition("\n")
    return set(modules.split()), maps


@pytest.mark.programs
def test_importing_functions_and_links_loads_nothing_heavy():
    modules, maps = loaded_by("import dbrdist, dbrdist.functions, dbrdist.links")
    assert "dbrdist" in modules and "numpy" in modules
    assert sorted(modules & set(HEAVY)) == []
    for library in ("libdnnl", "libmpi", "libcuda"):
        assert library not in maps


@pytest.mark.programs
def test_importing_comm_does_not_start_mpi():
    modules, maps = loaded_by("import dbrdist.comm")
    assert "mpi4py" not in modules and "libmpi" not in maps and "cupy" not in modules


@pytest.mark.programs
def test_importing_the_rest_loads_no_configuration_library():
    modules, _ = loaded_by("import dbrdist.models, dbrdist.training, dbrdist.datasets, dbrdist.optimizers")
    assert sorted(modules & {"mpi4py", "cupy", "pydantic", "click", "yaml", "matplotlib", "IPython"}) == []


# Modules beyond NumPy's own after an import, compiled or not: each one costs 0.1 to 0.5 ms of every start. Two of them,
# model.slots and model.weight_copies, are what a parameter and an update ask where its copies for a device are.
NUM_MODULES = {"import dbrdist": 84, "import dbrdist, dbrdist.functions, dbrdist.links": 153}


@pytest.mark.programs
@pytest.mark.parametrize("statement", NUM_MODULES)
def test_an_import_loads_few_modules(statement):
    code = f"import sys, numpy\nbefore = set(sys.modules)\n{statement}\nprint(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    loaded = [name for name in out.stdout.split() if "cython" not in name]
    assert len(loaded) <= NUM_MODULES[statement], loaded


@each(room=["functions", "links"])
def test_what_is_loaded_later_is_what_type_checkers_read(room):
    """The table of a room's files and their names, and the imports under TYPE_CHECKING."""
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text())
    (block,) = (n.body for n in tree.body if isinstance(n, ast.If))
    of_room = [n for n in block if n.module == f"dbrdist.{room}"]  # files without names that the room shows
    read = {n.module.removeprefix(f"dbrdist.{room}."): [a.name for a in n.names] for n in block if n not in of_room}
    read |= {a.name: [] for n in of_room for a in n.names}
    module = importlib.import_module(f"dbrdist.{room}")
    assert {file: names.split() for file, names in module._LATER.items()} == read
    later = [name for names in read.values() for name in names]
    assert len(set(later)) == len(later) and set(later) <= set(module.__all__) <= set(dir(module))
    assert not set(later) & {file.partition(".")[0] for file in read}, "an import of the file would hide the name"
    assert not set(later) & {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}


def test_the_roots_names_are_what_type_checkers_read():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (n.body for n in tree.body if isinstance(n, ast.If))
    served = {*dbrdist._LOADED_WHEN_NAMED, *dbrdist._MADE_ELSEWHERE, *dbrdist._MODULES_ELSEWHERE}
    assert {a.asname or a.name for n in block for a in n.names} <= served <= set(dir(dbrdist))
    for n in block:
        for a in n.names:
            direct = importlib.import_module(n.module)
            value = (
                getattr(direct, a.name) if hasattr(direct, a.name) else importlib.import_module(f"{n.module}.{a.name}")
            )
            assert getattr(dbrdist, a.name) is value


# Inside a function where a terminal is served; and in the programs that the doctor starts as ranks of their own.
BESIDE_THE_LAUNCHER = {"view.py": {"rich"}, "mpi_probe.py": {"mpi4py"}}


def test_the_launcher_needs_the_standard_library_and_click():
    for path in (ROOT / "launch").rglob("*.py"):
        for name, _ in imports_of(path):
            top = name.split(".")[0]
            assert (
                name.startswith(".")
                or top in sys.stdlib_module_names
                or top in ("click", "sitecustomize", "dbrdist_launch", "__future__")
                or top in BESIDE_THE_LAUNCHER.get(path.name, ())
            ), f"{path.relative_to(ROOT)} imports {top}: the launcher runs before MPI, NumPy or CUDA are loaded"
