"""Compiles the modules through which every training step goes, where a C compiler is at hand.

The sources stay Python: Cython compiles them as they are, the same lines run either way, and a wheel carries both. The
step of a network too small for arithmetic to matter takes two thirds of the time. Without a compiler, in an editable
installation and with ``HATCH_BUILD_NO_HOOKS=true`` the sources alone are installed.
"""

from __future__ import annotations

import os
import tempfile
from glob import glob
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Semantics as in the interpreter: annotations stay unchecked, and integers never become C integers.
DIRECTIVES = {"language_level": 3, "annotation_typing": False, "infer_types": False}


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """``[tool.hatch.build.targets.wheel.hooks.custom]``: ``modules`` are patterns of paths, less ``interpreted``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into a temporary directory, and add what came of it to the wheel."""
        if version == "editable":  # a compiled module would hide the source that is being edited
            return
        found = {p for pattern in self.config["modules"] for p in glob(pattern, root_dir=self.root)}
        left_out = set(self.config["interpreted"])
        if not left_out < found:
            raise ValueError(f"interpreted: expected some of {sorted(found)}, got {sorted(left_out - found)}")
        paths = sorted(p for p in found - left_out if not p.endswith("__init__.py"))
        self._directory = tempfile.TemporaryDirectory()
        try:
            built = compiled(self.root, paths, Path(self._directory.name))
        except Exception as e:
            is_wanting = isinstance(e, ImportError) or type(e).__module__.split(".")[0] in ("distutils", "setuptools")
            if not is_wanting:
                raise
            self.app.display_warning(f"dbrdist is installed without compiled modules, for want of a compiler: {e}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update(built)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Forget the temporary directory."""
        if version != "editable":
            self._directory.cleanup()


def compiled(root: str, paths: list[str], directory: Path) -> dict[str, str]:
    """Compile modules of a source tree; what came of it, and its place in the wheel."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    before = os.getcwd()
    os.chdir(root)
    try:
        flags = ["-O2", "-g0"]  # -O3 compiles longer for steps of the same time; -O1 takes 3 % more
        extensions = [Extension(p[: -len(".py")].replace("/", "."), [p], extra_compile_args=flags) for p in paths]
        extensions = cythonize(extensions, build_dir=str(directory / "c"), compiler_directives=DIRECTIVES, quiet=True)
        command = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(directory / "lib"), str(directory / "temp")
        command.parallel = os.cpu_count()
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    lib = directory / "lib"
    return {str(p): str(p.relative_to(lib)) for p in sorted(lib.rglob("*")) if p.is_file()}
