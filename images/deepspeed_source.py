"""Changes DeepSpeed's source before it is compiled: ops for a named CPU architecture, used by whoever runs on the host.

    deepspeed_source.py SOURCE ARCH

Stock DeepSpeed asks the machine that compiles (`-march=native`, and py-cpuinfo for the vector width): such ops end in
an illegal instruction on an older CPU, and their bytes depend on the builder. And it uses an op that was built beside
one accelerator under that accelerator only, and else compiles it again without a word, also where the op never sees
the accelerator: so CPU ranks in an image for GPUs would need a compiler, and would not test what GPU ranks run
(docs/decisions/0007). GPU ranks meet stock behaviour.

Fails, and changes nothing, when a text that it replaces is not found exactly once: then a new DeepSpeed version needs a
look at its `op_builder/`. Standard library only: it runs in the build stage.
"""

from __future__ import annotations

import sys
from pathlib import Path

# -march value -> the vector width that DeepSpeed's csrc/includes/simd.h is compiled for.
WIDTHS = {"x86-64-v3": "-D__AVX256__", "x86-64-v4": "-D__AVX512__"}
# Ops whose source, flags and binary are the same for a CPU and for a CUDA build: plain C++ for the host.
HOST_OPS = ("cpu_adam", "cpu_adagrad", "cpu_lion", "pin_memory", "deepspeed_shm_comm")

# What builds the ops, and the copy of it that is installed and loads them.
FOLDERS = ("op_builder", "deepspeed/ops/op_builder")
BUILDER, ALL_OPS = "builder.py", "all_ops.py"
_SAME_ACCELERATOR = "accelerator_name == get_accelerator()._name:"
_OPS_TABLE = "ALL_OPS = {op.name: op for op in __op_builders__ if op is not None}\n"


def changes(arch: str) -> dict[str, list[tuple[str, str]]]:
    """Return what is replaced in each file: (text that stands there once, what takes its place)."""
    return {
        BUILDER: [
            *(
                (anchor, f"{anchor}        return '{answer}'\n\n")
                for anchor, answer in (
                    ("    def cpu_arch(self):\n", f"-march={arch}"),
                    ("    def simd_width(self):\n", WIDTHS[arch]),
                )
            ),
            (_SAME_ACCELERATOR, f"({_SAME_ACCELERATOR[:-1]} or self.name in {HOST_OPS!r}):"),
        ],
        # Built for CUDA, DeepSpeed knows no builder of the op that its CPU ranks want before their first step.
        ALL_OPS: [
            (
                _OPS_TABLE,
                _OPS_TABLE
                + "if get_accelerator()._name == 'cuda':\n"
                + "    _comm = importlib.import_module(f'{op_builder_dir}.cpu.comm')\n"
                + "    ALL_OPS[_comm.ShareMemCommBuilder.NAME] = _comm.ShareMemCommBuilder()\n",
            )
        ],
    }


def changed(text: str, replacements: list[tuple[str, str]], where: str) -> str:
    """Return `text` with every replacement made. Raises SystemExit with what was expected."""
    for old, new in replacements:
        if text.count(old) != 1:
            raise SystemExit(
                f"{where}: expected {old.strip()!r} exactly once, found it {text.count(old)} times\n"
                f"this DeepSpeed version works in another way: read the file and mend {Path(__file__).name}"
            )
        text = text.replace(old, new)
    return text


def main() -> None:
    """Change the files below `SOURCE` in place, all or none."""
    source, arch = sys.argv[1:]
    if arch not in WIDTHS:
        raise SystemExit(f"architecture {arch!r}: expected one of {', '.join(WIDTHS)} (never native)")
    made = {}
    for folder in FOLDERS:
        for name, replacements in changes(arch).items():
            # Resolved: in a checkout the second folder is a link to the first.
            path = (Path(source) / folder / name).resolve()
            if path not in made:
                made[path] = changed(path.read_text(encoding="utf-8"), replacements, str(path))
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
