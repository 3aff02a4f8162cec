"""The map shows what is there."""

from __future__ import annotations

import re

from tests.conftest import PROJECT


def test_every_module_of_the_runner_stands_on_the_map() -> None:
    """Those who look for a module find its layer, and no layer names a module that is gone."""
    text = (PROJECT / "ARCHITECTURE.md").read_text("utf-8")
    layers = text.partition("\n## Layers\n")[2].partition("\n## ")[0]
    # Three blanks or more lie between the modules of a layer and what is said of them.
    drawn = {
        word
        for line in re.findall(r"^    (\S.*)$", layers, re.MULTILINE)
        for word in re.split(r" {3,}", line)[0].split()
    }
    files = {path.stem for path in (PROJECT / "runner").glob("*.py")} - {"__init__", "__main__"}
    assert sorted(files - drawn) == []
    assert sorted(drawn - files) == ["inside"]
