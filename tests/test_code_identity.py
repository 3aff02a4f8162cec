"""The code of a bundle is that of its commit, byte for byte."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner import archive, code_identity, verify
from runner.errors import Refusal
from runner.verify import open_bundle
from tests.builder import make_draft, relist


def whats(refusal: Refusal) -> list[str]:
    return [fault.what for fault in refusal.faults]


GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@y", "-c", "init.defaultBranch=main"]


def git(where: Path, *words: str) -> str:
    done = subprocess.run([*GIT, *words], cwd=where, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a commit, its archive, and a git bundle of its branch."""
    source = tmp_path / "repository"
    archive.unpack({"a.py": (False, b"1\n"), "b/run.sh": (True, b"#!/bin/sh\n")}, source)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        git(source, *words)
    git(source, "archive", "--format=tar", "-o", str(tmp_path / "code.tar"), "HEAD")
    git(source, "bundle", "create", "-q", str(tmp_path / "code.bundle"), "main")
    return source


def test_the_archive_must_be_that_of_its_commit(tmp_path: Path, repository: Path) -> None:
    """Byte for byte, as a tar or in gzip; another archive of the same tree is not it."""
    tar, bundle, commit = (
        tmp_path / "code.tar",
        tmp_path / "code.bundle",
        git(repository, "rev-parse", "HEAD"),
    )
    zipped = tmp_path / "code.tar.gz"
    zipped.write_bytes(gzip.compress(tar.read_bytes()))
    assert code_identity.faults_of(tar, bundle, commit) == []
    assert code_identity.faults_of(zipped, bundle, commit) == []
    same_tree = tmp_path / "same.tar.gz"
    same_tree.write_bytes(archive.make(archive.read(tar)))
    cut_off = tmp_path / "cut.tar.gz"
    cut_off.write_bytes(zipped.read_bytes()[:-12])
    longer = tmp_path / "longer.tar"
    longer.write_bytes(tar.read_bytes() + bytes(512))
    for other in (same_tree, cut_off, longer):
        faults = code_identity.faults_of(other, bundle, commit)
        assert [fault.what for fault in faults] == ["not the archive of its commit"]
    for found in (
        code_identity.faults_of(tar, bundle, "0" * 40),
        code_identity.faults_of(tar, tar, commit),
    ):
        assert [fault.what for fault in found] == ["git cannot make the archive"]
    assert [fault.what for fault in code_identity.faults_of(tar, bundle, None)] == ["no commit"]


def test_the_users_git_settings_change_nothing(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that would alter archives, or start programs, is not read."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[tar]\n\tumask = 0077\n[core]\n\thooksPath = /nonexistent\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "tar.umask")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "0077")
    commit = (repository / ".git" / "refs" / "heads" / "main").read_text().strip()
    assert code_identity.faults_of(tmp_path / "code.tar", tmp_path / "code.bundle", commit) == []


def test_a_bundle_with_a_git_bundle_is_checked_against_it(tmp_path: Path, repository: Path) -> None:
    """`code.bundle` in the spec: verify proves the archive, or refuses."""
    commit = git(repository, "rev-parse", "HEAD")
    draft = make_draft(tmp_path / "draft", update=4)
    (draft / "source" / "code.tar.gz").unlink()
    tar = (tmp_path / "code.tar").read_bytes()
    (draft / "source" / "code.tar").write_bytes(tar)
    (draft / "source" / "code.bundle").write_bytes((tmp_path / "code.bundle").read_bytes())

    def point(code: dict[str, Any]) -> None:
        import yaml

        spec = yaml.safe_load((draft / "run.yaml").read_bytes())
        spec["code"] = code
        (draft / "run.yaml").write_text(yaml.safe_dump(spec))
        relist(draft)

    good = {
        "archive": "source/code.tar",
        "sha256": "sha256:" + sums_of(tar),
        "tree": git(repository, "rev-parse", "HEAD^{tree}"),
        "commit": commit,
        "bundle": "source/code.bundle",
    }
    point(good)
    assert verify.verify(open_bundle(draft)).spec.code.bundle == "source/code.bundle"
    point(good | {"commit": "0" * 40})
    with pytest.raises(Refusal, match="git cannot make the archive"):
        verify.verify(open_bundle(draft))
    point(good | {"bundle": "source/absent.bundle"})
    with pytest.raises(Refusal, match="named but not there"):
        verify.verify(open_bundle(draft))


def sums_of(raw: bytes) -> str:
    """SHA-256 in hex."""
    from runner.inside.digests import sha256_bytes

    return sha256_bytes(raw)
