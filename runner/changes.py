"""Which declared fields change on this server, and what the files of the bundle become.

Promises: only fields that the run spec's `rebase.rewrite` declares change, and only as their rule allows; whatever
follows from a change (a digest that is declared as one, the checkpoint's inventory) changes with it, and stands in the
record with its reason; every fault is reported together; the bundle is read and never written to.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from runner import columns, rewrite
from runner.draft import open_draft, written_out
from runner.errors import Fault, Refusal, refuse_if
from runner.inside.census import INVENTORY
from runner.inside.digests import Stamp, sha256_bytes
from runner.rewrite import Edit, Scalar
from runner.server import ServerProfile
from runner.spec import COLUMN_MARK, Rewrite, RunSpec
from runner.verify import VerifiedBundle

CONTAINER_ROOT = PurePosixPath("/ferry")
_LIMIT_BYTES = 64 << 20
_SIZE_KEYS = ("bytes", "size", "size_bytes")


@dataclasses.dataclass(frozen=True)
class RewrittenFile:
    """A file of the bundle as it is on this server. Digests in hex; `why` says for each edited pointer what asked for it.

    `content` is None for the manifest: that was written to `draft` as it was moved, a file without a name, if there was
    a place for it; `moved` is None where it was moved before.
    """

    path: str
    sha256_before: str
    sha256_after: str
    size_bytes: int
    content: bytes | None = None
    edits: tuple[Edit, ...] = ()
    why: Mapping[str, str] = dataclasses.field(default_factory=dict)
    moved: columns.Moved | None = None
    draft: BinaryIO | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the run finds things on this server: assets by name, and its output folder. As seen by the run.

    `drafts` is a folder of the host for what is written before it has a place; without it, nothing is written.
    """

    assets: Mapping[str, str]
    output: str
    drafts: Path | None = None


def rewritten(
    bundle: VerifiedBundle,
    server: ServerProfile,
    places: Places,
    known: Mapping[str, RewrittenFile],
    on_bytes: Callable[[int], None] | None = None,
) -> tuple[RewrittenFile, ...]:
    """Return every file of `bundle` that differs on `server`, in the order of their paths.

    `known` holds the manifest, by its path, where it was moved and checked before. Raises `Refusal` with every fault:
    a value that the spec does not declare, a field that is not there or does not hold what its rule takes.
    """
    faults = _undeclared(bundle.spec, server)
    work = _Work(bundle, server, places, faults)
    manifest = _manifest(bundle, places, known, faults, on_bytes)
    if manifest is not None:
        work.done[manifest.path] = manifest
    work.run()
    refuse_if(faults)
    changed = {path: file for path, file in work.done.items() if file.sha256_after != file.sha256_before}
    inventory = _inventory(bundle, changed)
    if inventory is not None:
        changed[inventory.path] = inventory
    return tuple(changed[path] for path in sorted(changed))


class _Work:
    """The documents that have declared fields, each rewritten once what it depends on is known."""

    def __init__(
        self, bundle: VerifiedBundle, server: ServerProfile, places: Places, faults: list[Fault]
    ) -> None:
        self.done: dict[str, RewrittenFile] = {}
        self._bundle = bundle
        self._server = server
        self._places = places
        self._faults = faults
        self._rules: dict[str, list[tuple[str, Rewrite]]] = {}
        for rule in bundle.spec.rebase.rewrite:
            for place in rule.at:
                pointer = place.partition("#")[2]
                if not pointer.startswith(COLUMN_MARK):
                    self._rules.setdefault(bundle.spec.file_of(place), []).append((pointer, rule))

    def run(self) -> None:
        """Rewrite every document; digests come after the files that they are of."""
        left = dict(self._rules)
        if self._bundle.spec.checkpoint == "fresh":
            left = {path: rules for path, rules in left.items() if not path.startswith("{checkpoint}/")}
        while left:
            ready = [path for path, rules in left.items() if not self._waits(path, rules, left)]
            if not ready:
                fix = "a digest cannot be part of what it is the digest of"
                names = ", ".join(sorted(left))
                self._faults.append(Fault("digests in a circle", names, "an order of rewriting", "none", fix))
                return
            for path in ready:
                self._one(path, left.pop(path))

    def _waits(self, path: str, rules: list[tuple[str, Rewrite]], left: Mapping[str, Any]) -> bool:
        digests = {
            self._bundle.spec.file_of(rule.digest_of) for _, rule in rules if rule.digest_of is not None
        }
        return path in digests or not digests.isdisjoint(left)

    def _one(self, path: str, rules: list[tuple[str, Rewrite]]) -> None:
        kind = rewrite.kind_of(path)
        assert kind is not None
        raw = _read(self._bundle, path, self._faults)
        if raw is None:
            return
        values: dict[str, Scalar] = {}
        why = {}
        try:
            document = rewrite.parse(raw, kind)
        except ValueError as error:
            self._fault(path, "", f"a {kind.upper()} document", str(error))
            return
        for pointer, rule in rules:
            try:
                old = rewrite.value_at(document, pointer)
                new = self._value(rule, old)
            except ValueError as error:
                self._fault(path, pointer, _wanted(rule), str(error))
                continue
            if new != old:
                values[pointer] = new
                why[pointer] = _reason(rule)
        try:
            content, edits = rewrite.change(raw, kind, values)
        except ValueError as error:
            self._fault(path, "", "a change of the declared fields and nothing else", str(error))
            return
        before = self._bundle.digests[path]
        self.done[path] = RewrittenFile(
            path, before, sha256_bytes(content), len(content), content, edits, why
        )

    def _value(self, rule: Rewrite, old: Any) -> Scalar:
        """What `rule` makes of the value `old`. Raises ValueError if it does not take such a value."""
        if rule.name is not None:
            new: Scalar = self._server.values.get(rule.name, old)
            if type(new) is not type(old):
                raise ValueError(
                    f"{old!r}, while the profile's values.{rule.name} is {new!r}, of another kind"
                )
            return new
        if not isinstance(old, str):
            raise ValueError(repr(old))  # noqa: TRY004 - bad content, not a bug
        if rule.asset is not None:
            known = (self._bundle.spec.assets[rule.asset].origin, f"{CONTAINER_ROOT}/assets/{rule.asset}")
            return moved_path(old, known, self._places.assets[rule.asset])
        if rule.output is not None:
            return moved_path(old, (rule.output, f"{CONTAINER_ROOT}/run"), self._places.output)
        assert rule.digest_of is not None
        path = self._bundle.spec.file_of(rule.digest_of)
        before = self._bundle.digests.get(path)
        file = self.done.get(path)
        after = file.sha256_after if file else before
        if before is None or after is None or old.removeprefix("sha256:") not in (before, after):
            raise ValueError(repr(old))
        return old.replace(before, after)

    def _fault(self, path: str, pointer: str, expected: str, found: str) -> None:
        where = f"{self._bundle.path / path}#{pointer}"
        fix = "mend the place in the spec's rebase.rewrite, or the profile's value; nothing was changed"
        self._faults.append(Fault("cannot be rewritten", where, expected, found, fix))


def moved_path(path: str, known: Sequence[str], after: str) -> str:
    """Return `path` with its leading folder, one of `known`, exchanged for `after`. Raises ValueError if it has another.

    A checkpoint that was saved after a rebase holds the container's own path already.
    """
    for before in known:
        if path == before:
            return after
        if path.startswith(before + "/"):
            return after + path[len(before) :]
    raise ValueError(f"{path!r}, which does not lie below {known[0]}")


def _undeclared(spec: RunSpec, server: ServerProfile) -> list[Fault]:
    declared = {rule.name for rule in spec.rebase.rewrite if rule.name is not None}
    fix = "remove it from the profile; only what the run spec declares under rebase.rewrite may ever change"
    return [
        Fault(
            "change not declared",
            f"server {server.name}: values.{name}",
            "one of " + (", ".join(sorted(declared)) or "none: this run lets no value change"),
            f"'{name}'",
            fix,
        )
        for name in sorted(server.values.keys() - declared)
    ]


def _wanted(rule: Rewrite) -> str:
    if rule.name is not None:
        return f"a single value of the kind of '{rule.name}'"
    if rule.digest_of is not None:
        return f"the SHA-256 of {rule.digest_of}"
    return (
        f"a path at or below the asset '{rule.asset}'" if rule.asset else f"a path at or below {rule.output}"
    )


def _reason(rule: Rewrite) -> str:
    if rule.name is not None:
        return f"value {rule.name}"
    if rule.digest_of is not None:
        return f"digest of {rule.digest_of}"
    return f"asset {rule.asset}" if rule.asset else "output folder"


def _read(bundle: VerifiedBundle, path: str, faults: list[Fault]) -> bytes | None:
    """The file's bytes, if they are still those that were verified."""
    where = str(bundle.path / path)
    fix = "name a file of the bundle in the spec's rebase.rewrite"
    if path not in bundle.digests:
        faults.append(Fault("named but not there", where, "a file of the bundle", "no such file", fix))
        return None
    with (bundle.path / path).open("rb") as file:
        raw = file.read(_LIMIT_BYTES + 1)
    if len(raw) > _LIMIT_BYTES:
        faults.append(Fault("document too large", where, f"at most {_LIMIT_BYTES} bytes", "more", fix))
        return None
    if sha256_bytes(raw) != bundle.digests[path]:
        fix = "the bundle changes under our hands: verify it again"
        found = f"sha256 {sha256_bytes(raw)}"
        faults.append(Fault("mismatch", where, f"sha256 {bundle.digests[path]}", found, fix))
        return None
    return raw


def _manifest(
    bundle: VerifiedBundle,
    places: Places,
    known: Mapping[str, RewrittenFile],
    faults: list[Fault],
    on_bytes: Callable[[int], None] | None,
) -> RewrittenFile | None:
    data = bundle.spec.data
    if not bundle.spec.columns:
        return None
    before = bundle.digests[data.manifest]
    if (file := known.get(data.manifest)) is not None and file.sha256_before == before:
        return file
    source = bundle.path / data.manifest
    roots = bundle.spec.assets[data.root].origin, places.assets[data.root]
    stamp = Stamp.of(source.stat())
    verified = bundle.hashed[data.manifest].stamp == stamp
    draft = None if places.drafts is None else open_draft(places.drafts)
    try:
        moved = columns.move(
            source,
            bundle.spec.columns,
            roots,
            write=None if draft is None else written_out(draft),
            on_bytes=on_bytes,
            sha256_before=before if verified else None,
        )
    except ValueError as error:
        fix = "declare the columns that hold paths below the asset, and no others"
        faults.append(Fault("cannot be rewritten", str(source), f"paths below {roots[0]}", str(error), fix))
        return None
    if moved.sha256_before != before or Stamp.of(source.stat()) != stamp:
        fix = "the bundle changes under our hands: verify it again"
        found = "another" if verified else f"sha256 {moved.sha256_before}"
        faults.append(Fault("mismatch", str(source), f"sha256 {before}", found, fix))
        return None
    return RewrittenFile(
        data.manifest, before, moved.sha256_after, moved.size_bytes, moved=moved, draft=draft
    )


def _inventory(bundle: VerifiedBundle, changed: Mapping[str, RewrittenFile]) -> RewrittenFile | None:
    """The checkpoint's inventory with the digests and sizes of what changed in it: a declared consequence."""
    if bundle.checkpoint is None or bundle.spec.checkpoint == "fresh":
        return None
    inside = bundle.spec.checkpoint.path + "/"
    files = [file for path, file in changed.items() if path.startswith(inside)]
    if not files:
        return None
    path = inside + INVENTORY
    faults: list[Fault] = []
    raw = _read(bundle, path, faults)
    refuse_if(faults)
    assert raw is not None
    values: dict[str, Scalar] = {}
    why: dict[str, str] = {}
    document = rewrite.parse(raw, "json")
    counts = collections.Counter(entry.sha256 for entry in bundle.checkpoint.files.values())
    for file in files:
        name = file.path.removeprefix(inside)
        size = bundle.checkpoint.files[name].size_bytes
        for tokens, value in _entries(document, file, name, size, lone=counts[file.sha256_before] == 1):
            pointer = rewrite.to_pointer(tokens)
            values[pointer] = value
            why[pointer] = f"consequence of {file.path}"
        if not any(reason == f"consequence of {file.path}" for reason in why.values()):
            fix = "the inventory must know every file of the checkpoint by its SHA-256"
            raise Refusal(
                Fault(
                    "inventory does not know it", str(bundle.path / path), file.path, "no digest of it", fix
                )
            )
    content, edits = rewrite.change(raw, "json", values)
    before = bundle.digests[path]
    return RewrittenFile(path, before, sha256_bytes(content), len(content), content, edits, why)


def _entries(
    document: Any, file: RewrittenFile, name: str, size: int, *, lone: bool
) -> Iterator[tuple[tuple[str, ...], Scalar]]:
    """Where `document` gives the digest of `file`, in any layout, and its size beside it; with their new values.

    Of two files with the same bytes, only the entry that says `name` is meant.
    """
    pending: list[tuple[tuple[str, ...], Any]] = [((), document)]
    while pending:
        at, value = pending.pop()
        if isinstance(value, list):
            pending += [((*at, str(number)), inner) for number, inner in enumerate(value)]
        if not isinstance(value, dict):
            continue
        pending += [((*at, key), inner) for key, inner in value.items()]
        known = [
            key
            for key, inner in value.items()
            if isinstance(inner, str)
            and inner.removeprefix("sha256:") == file.sha256_before
            and (lone or name in (key, *at) or name in value.values())
        ]
        for key in known:
            yield (*at, key), value[key].replace(file.sha256_before, file.sha256_after)
        for key in _SIZE_KEYS if known else ():
            if value.get(key) == size and file.size_bytes != size:
                yield (*at, key), file.size_bytes
