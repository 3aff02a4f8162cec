"""An environment with one changed, added or missing file is refused: quickly at each start, in full by `image verify`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import Fault, Refusal
from runner.inside import installed, records
from runner.inside.digests import Hashed, Stamp, to_memory
from runner.inside.installed import Entry, FileList
from tests.image.environment import SITE, compiled, make_environment, write_list, write_record

CACHE = f"{SITE}/good/__pycache__/__init__.{sys.implementation.cache_tag}.pyc"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A good environment."""
    return make_environment(tmp_path / "venv")


def edit(path: Path, content: bytes) -> None:
    """Change a file, and put its time back: the size, if it stays, and the time tell nothing."""
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def flip(path: Path) -> None:
    """Change one bit, and nothing else that shows."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    edit(path, bytes(content))


def evil(path: Path) -> None:
    """Byte code of another source, put in the place of the right one with its header: what runs is not what one reads."""
    source = path.parent.parent / "evil.py"
    source.write_text("VALUE = 2\n")
    made = compiled(source)
    edit(path, path.read_bytes()[:16] + made.read_bytes()[16:])
    made.unlink()
    source.unlink()


def replaced(path: Path, make: Callable[[], object]) -> None:
    """Put something else in the place of a file or folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make()


# Name -> (the path that is told, the way to break it, what is told).
BREAKS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a source, same size": (f"{SITE}/good/__init__.py", flip, "environment differs: content"),
    "a source, longer": (f"{SITE}/other.py", lambda p: edit(p, b"import os, good\n"), "environment differs: size"),
    "byte code": (CACHE, flip, "environment differs: content"),
    "byte code of another source": (CACHE, evil, "environment differs: content"),
    "a shared object": (f"{SITE}/good/op.so", flip, "environment differs: content"),
    "a .pth": (f"{SITE}/good-hook.pth", flip, "environment differs: content"),
    "a RECORD": (f"{SITE}/good-1.dist-info/RECORD", flip, "environment differs: content"),
    "a script": ("bin/good", flip, "environment differs: content"),
    "pyvenv.cfg": ("pyvenv.cfg", flip, "environment differs: content"),
    "emptied": (f"{SITE}/good/op.so", lambda p: edit(p, b""), "environment differs: size"),
    "a source is gone": (f"{SITE}/good/deep/__init__.py", Path.unlink, "missing from the environment"),
    "byte code is gone": (CACHE, Path.unlink, "missing from the environment"),
    "a link is gone": ("lib64", Path.unlink, "missing from the environment"),
    "a folder is gone": ("include", Path.rmdir, "missing from the environment"),
    "a module more": (f"{SITE}/sitecustomize.py", lambda p: p.write_bytes(b""), "not in the environment's list"),
    "a .pth more": (f"{SITE}/zz.pth", lambda p: p.write_bytes(b"/tmp\n"), "not in the environment's list"),
    "a hidden .pth": (f"{SITE}/.x.pth", lambda p: p.write_bytes(b"import os\n"), "not in the environment's list"),
    "a package more": (f"{SITE}/new-1.dist-info", Path.mkdir, "not in the environment's list"),
    "a namespace more": (f"{SITE}/torch", Path.mkdir, "not in the environment's list"),
    "byte code more": (f"{SITE}/good/other.pyc", lambda p: p.write_bytes(b""), "not in the environment's list"),
    "optimised byte code": (CACHE.replace(".pyc", ".opt-1.pyc"), lambda p: p.write_bytes(b""),
                            "not in the environment's list"),
    "a program more": ("bin/sh", lambda p: p.symlink_to("/bin/sh"), "not in the environment's list"),
    "a name that is no text": (f"{SITE}/" + os.fsdecode(b"\xff\n"), lambda p: p.write_bytes(b""),
                               "not in the environment's list"),
    "a link in a file's place": (f"{SITE}/other.py", lambda p: replaced(p, lambda: p.symlink_to("/x")),
                                 "environment differs: kind"),
    "a pipe in a file's place": (f"{SITE}/other.py", lambda p: replaced(p, lambda: os.mkfifo(p)),
                                 "environment differs: kind"),
    "a file in a folder's place": ("include", lambda p: replaced(p, p.touch), "environment differs: kind"),
    "a link elsewhere": ("bin/python", lambda p: replaced(p, lambda: p.symlink_to("/usr/bin/python3")),
                         "environment differs: target"),
    "a mode": ("bin/good", lambda p: p.chmod(0o777), "environment differs: mode"),
}  # fmt: skip


def told(faults: list[Fault], root: Path) -> set[tuple[str, str]]:
    """Return what and where, the path below `root`."""
    return {(fault.what, fault.where.removeprefix(f"{root}/")) for fault in faults}


def start(root: Path) -> list[Fault]:
    """The quick check, as at a start without a container."""
    return installed.check(root, root, sealed=False)[0]


def full(root: Path) -> list[Fault]:
    """The check of `ferry image verify`."""
    return records.verify(root, root / SITE, root).faults


def test_a_good_environment_passes(root: Path) -> None:
    """No fault, and everything was counted."""
    assert start(root) == []
    report = records.verify(root, root / SITE, root)
    assert (report.faults, report.packages, report.byte_code) == ([], 2, 3)
    assert report.files == 16


@pytest.mark.parametrize("name", BREAKS)
def test_one_change_is_told_by_both_checks(root: Path, name: str) -> None:
    """Changed, added or missing, whatever it is: one fault, that names it."""
    path, change, what = BREAKS[name]
    change(root / path)
    assert told(start(root), root) == {(what, path)}
    assert (what, path) in told(full(root), root)


@pytest.mark.parametrize("name", BREAKS)
def test_a_change_is_told_although_the_list_was_made_after_it(root: Path, name: str) -> None:
    """The packages' own RECORDs say the same, for all that Python would import or run; they came with the wheels."""
    path, change, _ = BREAKS[name]
    if name in (
        "pyvenv.cfg",
        "a link is gone",
        "a folder is gone",
        "a link elsewhere",
        "a mode",
        "byte code is gone",
        "a file in a folder's place",
    ):
        pytest.skip("nothing that Python imports: the list alone knows of it")
    if name in ("byte code", "byte code of another source"):
        pytest.skip(
            "the header is right: the list alone knows, and two builds that must be equal bit for bit"
        )
    if "pipe" in name:
        pytest.skip("cannot be listed at all")
    change(root / path)
    write_list(root)
    assert start(root) == []
    assert any(path in fault.where or fault.what == "package is not in the lock" for fault in full(root))


def test_a_pipe_is_not_listed(root: Path) -> None:
    """The build fails rather than list what has no content."""
    os.mkfifo(root / SITE / "pipe")
    with pytest.raises(Refusal, match="cannot be listed"):
        installed.list_of(root)


def test_at_a_start_from_an_image_sizes_and_times_are_enough(root: Path) -> None:
    """The digest covers the content; what changed there shows in size or time, without a byte read."""
    entries = installed.read_list(root / installed.LIST_NAME).entries
    for path, entry in entries.items():
        if entry.kind == "file":
            os.utime(root / path, ns=(0, 5_000_000_000))
    (root / installed.LIST_NAME).write_bytes(FileList(entries, 5).to_bytes())
    assert installed.check(root, root, sealed=True) == ([], {})
    content = (root / CACHE).read_bytes()
    (root / CACHE).write_bytes(content)
    assert told(installed.check(root, root, sealed=True)[0], root) == {
        ("environment differs: time of change", CACHE)
    }


def test_what_is_remembered_is_not_read_until_its_stamp_changes(root: Path) -> None:
    """A stamp stands for the digest beside it; any write to the file ends that, and a lost memory costs only time."""
    path = f"{SITE}/good/op.so"
    stamp = Stamp.of((root / path).stat())
    wrong = to_memory({path: Hashed("0" * 64, stamp.size_bytes, stamp)})
    (root / installed.STAMPS_NAME).write_text(json.dumps(wrong))
    assert told(start(root), root) == {("environment differs: content", path)}
    edit(root / path, (root / path).read_bytes())
    assert start(root) == []
    for damaged in (b"", b"{", b"[]", b'{"x": [1]}'):
        (root / installed.STAMPS_NAME).write_bytes(damaged)
        assert start(root) == []


def test_very_many_faults_are_counted(root: Path) -> None:
    """An environment that was moved away does not fill the screen."""
    for number in range(100):
        (root / "bin" / f"extra{number}").touch()
    faults = start(root)
    assert len(faults) == installed.LIMIT_FAULTS + 1
    assert (faults[-1].what, faults[-1].found) == ("more like these", "60 further faults")


@pytest.mark.parametrize(
    "damage",
    [lambda raw: b"", lambda raw: raw[:-1], lambda raw: raw.replace(b"#mtree", b"#other"),
     lambda raw: raw + b"./x size=1\n", lambda raw: raw + b"./x type=dir size=1 sha256digest=" + b"0" * 64 + b"\n",
     lambda raw: raw + raw.splitlines(keepends=True)[-1], lambda raw: raw + b"../x type=dir\n",
     lambda raw: raw.replace(b". type=dir mode=0755\n", b""), lambda raw: b"\xff" + raw],
)  # fmt: skip
def test_a_damaged_list_is_refused(root: Path, damage: Callable[[bytes], bytes]) -> None:
    """Cut off, doubled, or anything that a list does not say: no environment passes by it."""
    path = root / installed.LIST_NAME
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Refusal, match="list of files is damaged"):
        installed.check(root, root, sealed=False)
    assert "list of files is damaged" in {fault.what for fault in full(root)}


def test_an_environment_without_a_list_is_refused(root: Path) -> None:
    """One made by an older Ferry, or one that is not finished."""
    (root / installed.LIST_NAME).unlink()
    with pytest.raises(Refusal, match="no list of files"):
        installed.check(root, root, sealed=True)


paths = st.lists(
    st.binary(min_size=1, max_size=6).filter(lambda raw: b"/" not in raw and b"\0" not in raw),
    min_size=1,
    max_size=3,
)
kinds = st.one_of(
    st.builds(lambda mode: Entry("dir", mode), st.integers(0, 0o7777)),
    st.builds(lambda mode, size, sha: Entry("file", mode, size, sha), st.integers(0, 0o7777), st.integers(0, 1 << 40),
              st.from_regex(r"[0-9a-f]{64}", fullmatch=True)),
    st.builds(lambda raw: Entry("link", 0o777, target=os.fsdecode(raw)),
              st.binary(min_size=1, max_size=9).filter(lambda raw: b"\0" not in raw)),
)  # fmt: skip


@given(
    st.dictionaries(paths.map(lambda parts: os.fsdecode(b"/".join(parts))), kinds, max_size=5),
    st.none() | st.integers(0, 1 << 33),
)
def test_any_list_is_read_back_as_it_was_written(entries: dict[str, Entry], time_s: int | None) -> None:
    """Names with spaces, line feeds, bytes that are no text: each in one printable line."""
    entries = {path: entry for path, entry in entries.items() if path != "."}
    listed = FileList({".": Entry("dir", 0o755), **entries}, time_s)
    raw = listed.to_bytes()
    assert raw.isascii()
    assert installed.parse(raw, "list") == listed
    assert installed.parse(raw, "list").to_bytes() == raw


def test_the_list_says_it_in_the_words_of_mtree(tmp_path: Path) -> None:
    """The whole file for a small folder."""
    folder = tmp_path / "x"
    (folder / "a b").mkdir(parents=True, mode=0o755)
    folder.chmod(0o750)
    (folder / "a b" / "é").write_bytes(b"1")
    (folder / "link").symlink_to("a b")
    assert installed.list_of(folder)[0].to_bytes().decode() == (
        "#mtree\n/set type=file mode=0644\n. type=dir mode=0750\n./a\\040b type=dir mode=0755\n"
        "./a\\040b/\\303\\251 size=1 sha256digest=6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b\n"
        "./link type=link mode=0777 link=a\\040b\n"
    )


RECORDS: dict[str, tuple[Callable[[str], str], str]] = {
    "a file without a hash": (lambda text: text.replace(text.split(",")[1], "", 1), "file without a hash"),
    "another hash function": (lambda text: text.replace("sha256=", "md5=", 1), "file differs from RECORD"),
    "a path outside": (lambda text: text + "../../../../x,,\n", "RECORD is damaged"),
    "an absolute path": (lambda text: text + "/etc/passwd,,\n", "RECORD is damaged"),
    "a short row": (lambda text: text + "x\n", "RECORD is damaged"),
    "a file that is not there": (lambda text: text + "absent.py,sha256=x,1\n", "missing from a package"),
    "another size": (lambda text: text.replace(",10\n", ",11\n", 1), "file differs from RECORD"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_does_not_cover_its_package_is_told(root: Path, name: str) -> None:
    """A file without a hash is RECORD itself and nothing else; no RECORD reaches out of the environment."""
    change, what = RECORDS[name]
    path = root / SITE / "good-1.dist-info" / "RECORD"
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    write_list(root)
    assert what in {fault.what for fault in full(root)}


def test_a_package_without_a_record_is_told(root: Path) -> None:
    """Then nothing says what its files must be."""
    (root / SITE / "other-1.dist-info" / "RECORD").unlink()
    write_list(root)
    assert {"no RECORD", "belongs to no package"} <= {fault.what for fault in full(root)}


def test_byte_code_that_python_would_not_take_as_it_is_is_told(root: Path) -> None:
    """Of an older source, of another Python, or of the kind that is checked by time: each header is compared."""
    source = root / SITE / "good" / "__init__.py"
    for header in (b"\0\0\0\0", None):
        content = (root / CACHE).read_bytes()
        (root / CACHE).write_bytes((header or content[:4]) + b"\0\0\0\0" + content[8:])
        write_list(root)
        assert told(full(root), root) == {("byte code is of another source", CACHE)}
        compiled(source)
    source.write_bytes(b"VALUE = 3\n")
    write_record(root / SITE, "good", {"good/__init__.py": b"VALUE = 3\n"})
    write_list(root)
    assert ("byte code is of another source", CACHE) in told(full(root), root)


def test_a_list_that_identity_does_not_name_is_told(root: Path) -> None:
    """In an image IDENTITY, and so the digest's label, names the list; a list made again shows."""
    (root / "IDENTITY").write_text(json.dumps({"files": installed.digest(root / installed.LIST_NAME)}))
    assert full(root) == []
    (root / SITE / "good" / "op.so").write_bytes(b"other")
    listed, _ = installed.list_of(root)
    (root / installed.LIST_NAME).write_bytes(listed.to_bytes())
    assert "list of files differs from IDENTITY" in {fault.what for fault in full(root)}


def test_every_further_folder_on_the_path_is_told(root: Path) -> None:
    """Debian's own packages, /usr/local, and whatever a .pth adds."""
    library = os.path.dirname(os.__file__)
    site = root / SITE
    good = [library, f"{library}/lib-dynload", str(site)]
    assert records.path_faults(root, site, good) == []
    wrong = ["/usr/lib/python3/dist-packages", "/usr/local/lib/python3.11/dist-packages", ""]
    assert [fault.where for fault in records.path_faults(root, site, [*good, *wrong])] == wrong
    (root / "pyvenv.cfg").write_text("include-system-site-packages = true\n")
    assert [fault.where for fault in records.path_faults(root, site, good)] == [str(root / "pyvenv.cfg")]


def test_the_standard_library_is_compared_with_what_dpkg_knows(tmp_path: Path) -> None:
    """A changed module, one that no package installed, and one that is gone; byte code as everywhere."""
    import hashlib

    library, info = tmp_path / "lib" / "python3.11", tmp_path / "info"
    library.mkdir(parents=True)
    info.mkdir()
    for name in ("os.py", "re.py"):
        (library / name).write_text(f"# {name}\n")
        compiled(library / name)
    names = [str(library / name) for name in ("os.py", "re.py")]
    (info / "python3.list").write_text("\n".join(["/.", str(library), *names, ""]))
    sums = [
        f"{hashlib.md5(Path(name).read_bytes(), usedforsecurity=False).hexdigest()}  {name[1:]}"
        for name in names
    ]
    (info / "python3.md5sums").write_text("\n".join([*sums, ""]))
    assert records.library_faults(library, info) == ([], 2)
    (library / "os.py").write_text("# other\n")
    (library / "evil.py").write_text("")
    (library / "re.py").unlink()
    faults, _ = records.library_faults(library, info)
    cache = f"__pycache__/os.{sys.implementation.cache_tag}.pyc"
    assert told(faults, library) == {
        ("byte code is of another source", cache), ("file differs from its package", "os.py"),
        ("belongs to no package", "evil.py"), ("missing from a package", "re.py"),
        ("cannot be read", f"__pycache__/re.{sys.implementation.cache_tag}.pyc"),
    }  # fmt: skip
