"""The JSON schemas of the documents, for editors: written to docs/reference/, the same bytes for the same models."""

from __future__ import annotations

from pathlib import Path

from runner.documents import Document
from runner.image_spec import ImageSpec
from runner.record import to_json, write_file
from runner.server import ServerProfile
from runner.spec import RunSpec

DOCUMENTS: dict[str, type[Document]] = {"run": RunSpec, "server": ServerProfile, "image": ImageSpec}


def write_schemas(folder: Path) -> list[Path]:
    """Write `run.schema.json`, `server.schema.json` and `image.schema.json` into `folder`; return their paths."""
    paths = []
    for name, model in DOCUMENTS.items():
        path = folder / f"{name}.schema.json"
        write_file(path, to_json(model.model_json_schema()))
        paths.append(path)
    return paths
