"""Run the commands of the Dockerfile, the Apptainer definition and the conda recipe in fresh environments, without any
of these tools: ``python packaging/replay.py [docker] [apptainer] [conda] [--list]``.

Paths of the image are paths below a temporary folder, ``python`` is that of a new virtual environment, and pip brings
what conda would. Left out, and said, is what changes the system: packages of Debian, users. The images themselves are
not built: this shows that the commands run, not that the base image has what they need.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
OF_THE_SYSTEM = ("apt-get", "useradd", "rm -rf /var/lib/apt")  # what starts so is left out
OF_THE_IMAGE = ("/src", "/wheels", "/opt/dbrdist", "/tmp/digits")


def docker() -> list[str]:
    """The shell commands of the Dockerfile, of both stages, with its copies as commands."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "packaging/Dockerfile").read_text())
    found: list[str] = []
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "RUN":
            found += [part.strip() for part in rest.split("&&")]
        elif word == "COPY" and "--from" not in rest:
            source, target = rest.split()
            found.append(f"cp -r {source} {'/src' if target == '.' else target}")
        elif line.startswith("#   docker run"):  # what the head of the file promises
            found.append(line.partition(" dbrdist ")[2])
    head = next(command for command in found if "dbrdist-train --overwrite" in command)
    return [command for command in found if command != head] + [head]


def apptainer() -> list[str]:
    """The files, the commands of %post and those of %test."""
    sections = dict(re.findall(r"^%(\w+)\n((?:    .*\n|\n)+)", (ROOT / "packaging/dbrdist.def").read_text(), re.M))
    found = [f"cp -r {line.strip()}" for line in sections["files"].splitlines() if line.strip()]
    for section in ("post", "test"):
        found += [line.strip() for line in sections[section].splitlines() if line.strip()]
    return [command.replace("rm -rf /src /var/lib/apt/lists/*", "rm -rf /src") for command in found]


def recipe() -> dict[str, dict]:
    """The conda recipe as conda reads it on Linux, its template expressions replaced."""
    text = (ROOT / "packaging/conda/meta.yaml").read_text()
    values = dict(re.findall(r'^{% set (\w+) = "(.*)" %}$', text, re.M))
    text = re.sub(r"^{%.*%}$", "", text, flags=re.M).replace("{{ compiler('c') }}", "c-compiler")
    text = text.replace("{{ PYTHON }}", "python").replace("{{ name|lower }}", values["name"].lower())
    return yaml.safe_load(text.replace("{{ version }}", values["version"]))


def conda() -> list[str]:
    """Requirements by pip, the build, the imports and the commands of the recipe."""
    parts = recipe()
    needed = [r for key in ("host", "run") for r in parts["requirements"][key] if r not in ("python", "pip")]
    names = " ".join(f"'{r.replace(' ', '')}'" for r in dict.fromkeys(needed))
    imports = [f'python -c "import {name}"' for name in parts["test"]["imports"]]
    scripts = [e.partition("=")[0].strip() for e in parts["build"]["entry_points"]]
    entries = [f'test -x "$(dirname "$(command -v python)")/{script}"' for script in scripts]  # no other environment's
    install = f"python -m pip install --quiet {names}"
    return ["cp -r . /src", install, f"cd /src && {parts['build']['script']}", *entries, *imports,
            *parts["test"]["commands"]]  # fmt: skip


def is_left_out(command: str) -> bool:
    """Whether a command changes the system."""
    return command.startswith(OF_THE_SYSTEM)


def local(command: str, folder: Path) -> str:
    """A command with paths of the image as paths below ``folder``; a copy takes the files that git has."""
    if command.startswith("cp -r . "):
        command = f"mkdir -p /src && git -C {ROOT} archive HEAD | tar -x -C /src"
    elif command.startswith("cp -r "):
        source, target = command.split()[2:]
        command = f"mkdir -p $(dirname {target}) && cp {ROOT / source} {target}"
    for path in OF_THE_IMAGE:
        command = re.sub(rf"(?<![\w./-]){re.escape(path)}\b", f"{folder}{path}", command)
    return command


def replay(commands: list[str], folder: Path) -> None:
    """Run them one after another, as the image's shell would."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    (folder / "src").mkdir()
    own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    own |= {"PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(folder)}
    for command in commands:
        if is_left_out(command):
            print(f"left out: {command}", flush=True)
            continue
        print(f"$ {command}", flush=True)
        where = folder / "src" if (folder / "src").exists() else folder
        is_build = " wheel " in command
        subprocess.run(
            ["bash", "-ec", local(command, folder)], cwd=where if is_build else folder, env=own, check=True,
            stdout=subprocess.DEVNULL if "-vv" in command else None,
        )  # fmt: skip


def main() -> None:
    kinds = {"docker": docker, "apptainer": apptainer, "conda": conda}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="docker|apptainer|conda")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    args = parser.parse_intermixed_args()
    if unknown := set(args.kinds) - set(kinds):
        parser.error(f"expected {', '.join(kinds)}, got {', '.join(sorted(unknown))}")
    for kind in args.kinds or kinds:
        commands = kinds[kind]()
        print(f"{kind}: {len(commands)} commands", flush=True)
        if args.list:
            print("\n".join(f"{'left out: ' if is_left_out(c) else '$ '}{c}" for c in commands))
            continue
        with tempfile.TemporaryDirectory() as folder:
            replay(commands, Path(folder))
        print(f"{kind}: all of them ran")


if __name__ == "__main__":
    main()
