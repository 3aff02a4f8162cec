"""Makes DeepSpeed's source compile its CPU ops for a named architecture in place of the builder's own CPU.

    deepspeed_arch.py SOURCE ARCH

Stock DeepSpeed asks the machine that compiles (`-march=native`, and py-cpuinfo for the vector width): such ops end in
an illegal instruction on an older CPU, and their bytes depend on the builder. Fails, and changes nothing, when the
text that it replaces is not found exactly once: then a new DeepSpeed version needs a look at `op_builder/builder.py`.
Standard library only: it runs in the build stage.
"""

from __future__ import annotations

import sys
from pathlib import Path

# -march value -> the vector width that DeepSpeed's csrc/includes/simd.h is compiled for.
WIDTHS = {"x86-64-v3": "-D__AVX256__", "x86-64-v4": "-D__AVX512__"}
ANCHORS = ("    def cpu_arch(self):\n", "    def simd_width(self):\n")


def patched(text: str, arch: str, where: str) -> str:
    """Return the builder's source with both answers fixed for `arch`. Raises SystemExit with what was expected."""
    if arch not in WIDTHS:
        raise SystemExit(f"architecture {arch!r}: expected one of {', '.join(WIDTHS)} (never native)")
    for anchor, answer in zip(ANCHORS, (f"-march={arch}", WIDTHS[arch]), strict=True):
        if text.count(anchor) != 1:
            raise SystemExit(
                f"{where}: expected {anchor.strip()!r} exactly once, found it {text.count(anchor)} times\n"
                f"this DeepSpeed version chooses its CPU flags in another way: read the file and mend {Path(__file__).name}"
            )
        text = text.replace(anchor, f"{anchor}        return '{answer}'\n\n")
    return text


def main() -> None:
    """Patch `SOURCE/op_builder/builder.py` in place."""
    source, arch = sys.argv[1:]
    path = Path(source) / "op_builder" / "builder.py"
    path.write_text(patched(path.read_text(encoding="utf-8"), arch, str(path)), encoding="utf-8")


if __name__ == "__main__":
    main()
