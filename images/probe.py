"""What `ferry image smoke` runs in a container of the image, to see what the image can do; it judges nothing.

    probe.py OPS PACKAGES ACCELERATORS     (JSON lists)

Prints one line of JSON: versions of the packages and which of their modules fail to import, the file that each prebuilt DeepSpeed op is loaded from under each
accelerator while every compiler is hidden, what was asked of a hidden compiler, what appeared in the folder for compiled
extensions, whether a small C module for Python compiles, and which requirements of installed packages do not hold.
Needs nothing but the image's own packages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "clang++", "nvcc", "ninja")
MODULE = """
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&definition); }
"""
# DeepSpeed names an op in its own way; the variable that asks for it is the same in every version.
LOAD = """
import json, sys
from deepspeed.ops.op_builder.all_ops import ALL_OPS
found = {}
for op in json.loads(sys.argv[1]):
    try:
        builder = next(b for b in ALL_OPS.values() if getattr(b, "BUILD_VAR", "") == f"DS_BUILD_{op.upper()}")
        found[op] = builder.load().__file__
    except BaseException as error:
        found[op] = f"{type(error).__name__}: {error}"
print("LOADED " + json.dumps(found))
"""


def hide_compilers(folder: Path) -> dict[str, str]:
    """Return the environment in which every compiler is a program that writes down how it was called, and fails."""
    names = folder / "hidden"
    names.mkdir()
    for name in COMPILERS:
        program = names / name
        program.write_text(f'#!/bin/sh\necho "$0 $*" >> {folder}/calls\nexit 77\n')
        program.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{names}:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "CC": str(names / "cc"),
        "CXX": str(names / "c++"),
    }


def loads(ops: list[str], accelerator: str) -> dict[str, Any]:
    """Return where each op comes from under `accelerator`, with compilers hidden, and what was compiled or tried."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        extensions = folder / "extensions"
        extensions.mkdir()
        environment = hide_compilers(folder) | {
            "DS_ACCELERATOR": accelerator,
            "TORCH_EXTENSIONS_DIR": str(extensions),
        }
        done = subprocess.run(
            [sys.executable, "-I", "-c", LOAD, json.dumps(ops)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        said = [
            line.removeprefix("LOADED ") for line in done.stdout.splitlines() if line.startswith("LOADED ")
        ]
        calls = folder / "calls"
        return {
            "ops": json.loads(said[-1]) if said else dict.fromkeys(ops, done.stderr[-800:] or "no answer"),
            "calls": calls.read_text().splitlines() if calls.exists() else [],
            "extensions": sorted(str(path.relative_to(extensions)) for path in extensions.rglob("*")),
        }


def modules_of(packages: list[str]) -> list[str]:
    """Return the importable modules of these installed packages."""
    wanted = {name.lower().replace("_", "-") for name in packages}
    return sorted(
        module
        for module, owners in metadata.packages_distributions().items()
        if module.isidentifier() and wanted & {owner.lower().replace("_", "-") for owner in owners}
    )


def failing(modules: list[str]) -> dict[str, str]:
    """Return each module that does not import, with its error."""
    found = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the answer is about
            found[module] = f"{type(error).__name__}: {error}"
    return found


def launcher() -> str:
    """Compile a C module for Python as Triton does its launchers, import it and return 'built', or what went wrong."""
    with tempfile.TemporaryDirectory() as name:
        source, made = Path(name) / "launcher.c", Path(name) / "launcher.so"
        source.write_text(MODULE)
        command = ["gcc", str(source), "-O3", "-shared", "-fPIC", "-o", str(made)]
        command.append(f"-I{sysconfig.get_paths(scheme='posix_prefix')['include']}")
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
            spec = importlib.util.spec_from_file_location("launcher", made)
            assert spec is not None
            importlib.util.module_from_spec(spec)
        except subprocess.CalledProcessError as error:
            return str(error.stderr)[-800:]
        except (OSError, ImportError) as error:
            return f"{type(error).__name__}: {error}"
    return "built"


def unmet() -> list[str]:
    """Return every requirement of an installed package that does not hold here, as 'package: requirement, found'."""
    from packaging.requirements import Requirement

    found = []
    for package in metadata.distributions():
        for line in package.requires or ():
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                version = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                version = "absent"
            if version == "absent" or not requirement.specifier.contains(version, prereleases=True):
                found.append(f"{package.metadata['Name']}: {requirement}, found {version}")
    return sorted(found)


def main() -> None:
    """Print the answer."""
    ops, packages, accelerators = (json.loads(word) for word in sys.argv[1:])
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    modules = modules_of(packages)
    answer = {
        "versions": versions,
        "modules": modules,
        "not_imported": failing(modules),
        "loads": {accelerator: loads(ops, accelerator) for accelerator in accelerators},
        "launcher": launcher(),
        "unmet": unmet(),
    }
    print("PROBE " + json.dumps(answer, sort_keys=True))


if __name__ == "__main__":
    main()
