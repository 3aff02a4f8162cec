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
from runner.inside.digests import Stamp
from runner.inside.installed import Entry, FileList
from tests.image.environment import (
    SITE,
    compiled,
    make_environment,
    make_image,
    write_image_list,
    write_list,
    write_record,
)

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
    folder = path.parent.parent.parent / "elsewhere"
    folder.mkdir()
    source = folder / "__init__.py"
    source.write_text("VALUE = 2\n")
    edit(path, path.read_bytes()[:16] + compiled(source).read_bytes()[16:])
    shutil.rmtree(folder)


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
    return installed.start_faults(root)


def full(root: Path) -> list[Fault]:
    """The check of `ferry image verify`."""
    return records.verify(root, root).faults


def test_a_good_environment_passes(root: Path) -> None:
    """No fault, and everything was counted."""
    assert start(root) == []
    report = records.verify(root, root)
    assert (report.faults, report.packages, report.byte_code) == ([], 2, 3)
    assert report.files == 17


@pytest.mark.parametrize("name", BREAKS)
def test_one_change_is_told_by_both_checks(root: Path, name: str) -> None:
    """Changed, added or missing, whatever it is: one fault, that names it."""
    path, change, what = BREAKS[name]
    change(root / path)
    assert told(start(root), root) == {(what, path)}
    assert (what, path) in told(full(root), root)


# What the list alone knows of: nothing of these is imported, or a package's RECORD cannot vouch for it. Byte code with
# the right header is one of them: two builds that are equal bit for bit say that it is right.
LISTED_ONLY = {
    "pyvenv.cfg", "a link is gone", "a folder is gone", "a link elsewhere", "a mode", "byte code is gone", "byte code",
    "a file in a folder's place", "byte code of another source", "a RECORD",
}  # fmt: skip
NOT_LISTED = {"a pipe in a file's place"}


@pytest.mark.parametrize("name", sorted(BREAKS.keys() - LISTED_ONLY - NOT_LISTED))
def test_a_change_is_told_although_the_list_was_made_after_it(root: Path, name: str) -> None:
    """The packages' own RECORDs say the same, for all that Python would import or run; they came with the wheels."""
    path, change, _ = BREAKS[name]
    change(root / path)
    write_list(root)
    assert start(root) == []
    assert any(path in fault.where or fault.what == "package is not in the lock" for fault in full(root))


def test_a_pipe_is_not_listed(root: Path) -> None:
    """The build fails rather than list what has no content."""
    os.mkfifo(root / SITE / "pipe")
    with pytest.raises(Refusal, match="cannot be listed"):
        installed.list_of(root, ["."], timed=False)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The file system of a good image."""
    return make_image(tmp_path / "image")


def image_start(image: Path) -> list[Fault]:
    """The quick check, as at a start in a container."""
    return installed.start_faults(image / "opt" / "ferry", image)


def image_full(image: Path) -> list[Fault]:
    """The check of `ferry image verify`, in a container."""
    return records.verify(image / "opt" / "ferry", image / "opt" / "venv", image).faults


def test_a_good_image_passes(image: Path) -> None:
    """Everything below the list's roots is as listed; what lies elsewhere is the digest's business."""
    (image / "usr" / "lib" / "libcuda.so.1").write_bytes(b"of the host's driver")
    assert (image_start(image), image_full(image)) == ([], [])


IMAGE_BREAKS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a module of the library": ("usr/lib/python3/os.py", lambda p: p.write_bytes(b"# the librarY\n"), "time of change"),
    "a module more in the library": ("usr/lib/python3/evil.py", Path.touch, "not in the environment's list"),
    "a source, same size": (f"opt/venv/{SITE}/other.py", lambda p: p.write_bytes(b"import bad!\n"), "time of change"),
    "a module more beside the start program": ("opt/ferry/torch.py", Path.touch, "not in the environment's list"),
    "the lock": ("opt/ferry/lock.txt", lambda p: p.write_bytes(b""), "size"),
    "a root is gone": ("usr/lib/python3", shutil.rmtree, "missing from the environment"),
    "a root is a link": ("usr/lib/python3", lambda p: replaced(p, lambda: p.symlink_to("/usr/lib")), "kind"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGE_BREAKS)
def test_one_change_in_an_image_is_told_without_a_byte_read(image: Path, name: str) -> None:
    """The digest covers the content; what was changed in the engine's own folders shows in size or time."""
    path, change, what = IMAGE_BREAKS[name]
    change(image / path)
    for faults in (image_start(image), image_full(image)):
        assert (what, path) in {
            (fault[0].removeprefix("environment differs: "), fault[1]) for fault in told(faults, image)
        }


def test_a_change_of_content_alone_is_found_by_verify(image: Path) -> None:
    """Size and time put back: a start takes it, the full check reads it."""
    flip(image / "usr" / "lib" / "python3" / "os.py")
    assert image_start(image) == []
    assert told(image_full(image), image) == {("environment differs: content", "usr/lib/python3/os.py")}


def test_a_list_that_identity_does_not_name_is_refused(image: Path) -> None:
    """IDENTITY, and so a label of the image, names the list: one that was made again to fit a change is another one."""
    (image / "usr" / "lib" / "python3" / "evil.py").touch()
    identity = (image / "opt" / "ferry" / "IDENTITY").read_bytes()
    os.utime(image / "usr" / "lib" / "python3" / "evil.py", ns=(0, 0))
    write_image_list(image)
    assert image_start(image) == []
    for said in (identity, b"{}", b"[]", b"{", b""):
        (image / "opt" / "ferry" / "IDENTITY").write_bytes(said)
        with pytest.raises(Refusal, match="list of files is another one"):
            image_start(image)
        assert "list of files is another one" in {fault.what for fault in image_full(image)}


def test_a_time_of_no_whole_second_is_not_listed(image: Path) -> None:
    """Such a file was not written by the build, and a tar would not keep its time."""
    os.utime(image / "opt" / "ferry" / "lock.txt", ns=(0, 5_500_000_000))
    with pytest.raises(Refusal, match="cannot be listed"):
        write_image_list(image)


def test_what_is_remembered_is_not_read_until_its_stamp_changes(root: Path) -> None:
    """A stamp stands for the listed content; any write to the file ends that, and a lost memory costs only time."""
    path = f"{SITE}/good/op.so"
    good = (root / path).read_bytes()
    stamps = root / installed.STAMPS_NAME
    listed = installed.read_list(root / installed.LIST_NAME)[0].entries[path].sha256
    flip(root / path)
    for digest, faults in ((listed, set()), ("0" * 64, {("environment differs: content", path)})):
        stamps.write_text(json.dumps({path: [digest, *Stamp.of((root / path).stat())]}))
        assert told(start(root), root) == faults
    stamps.write_text(json.dumps({path: [listed, *Stamp.of((root / path).stat())]}))
    edit(root / path, (root / path).read_bytes())
    assert told(start(root), root) == {("environment differs: content", path)}
    edit(root / path, good)
    for damaged in (b"", b"{", b"[]", b'{"x": [1]}'):
        stamps.write_bytes(damaged)
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
    with pytest.raises(Refusal, match=r"list of files is (damaged|another one)"):
        installed.start_faults(root)
    assert {"list of files is damaged", "list of files is another one"} & {fault.what for fault in full(root)}


def test_an_environment_without_a_list_is_refused(root: Path) -> None:
    """One made by an older Ferry, or one that is not finished."""
    (root / installed.LIST_NAME).unlink()
    with pytest.raises(Refusal, match="no list of files"):
        installed.start_faults(root)


paths = st.lists(
    st.binary(min_size=1, max_size=6).filter(lambda raw: b"/" not in raw and b"\0" not in raw),
    min_size=1,
    max_size=3,
)
kinds = st.one_of(
    st.builds(lambda mode: Entry("dir", mode), st.integers(0, 0o7777)),
    st.builds(lambda mode, size, sha, time_s: Entry("file", mode, size, sha, time_s=time_s), st.integers(0, 0o7777),
              st.integers(0, 1 << 40), st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
              st.none() | st.integers(0, 1 << 33)),
    st.builds(lambda raw: Entry("link", 0o777, target=os.fsdecode(raw)),
              st.binary(min_size=1, max_size=9).filter(lambda raw: b"\0" not in raw)),
)  # fmt: skip


@given(st.dictionaries(paths.map(lambda parts: os.fsdecode(b"/".join(parts))), kinds, min_size=1, max_size=5))
def test_any_list_is_read_back_as_it_was_written(entries: dict[str, Entry]) -> None:
    """Names with spaces, line feeds, bytes that are no text: each in one printable line."""
    listed = FileList(entries)
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
    assert installed.list_of(folder, ["."], timed=False)[0].to_bytes().decode() == (
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


def test_a_further_folder_on_the_path_is_told(root: Path) -> None:
    """A venv that lets Debian's own packages in."""
    (root / "pyvenv.cfg").write_text("include-system-site-packages = true\n")
    write_list(root)
    assert told(full(root), root) == {("further folder is importable", "pyvenv.cfg")}


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
