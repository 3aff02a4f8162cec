"""Reading the YAML documents that people write, strictly.

Promises: a document is read once into a frozen model; every fault of it is reported together, each with its key path;
an unknown key is refused with the nearest known one; a duplicate key, an anchor bomb or a file over 4 MiB is refused.
Does not know any document in particular: `spec`, `server` and `image_spec` do.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import yaml

from runner.errors import Fault, Refusal

LIMIT_BYTES = 4 << 20

Sha256 = Annotated[str, pydantic.StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
GitObject = Annotated[str, pydantic.StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Name = Annotated[str, pydantic.StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


def inside_path(path: str) -> str:
    """Return `path` if it may name a file inside a bundle. Raises ValueError."""
    parts = path.split("/")
    if not path or path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise ValueError("a path inside the bundle is relative, without empty, '.' or '..' parts")
    return path


def _absolute(path: str) -> str:
    parts = path.rstrip("/").split("/")[1:]
    if not path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise ValueError("a path on a server is absolute, without empty, '.' or '..' parts")
    return path.rstrip("/") or "/"


InsidePath = Annotated[str, pydantic.AfterValidator(inside_path)]
AbsolutePath = Annotated[str, pydantic.AfterValidator(_absolute)]


class Document(pydantic.BaseModel):
    """Base of every document and of its parts: frozen, strict, no unknown keys."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


D = TypeVar("D", bound=Document)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and aliases (no document of ours needs them)."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_mark()
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed here", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is not text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 2e-5 as text; every trainer's config means the number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def yaml_value(text: str) -> Any:
    """Return the one YAML document in `text`. Raises yaml.YAMLError, also for an alias or a key that stands twice."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader


def yaml_node(text: str) -> Any:
    """Return the root node of the YAML document in `text`; its marks say where each value stands."""
    return yaml.compose(text, Loader=_Loader)


def load(model: type[D], path: Path) -> D:
    """Read the document at `path` as `model`.

    Raises `Refusal` with every fault: unreadable file, YAML error with line, and each field that is missing, unknown
    or of the wrong type, by key path.
    """
    try:
        # Not blocking: a pipe in a document's place must not hang.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("not a regular file")  # noqa: TRY301 - the same answer as for any other
            raw = file.read(LIMIT_BYTES + 1)
    except OSError as error:
        raise Refusal(
            Fault(
                "document cannot be read",
                str(path),
                "a readable file",
                str(error),
                "give the path of the document",
            )
        ) from error
    return parse(model, raw, str(path))


def parse(model: type[D], raw: bytes, where: str) -> D:
    """Read `raw` as a `model`; `where` names the file in faults. Raises `Refusal` as `load` does."""
    if len(raw) > LIMIT_BYTES:
        fix = "is this the right file?"
        raise Refusal(Fault("document too large", where, f"at most {LIMIT_BYTES} bytes", "more", fix))
    try:
        value = yaml_value(raw.decode("utf-8"))
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # PyYAML's constructors give these for an explicit tag that does not fit its value.
        raise Refusal(
            Fault(
                "document is not YAML",
                where,
                "UTF-8 YAML",
                " ".join(str(error).split()),
                "mend the named line",
            )
        ) from error
    try:
        return model.model_validate_json(_as_json(value), strict=True)
    except pydantic.ValidationError as error:
        faults = [_fault(model, where, entry) for entry in error.errors(include_url=False)]
        raise Refusal(*faults) from None


def _as_json(value: object) -> bytes:
    import json

    try:
        return json.dumps(value, default=str).encode()
    except (TypeError, ValueError, RecursionError):
        return b"null"


def _fault(model: type[Document], where: str, entry: Any) -> Fault:
    location = tuple(part for part in entry["loc"])
    path = _key_path(location)
    found = repr(entry.get("input"))
    found = found if len(found) <= 120 else found[:117] + "..."
    match entry["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(str(location[-1]), _known_keys(model, location[:-1]), n=1)
            hint = (
                f"did you mean '{near[0]}'?"
                if near
                else "remove it, or see the JSON schema under docs/reference/"
            )
            return Fault(
                "unknown key", f"{where}: {path}", "a key of this document", f"'{location[-1]}'", hint
            )
        case "missing":
            return Fault("missing key", f"{where}: {path}", "a value", "nothing", f"add '{location[-1]}'")
        case _:
            message = str(entry["msg"]).removeprefix("Value error, ")
            return Fault(
                "wrong value", f"{where}: {path}", message, found, "see the JSON schema under docs/reference/"
            )


def _key_path(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text or "(the whole document)"


def _known_keys(model: type[Document], location: tuple[int | str, ...]) -> list[str]:
    """Every key that could stand beside the unknown one: those of each model reachable along `location`."""
    models: list[type[pydantic.BaseModel]] = [model]
    for part in location:
        models = [inner for outer in models for inner in _models_of(outer, part)] or models
    return sorted({field.alias or name for found in models for name, field in found.model_fields.items()})


def _models_of(model: type[pydantic.BaseModel], part: int | str) -> list[type[pydantic.BaseModel]]:
    field = next((field for name, field in model.model_fields.items() if part in (name, field.alias)), None)
    if field is None:
        return []
    found: list[type[pydantic.BaseModel]] = []
    pending: list[Any] = [field.annotation]
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
            found.append(kind)
        pending.extend(getattr(kind, "__args__", ()))
    return found
