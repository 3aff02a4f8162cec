"""A draft of the run spec for a bundle that has none, from what lies in it.

Promises: what can be read is filled in (checkpoint, ranks, updates, code, manifest); what cannot is written as TODO, and
a spec with a TODO in it does not pass; no byte of the bundle is trusted or changed, and no pickle is opened.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import yaml

from runner import archive, manifest
from runner.errors import Refusal
from runner.inside import census
from runner.inside.digests import hash_file
from runner.verify import Bundle

TODO = "TODO"
_HEADER = """\
# Drafted by `ferry describe` from what lies in the bundle. Fill in every TODO, read the rest, then:
#   ferry verify BUNDLE --spec THIS.yaml
"""


@dataclasses.dataclass(frozen=True)
class Draft:
    """A drafted spec as YAML, and what in it could not be read from the bundle."""

    text: bytes
    open_points: tuple[str, ...]


def describe(bundle: Bundle, name: str) -> Draft:
    """Return the draft of a run spec for `bundle`, of a run called `name`."""
    open_points: list[str] = [
        "image: the pin of an image that holds the run's environment",
        "launch: what torchrun starts",
    ]
    spec: dict[str, Any] = {
        "ferry": 1,
        "name": name,
        "image": {"name": TODO, "lock": TODO, "digest": TODO, "config": TODO},
        "code": _code(bundle, open_points),
    }
    spec |= _checkpoint(bundle, open_points)
    spec["launch"] = {"module": TODO, "args": [], "resume_args": []}
    spec |= _data(bundle, open_points)
    if any(path.startswith("run/") for path in bundle.digests):
        spec["logs"] = "run"
    text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=1000)
    notes = "".join(f"# open: {point}\n" for point in open_points)
    return Draft((_HEADER + notes + text).encode(), tuple(open_points))


def _code(bundle: Bundle, open_points: list[str]) -> dict[str, str]:
    candidates = [path for path in sorted(bundle.digests) if path.endswith((".tar", ".tar.gz", ".tgz"))]
    if len(candidates) != 1:
        open_points.append(f"code.archive: one of {', '.join(candidates) or 'none that was found'}")
        return {"archive": TODO, "sha256": TODO, "tree": TODO}
    try:
        tree = archive.tree_of(archive.read(bundle.path / candidates[0]))
    except Refusal as refusal:
        open_points.append(f"code.tree: {refusal.faults[0].what}, {refusal.faults[0].found}")
        tree = TODO
    return {"archive": candidates[0], "sha256": f"sha256:{bundle.digests[candidates[0]]}", "tree": tree}


def _checkpoint(bundle: Bundle, open_points: list[str]) -> dict[str, Any]:
    """World, updates and checkpoint, from the inventory of the one checkpoint that is there."""
    folders = sorted({path.split("/")[0] for path in bundle.digests if census.update_of(path.split("/")[0])})
    found: dict[str, Any] = {"world": {"ranks": TODO}, "updates": TODO, "checkpoint": TODO}
    if not folders:
        open_points.append("checkpoint: no checkpoint-N was found; write 'fresh' if the run begins here")
        return found
    if len(folders) > 1:
        open_points.append(f"checkpoint: one of {', '.join(folders)}")
        return found
    update = census.update_of(folders[0])
    found["checkpoint"] = {"path": folders[0], "update": update}
    try:
        inventory = json.loads((bundle.path / folders[0] / census.INVENTORY).read_bytes())
        ranks, total = inventory["world"], inventory["of"]
        checkpoint = census.take_census(bundle.path / folders[0], ranks)
    except (OSError, ValueError, KeyError, TypeError) as error:
        open_points.append(f"world.ranks, updates: the inventory does not say them ({error!r})")
        return found
    except Refusal as refusal:
        open_points.append(f"checkpoint is not complete: {refusal.faults[0].what}, {refusal.faults[0].where}")
        return found | {"world": {"ranks": ranks}, "updates": total}
    return found | {"world": {"ranks": checkpoint.world}, "updates": checkpoint.updates}


def _data(bundle: Bundle, open_points: list[str]) -> dict[str, Any]:
    """Manifest, its path columns and their root: what all absolute paths in the first row's columns have in common."""
    candidates = [
        path for path in sorted(bundle.digests) if path.endswith(".jsonl") and path.startswith("data/")
    ]
    if len(candidates) != 1:
        open_points.append(f"data.manifest: one of {', '.join(candidates) or 'none that was found'}")
        return {"data": {"manifest": TODO}, "assets": {}, "rebase": {"mount": []}}
    path = bundle.path / candidates[0]
    columns, root = _paths(path)
    data: dict[str, Any] = {"manifest": candidates[0], "root": "images", "path_columns": columns}
    try:
        facts = manifest.read_facts(path, columns, root)
        data |= {"sha256": facts.sha256, "rows": facts.rows, "fingerprint": facts.fingerprint}
    except Refusal as refusal:
        open_points.append(f"data: {refusal.faults[0].where}: {refusal.faults[0].found}")
        data |= {"sha256": "sha256:" + hash_file(path).sha256, "rows": TODO, "fingerprint": TODO}
    open_points.append(
        f"assets.images.origin: {root} is what all paths have in common; the root may lie higher"
    )
    assets = {"images": {"origin": root, "kind": "folder"}}
    return {"data": data, "assets": assets, "rebase": {"mount": ["images"]}}


def _paths(path: Path) -> tuple[list[str], str]:
    columns: list[str] | None = None
    common: str | None = None
    with path.open("rb") as file:
        for line in file:
            try:
                row = manifest.parse_row(line)
            except ValueError:
                break
            if columns is None:
                columns = [
                    key for key, value in row.items() if isinstance(value, str) and value.startswith("/")
                ]
            for column in columns:
                folder = os.path.dirname(str(row.get(column, "")))  # noqa: PTH120 - text of another server
                common = folder if common is None else os.path.commonpath([common, folder])
    return columns or [], common or "/"
