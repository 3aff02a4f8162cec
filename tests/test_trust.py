"""Trust in a bundle: its root, signatures, code identity, memory, sizes before hashes, and parts that agree."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner import archive, code_identity, consistency, meaning, signature, sums, verify
from runner.errors import Refusal
from runner.inside import census
from runner.verify import open_bundle
from tests.builder import make_bundle, make_draft, relist, snapshot
from tests.scripted.saving import pickled, save_checkpoint
from tests.test_census import relist as relist_checkpoint


def whats(refusal: Refusal) -> list[str]:
    return [fault.what for fault in refusal.faults]


def test_the_root_that_the_user_knows_must_be_the_lists(tmp_path: Path) -> None:
    """`--root` refuses any other bundle before a byte of it is read."""
    bundle = make_bundle(tmp_path, update=4)
    root = open_bundle(bundle).root
    assert open_bundle(bundle, root=root).root == root
    with pytest.raises(Refusal) as refused:
        open_bundle(bundle, root="sha256:" + "0" * 64)
    assert whats(refused.value) == ["root differs"]


def test_sizes_come_before_hashes(tmp_path: Path) -> None:
    """A shard that was cut off is found by the inventory's size, and no file is read for it."""
    bundle = make_bundle(tmp_path, update=4)
    shard = bundle / "checkpoint-4" / "rng_state_1.pth"
    shard.write_bytes(shard.read_bytes()[:-1])
    (bundle / "data" / "train.jsonl").write_bytes(b"")
    read: list[int] = []
    with pytest.raises(Refusal) as refused:
        verify.verify(open_bundle(bundle), on_bytes=read.append)
    assert [(fault.what, fault.where) for fault in refused.value.faults] == [("size differs", str(shard))]
    assert read == []


def old(bundle: Path) -> None:
    """Let the timestamps of all files lie far enough back to be remembered: wait for the clock that tells."""
    time.sleep(2.1)
    assert bundle.exists()


def test_an_interrupted_verification_goes_on_where_it_was(tmp_path: Path) -> None:
    """What was read is not read again; --paranoid reads it; another list forgets it; a finished one leaves nothing."""
    bundle = make_bundle(tmp_path, update=4)
    old(bundle)
    size = open_bundle(bundle).size_bytes

    def read_of(**options: Any) -> int:
        opened, read = open_bundle(bundle), []
        remembered = {} if options.get("paranoid") else verify._recall(opened, finished=False)
        known = sum(opened.sizes[name] for name in remembered)
        verify.verify(opened, on_bytes=read.append, **options)
        assert sum(read) == size
        return size - known

    # The first batch ends with the first callback; what was hashed before an interrupt is told file by file.
    keep = verify.hash_files

    def cut_off(*args: Any, **options: Any) -> Any:
        told = options["on_hashed"]
        count = 0

        def on_hashed(name: str, entry: Any) -> None:
            nonlocal count
            told(name, entry)
            count += 1
            if count == 5:
                raise KeyboardInterrupt

        return keep(*args, **(options | {"on_hashed": on_hashed}))

    def be_cut_off() -> None:
        opened = open_bundle(bundle)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify, "hash_files", cut_off)
            with pytest.raises(KeyboardInterrupt):
                verify.verify(opened)

    for options, whole in (({}, False), ({"paranoid": True}, True)):
        be_cut_off()
        assert len(verify._recall(open_bundle(bundle), finished=False)) == 5
        assert (read_of(**options) == size) is whole
        assert verify._recall(open_bundle(bundle), finished=False) == {}
    be_cut_off()
    (bundle / "more").write_bytes(b"x")
    relist(bundle)
    assert verify._recall(open_bundle(bundle), finished=False) == {}


def test_sigterm_leaves_what_was_read_remembered(tmp_path: Path) -> None:
    """`ferry verify` ends on SIGTERM with no traceback and no verdict, and the memory of what it read."""
    bundle = make_bundle(tmp_path, update=4)
    with (bundle / "data" / "large").open("wb") as file:
        file.truncate(16 << 30)
    digests = open_bundle_digests(bundle) | {"data/large": "0" * 64}
    (bundle / sums.LIST_NAME).write_bytes(sums.render(digests))
    old(bundle)
    env = os.environ | {"PYTHONPATH": str(Path(verify.__file__).parent.parent)}
    command = [sys.executable, "-m", "runner", "verify", str(bundle)]
    memory = verify._memory_path(open_bundle(bundle), verify._UNFINISHED)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        # Files are read the largest first, one a thread: with two, the others are done long before a part of it is.
        counted = Path(f"/proc/{process.pid}/io")
        while int(counted.read_text().split()[1]) < 1 << 30:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert out == b""
    assert b"interrupted" in err
    assert b"Traceback" not in err
    assert process.returncode == 128 + signal.SIGTERM
    assert len(json.loads(memory.read_bytes())["files"]) >= (5 if len(os.sched_getaffinity(0)) > 1 else 0)


def open_bundle_digests(bundle: Path) -> dict[str, str]:
    """The list as it is."""
    return sums.parse((bundle / sums.LIST_NAME).read_bytes(), "list")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Two keys, and an allowed_signers file that names one of them."""
    for name in ("ann", "bob"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(tmp_path / name)],
            check=True,
        )
    public = (tmp_path / "ann.pub").read_text()
    (tmp_path / "signers").write_text(f'ann@example.org namespaces="ferry" {public}')
    return tmp_path


def test_a_signature_names_its_signer(tmp_path: Path, keys: Path) -> None:
    """Signed by a key of the list passes, with and without the name; OpenSSH alone says the same; the root stays."""
    bundle = make_bundle(tmp_path, update=4)
    verified = verify.verify(open_bundle(bundle))
    path = signature.sign(verified, keys / "ann")
    assert path.name == "SHA256SUMS.sig"
    opened = open_bundle(bundle, root=verified.root)
    assert signature.signer_of(opened, keys / "signers") == "ann@example.org"
    assert signature.signer_of(opened, keys / "signers", "ann@example.org") == "ann@example.org"
    verify.verify(opened)
    by_hand = [
        "ssh-keygen",
        "-Y",
        "verify",
        "-f",
        str(keys / "signers"),
        "-I",
        "ann@example.org",
        "-n",
        "ferry",
    ]
    with (bundle / sums.LIST_NAME).open("rb") as listed:
        subprocess.run([*by_hand, "-s", str(path)], stdin=listed, check=True, capture_output=True)
    with pytest.raises(Refusal) as refused:
        signature.sign(verified, keys / "ann")
    assert whats(refused.value) == ["bundle is signed"]


SIGNATURE_BREAKS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "unsigned": (lambda b, k: None, "not signed"),
    "by another key": (
        lambda b, k: signature.sign(verify.verify(open_bundle(b)), k / "bob"),
        "wrong signature",
    ),
    "of another list": (
        lambda b, k: (
            signature.sign(verify.verify(open_bundle(b)), k / "ann"),
            (b / "more").write_bytes(b"x"),
            relist_signed(b),
        ),
        "wrong signature",
    ),
    "garbage": (lambda b, k: (b / "SHA256SUMS.sig").write_bytes(b"x" * 100), "wrong signature"),
    "empty": (lambda b, k: (b / "SHA256SUMS.sig").write_bytes(b""), "wrong signature"),
    "in another namespace": (
        lambda b, k: subprocess.run(
            ["ssh-keygen", "-q", "-Y", "sign", "-f", str(k / "ann"), "-n", "file", str(b / "SHA256SUMS")],
            check=True,
            capture_output=True,
        ),
        "wrong signature",
    ),
}


def relist_signed(bundle: Path) -> None:
    """List anew what is there, but for the signature."""
    kept = (bundle / "SHA256SUMS.sig").read_bytes()
    (bundle / "SHA256SUMS.sig").unlink()
    relist(bundle)
    (bundle / "SHA256SUMS.sig").write_bytes(kept)


@pytest.mark.parametrize("name", SIGNATURE_BREAKS)
def test_without_the_right_signature_it_is_refused(tmp_path: Path, keys: Path, name: str) -> None:
    """Unsigned, another key, another list, another namespace: nothing passes, and nothing is changed."""
    change, expected = SIGNATURE_BREAKS[name]
    bundle = make_bundle(tmp_path, update=4)
    change(bundle, keys)
    before = snapshot(bundle)
    for identity in (None, "ann@example.org"):
        with pytest.raises(Refusal) as refused:
            signature.signer_of(open_bundle(bundle), keys / "signers", identity)
        assert whats(refused.value) == [expected]
    assert snapshot(bundle) == before


def test_another_identity_is_refused(tmp_path: Path, keys: Path) -> None:
    """A good signature by somebody else than who was asked for."""
    bundle = make_bundle(tmp_path, update=4)
    signature.sign(verify.verify(open_bundle(bundle)), keys / "ann")
    with pytest.raises(Refusal) as refused:
        signature.signer_of(open_bundle(bundle), keys / "signers", "bob@example.org")
    assert whats(refused.value) == ["wrong signature"]


def test_a_signature_cannot_be_listed(tmp_path: Path) -> None:
    """Rule B10: the signature is of the list, so the list cannot hold it."""
    with pytest.raises(Refusal, match="unsafe"):
        sums.parse(b"a" * 64 + b"  SHA256SUMS.sig\n", "list")
    bundle = make_bundle(tmp_path, update=4)
    (bundle / "data" / "SHA256SUMS.sig").write_bytes(b"x")
    with pytest.raises(Refusal, match="unexpected"):
        open_bundle(bundle)


def test_the_command_line_signs_and_verifies(tmp_path: Path, keys: Path, plain_env: dict[str, str]) -> None:
    """`ferry sign`, `ferry verify --signers --identity --root --json`; options that contradict are refused."""
    bundle = make_bundle(tmp_path, update=4)
    root = open_bundle(bundle).root

    def ferry(*words: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "runner", *words, "--json"],
            env=plain_env | {"PYTHONPATH": str(Path(verify.__file__).parent.parent)},
            capture_output=True,
            check=False,
        )
        return done.returncode, json.loads(done.stdout)

    assert ferry("sign", str(bundle), "--key", str(keys / "ann"))[0] == 0
    status, value = ferry("verify", str(bundle), "--signers", str(keys / "signers"), "--root", root)
    assert (status, value["signed_by"], value["root"], value["notes"]) == (0, "ann@example.org", root, [])
    status, value = ferry("verify", str(bundle), "--quick", "--paranoid", "--root", "x", "--identity", "ann")
    assert status == 2
    assert [fault["what"] for fault in value["refused"]] == ["options contradict", "not a root", "no signers"]


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


def test_an_unsafe_pickle_in_a_bundle_is_refused_by_name(tmp_path: Path) -> None:
    """Right bytes, right inventory: and still nothing that a loader would run."""
    draft = make_draft(tmp_path / "draft", update=4)
    folder = draft / "checkpoint-4"
    import zipfile

    with zipfile.ZipFile(folder / "rng_state_0.pth", "w") as file:
        file.writestr("x/data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    (draft / "data" / "plain.bin").write_bytes(b"\x01\x02not a pickle")
    relist_checkpoint(folder)
    relist(draft)
    with pytest.raises(Refusal) as refused:
        verify.verify(open_bundle(draft))
    fault = next(fault for fault in refused.value.faults if fault.what == "unsafe pickle")
    assert (fault.where, fault.found) == (str(draft / "checkpoint-4/rng_state_0.pth"), "os.system")


def checkpoint_of(folder: Path) -> census.Checkpoint:
    relist_checkpoint(folder)
    return census.take_census(folder, 4)


ENGINE = {
    "global_steps": 20,
    "global_samples": 160,
    "dp_world_size": 4,
    "skipped_steps": 0,
    "ds_config": {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
    },
}
STATE = {"global_step": 20, "epoch": 0.5, "train_batch_size": 1, "log_history": [{"step": 20, "epoch": 0.5}]}
ROWS = 320

PART_BREAKS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = {
    "all agree": ({}, {}, {}, []),
    "engine of another update": ({"global_steps": 10}, {}, {}, ["engine state differs"]),
    "engine of another world": ({"dp_world_size": 8}, {}, {}, ["engine state differs"]),
    "engine with other samples": ({"global_samples": 80}, {}, {}, ["engine state differs"]),
    "scheduler behind": ({}, {"last_epoch": 10}, {}, ["scheduler differs"]),
    "scheduler ahead": ({}, {"last_epoch": 21}, {}, ["scheduler differs"]),
    "scheduler that waited": ({"skipped_steps": 2}, {"last_epoch": 18}, {}, []),
    "scheduler in the engine": ({"lr_scheduler": {"last_epoch": 3}}, {}, {}, ["scheduler differs"]),
    "another batch": ({}, {}, {"train_batch_size": 2}, ["batch differs"]),
    "another epoch than its log": ({}, {}, {"epoch": 0.6}, ["epoch differs"]),
}


@pytest.mark.parametrize("name", PART_BREAKS)
def test_parts_of_a_checkpoint_agree(tmp_path: Path, name: str) -> None:
    """Engine, scheduler and trainer state, each against update, world and batch."""
    engine, scheduler, state, expected = PART_BREAKS[name]
    folder = save_checkpoint(tmp_path, 20, 40, 4, 1.0)
    (folder / "global_step20" / "mp_rank_00_model_states.pt").write_bytes(pickled(ENGINE | engine))
    (folder / "scheduler.pt").write_bytes(pickled({"last_epoch": 20} | scheduler))
    (folder / "trainer_state.json").write_text(json.dumps(STATE | state))
    found = consistency.compare(checkpoint_of(folder), ROWS)
    assert [fault.what for fault in found.faults] == expected


@pytest.mark.parametrize(
    ("update", "rows", "world", "batch", "epoch"),
    [
        (20, 320, 4, (1, 2), 0.5),
        (2100, 30815, 4, (1, 2), 4200 / 7704),
        (2101, 30815, 4, (1, 2), 4202 / 7704),
        (3852, 30815, 4, (1, 2), 1.0),
        (4, 28, 4, (1, 2), 1.0),
        (5, 28, 4, (1, 2), 1 + 2 / 7),
    ],
)
def test_the_epoch_is_that_of_the_pinned_librarys_rule(
    update: int, rows: int, world: int, batch: tuple[int, int], epoch: float
) -> None:
    """Micro-batches are counted, the last update of an epoch may be short: run G's 2,101 is 0.5454."""
    assert consistency.epoch_of(update, rows, world, consistency.Batch(*batch)) == pytest.approx(
        epoch, rel=1e-12
    )


def test_what_is_odd_is_a_note(tmp_path: Path) -> None:
    """Two ranks with the same RNG state are named both; so is an epoch of another number of rows. Neither refuses."""
    folder = save_checkpoint(tmp_path, 20, 40, 4, 1.0)
    (folder / "rng_state_2.pth").write_bytes(pickled({"random state": 1}))
    (folder / "global_step20" / "mp_rank_00_model_states.pt").write_bytes(pickled(ENGINE))
    (folder / "trainer_state.json").write_text(json.dumps(STATE))
    found = consistency.compare(checkpoint_of(folder), ROWS * 2)
    assert found.faults == ()
    assert [(note.what, note.found) for note in found.notes] == [
        ("epoch is not the manifest's", "epoch 0.5"),
        ("same RNG state", "rng_state_1.pth and rng_state_2.pth hold the same"),
    ]


def test_notes_come_with_the_verified_bundle(tmp_path: Path) -> None:
    """A note does not refuse, and is not lost."""
    draft = make_draft(tmp_path / "draft", update=4)
    folder = draft / "checkpoint-4"
    (folder / "rng_state_1.pth").write_bytes((folder / "rng_state_0.pth").read_bytes())
    relist_checkpoint(folder)
    relist(draft)
    assert [note.what for note in verify.verify(open_bundle(draft)).notes] == ["same RNG state"]
    assert meaning.SPEC_NAME == "run.yaml"
