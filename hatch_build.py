"""Compiles the modules through which every training step goes, where there is a C compiler.

The sources stay Python: Cython compiles them as they are, the same lines run either way, and a wheel carries both. A
``.pxd`` file beside a module gives its classes C types; only the compiler reads it. Two modules are written in Cython
(``.pyx``): loops over small arrays, and calls of oneDNN, for which NumPy and ctypes serve otherwise. The step of a
network too small for arithmetic to matter takes less than half of the time. Without a compiler, in an editable
installation and with ``HATCH_BUILD_NO_HOOKS=true`` the sources alone are installed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Semantics as in the interpreter: annotations stay unchecked, integers become C integers where a .pxd file says so
# alone, and classes say themselves how they are copied and pickled. The lines of Python as comments in C would be a
# twentieth of the compilation.
DIRECTIVES = {
    "language_level": 3,
    "annotation_typing": False,
    "infer_types": False,
    "auto_pickle": False,
    "emit_code_comments": False,
}


# Instructions of a step of the tiny MLP in benchmarks/overhead.py when flags were compared: interpreted 494,000;
# compiled with -O1 417,000, -O2 415,000, -Og 439,000, -O0 561,000, for 33, 54, 20 and 14 s of compilation. Warnings
# (-Wall is Python's own default) cost another fifth.
FLAGS = ["-O1", "-g0", "-w"]
# For long modules without C types beside them: three quarters of the compilation of -O1, for 0.7 % more instructions of
# that step; 1.9 % with -Og alone, and 0.6 % more where short ones have these, too.
LONG_FLAGS = [
    "-Og", "-ftree-sra", "-ftree-pta", "-fdse", "-ftree-dse", "-fif-conversion", "-fssa-phiopt",
    "-finline-functions-called-once", "-g0", "-w",
]  # fmt: skip
LONG_LINES = 100
# Loops over arrays, written for the compiler: with vectors, and each operation rounded by itself. Neither errno nor
# the processor's flags are read afterwards, which would keep roots and choices out of vectors. Without threaded jumps
# two bounds of a number stay two instructions each and do not become five conditions: a sigmoid takes 0.85 of the time.
# Each loop begins a line of the cache, or a change to one would move all behind it: the same code can take 1.3 of the
# time elsewhere.
LOOP_FLAGS = [
    "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps", "-falign-functions=64",
    "-g0", "-w",
]  # fmt: skip
# Loops over a few elements: vectors, and little else that -O3 does, for half of its compilation; the step of a tiny MLP
# takes the same time.
SMALL_LOOP_FLAGS = ["-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", *LOOP_FLAGS[1:]]
# Of these, those that name passes of GCC: for Clang a flag that it does not know is an error.
OF_GCC = {f for f in (*LONG_FLAGS, "-fno-thread-jumps", "-fvect-cost-model=dynamic") if f.startswith("-f")}
SECONDS_PER_LINE = 0.009  # of one core, for a line of Python, on an Intel Xeon of 2.6 GHz


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """``[tool.hatch.build.targets.wheel.hooks.custom]``: ``modules`` are paths."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into a temporary directory, and add the result to the wheel."""
        if version == "editable":  # a compiled module would hide the source that is being edited
            return
        paths = self.config["modules"]
        check(Path(self.root), paths)
        num_lines = sum(len((Path(self.root) / path).read_text().splitlines()) for path in paths)
        seconds = round(num_lines * SECONDS_PER_LINE)
        self.app.display_info(f"dbrdist: compiling {len(paths)} modules with Cython, about {seconds} s of one core")
        self._directory = tempfile.TemporaryDirectory()
        try:
            built = compiled(self.root, paths, Path(self._directory.name))
        except Exception as e:
            is_missing = isinstance(e, ImportError) or type(e).__module__.split(".")[0] in ("distutils", "setuptools")
            if not is_missing:
                raise
            self.app.display_warning(f"dbrdist is installed without compiled modules, because no compiler ran: {e}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update(built)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Forget the temporary directory."""
        if version != "editable":
            self._directory.cleanup()


def check(root: Path, paths: list[str]) -> None:
    """Raise unless each path is a module, and each .pxd file lies beside one of them."""
    missing = [path for path in paths if not (root / path).is_file()]
    if missing:
        raise ValueError(f"pyproject.toml: modules: expected paths of modules, but there is no {', '.join(missing)}")
    types = [str(p.relative_to(root)) for p in sorted(root.glob("dbrdist/**/*.pxd"))]
    unused = [path for path in types if path.removesuffix(".pxd") + ".py" not in paths]
    if unused:
        raise ValueError(f"{', '.join(unused)}: expected the module of the same name among the modules to compile")


def flags(path: Path) -> list[str]:
    """What the C compiler is told about a module."""
    if path.stem.endswith("_loops"):
        return SMALL_LOOP_FLAGS if path.stem.startswith("small_") else LOOP_FLAGS
    is_long = len(path.read_text().splitlines()) >= LONG_LINES
    return LONG_FLAGS if is_long and not path.with_suffix(".pxd").exists() else FLAGS


def compiled(root: str, paths: list[str], directory: Path) -> dict[str, str]:
    """Compile modules of a source tree: each file that was made, and its place in the wheel."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext
    from setuptools.errors import CompileError

    class Build(build_ext):
        """Compiles without the flags of GCC where the compiler is another."""

        def build_extensions(self) -> None:
            source = Path(self.build_temp, "nothing.c")
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text("int nothing;\n")
            try:
                self.compiler.compile([str(source)], self.build_temp, extra_postargs=sorted(OF_GCC))
            except CompileError:
                for extension in self.extensions:
                    extension.extra_compile_args = [f for f in extension.extra_compile_args if f not in OF_GCC]
            super().build_extensions()

    before = os.getcwd()
    os.chdir(root)
    try:
        extensions = [
            Extension(
                os.path.splitext(path)[0].replace("/", "."),
                [path],
                include_dirs=[os.path.dirname(path)],  # a header beside a .pyx
                extra_compile_args=flags(Path(path)),
            )
            for path in paths
        ]
        extensions = cythonize(extensions, build_dir=str(directory / "c"), compiler_directives=DIRECTIVES, quiet=True)
        command = Build(Distribution({"ext_modules": extensions}))
        command.build_lib, command.build_temp = str(directory / "lib"), str(directory / "temp")
        command.parallel = os.cpu_count()
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    lib = directory / "lib"
    return {str(p): str(p.relative_to(lib)) for p in sorted(lib.rglob("*")) if p.is_file()}
