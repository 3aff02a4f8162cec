"""Throws damaged and hostile input at everything that reads what a stranger sent: lists, archives, pickles, logs.

    python -m tests.fuzz.readers [--seconds N | --runs N] [--seed N] [--target list|archive|pickle|log]

Promises: the same seed gives the same inputs. Each must give an answer or a `Refusal`, must leave the disk as it was, and
a list that is taken must read back from what we would write of it, and a log must say the same whatever chunks it comes
in. The first that does not is kept and shown with how
to try it again.
"""

from __future__ import annotations

import argparse
import gzip
import io
import pickle
import random
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from runner import archive, pickles, sums
from runner.engine import Lines
from runner.errors import Refusal
from runner.log_reader import LogReader, printed
from runner.supervision import LogPattern, Reading

A = b"a" * 64


def corpus_of_lists() -> list[bytes]:
    """Good lists, and each odd form once."""
    plain = sums.render({"a": "0" * 64, "b/c": "1" * 64, "new\nline": "2" * 64, "back\\slash": "3" * 64})
    odd = (b"", b"\xef\xbb\xbf" + plain, plain[:-1], plain.replace(b"\n", b"\r\n"), A + b" *x\n")
    return [plain, *odd, A + b"  ../x\n", b"\\" + A + b"  \\q\n", A + b"  SHA256SUMS\n", plain + plain]


def corpus_of_archives() -> list[bytes]:
    """A good archive, plain and zipped, and one with an entry of every type and every old format."""
    good = archive.make(
        {"a.py": (False, b"1\n"), "b/run.sh": (True, b"#!/bin/sh\n"), "long" * 40: (False, b"")}
    )
    raws = [good, gzip.decompress(good), gzip.compress(bytes(4096))]
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as tar:
            for kind in (b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7"):
                entry = tarfile.TarInfo("entry" + kind.decode())
                entry.type, entry.linkname, entry.mode = kind, "../../x", 0o4755
                tar.addfile(entry)
        raws.append(out.getvalue())
    return raws


def corpus_of_pickles() -> list[bytes]:
    """Plain values in every protocol, torch's two formats, and a call in each."""
    values: list[object] = [{"a": [1, 2.5, "x", None], "b": (1, b"y", {2})}, [1 << 90, frozenset({1})]]
    raws = [pickle.dumps(value, protocol) for value in values for protocol in range(6)]
    raws += [b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93."]
    raws += [pickle.dumps(0x1950A86A20F9469CFC6C, 2) + b"".join(raws[:4]) + b"storage"]
    for raw in raws[:3]:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as file:
            file.writestr("a/data.pkl", raw)
            file.writestr("a/data/0", b"12345678")
        raws.append(out.getvalue())
    return raws


def corpus_of_logs() -> list[bytes]:
    """Lines of each kind, with prefixes, bars and prose."""
    lines = [
        b"[default1]:{'loss': nan, 'grad_norm': '1.2', 'learning_rate': 2e-06, 'epoch': 0.5}",
        b"\r 5%|# | 1/20 [00:01<00:19, 1.0s/it]\r      \r{'loss': np.float64(0.1), 'epoch': 1.0, 'l': [1, 2]}",
        b'{"event": "update", "update": 3, "loss": "nan", "lr": 1e-06}',
        b'{"event": "save", "update": 3, "checkpoint": "checkpoint-3"}',
        b"[Rank 0] step=10, skipped=0, lr=[5e-06, 1e-4], mom=[[0.9, 0.95]]",
        b"probe at 41600: 8.3",
        b"\xc3\xa9 nan in finance",
    ]
    return [b"\n".join(lines), *lines]


TOKENS = (
    b"\r", b"{'", b"': nan", b"'epoch': 1.0}", b'{"update": 1', b"[Rank 1] step=", b"]{'", b"%|", b"1e999", b"\x1b[0m",
    b"\n", b"\r\n", b"\0", b"\\", b"/", b"../", b"  ", b" *", A, b"\xff\xfe", b"PK\x03\x04", b"PK\x01\x02", b"ustar\x00",
    b"\x1f\x8b\x08", b"cos\nsystem\n", b"\x93", b"R.", b"(", b"g0\n", b"q\x00h\x00", b"17777777777", b"path=../x\n",
    b"GNU.sparse.major=1\n", b"-1", b"9" * 12,
)  # fmt: skip


def mutate(source: random.Random, raw: bytes, others: list[bytes]) -> bytes:
    """One to six small changes: bits, bytes, cuts, repeats, tokens, pieces of another input."""
    data = bytearray(raw)
    for _ in range(source.randint(1, 6)):
        at = source.randint(0, len(data))
        end = min(len(data), at + source.choice((1, 2, 8, 64, 512)))
        match source.randrange(8):
            case 0 if at < len(data):
                data[at] ^= 1 << source.randrange(8)
            case 1 if at < len(data):
                data[at] = source.randrange(256)
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end]
            case 4:
                data[at:at] = source.choice(TOKENS)
            case 5:
                token = source.choice(TOKENS)
                data[at : at + len(token)] = token
            case 6:
                other = source.choice(others)
                cut = source.randint(0, len(other))
                data[at:end] = other[cut : cut + source.randint(0, 600)]
            case _:
                del data[at : None if source.random() < 0.3 else at + 1]
    return bytes(data)


def read_list(path: Path) -> None:
    """What is taken reads back from what we write of it."""
    digests = sums.parse(path.read_bytes(), "list")
    assert sums.parse(sums.render(digests), "list") == digests
    assert all(sums.unsafe_reason(name) is None for name in digests)


def read_archive(path: Path) -> None:
    """What is taken has safe names, and a tree."""
    files = archive.read(path)
    assert all(sums.unsafe_reason(name) is None for name in files)
    assert len(archive.tree_of(files)) == 40


def read_pickle(path: Path) -> None:
    """Faults or none."""
    for fault in pickles.faults_of(path):
        assert fault.fix
    pickles.faults_of(path, must_be_pickle=False)


def read_log(path: Path) -> None:
    """The same typed updates from the whole log and from small chunks of it."""
    raw = path.read_bytes()
    pattern = LogPattern(name="probe", pattern=r"probe at (?P<update>[0-9x]+): (?P<probe>\S+)")
    found = []
    for size in (len(raw) or 1, 3):
        reader, told = LogReader(Reading(patterns=(pattern,)), resumed_at=1), []

        def take(line: str, reader: LogReader = reader, told: list[str] = told) -> None:
            told += [repr(one) for frame in printed(line) for one in reader.read(frame)]

        lines = Lines(take)
        for at in range(0, len(raw), size):
            lines.feed(raw[at : at + size])
        lines.close()
        found.append(told)
    assert found[0] == found[1]


Target = tuple[Callable[[], list[bytes]], Callable[[Path], None]]
TARGETS: Mapping[str, Target] = {
    "list": (corpus_of_lists, read_list),
    "archive": (corpus_of_archives, read_archive),
    "pickle": (corpus_of_pickles, read_pickle),
    "log": (corpus_of_logs, read_log),
}


def fuzz(name: str, seed: int, go_on: Callable[[int], bool]) -> int:
    """Run the target `name` while `go_on` says so of the number of inputs; return that number. Raises what came out."""
    make, read = TARGETS[name]
    corpus = make()
    source = random.Random(f"{name} {seed}")  # noqa: S311 - the same inputs for the same seed is the point
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input"
        while go_on(count):
            raw = corpus[count] if count < len(corpus) else mutate(source, source.choice(corpus), corpus)
            path.write_bytes(raw)
            try:
                read(path)
            except Refusal as refusal:
                str(refusal)
            except BaseException:
                kept = Path(tempfile.gettempdir()) / f"ferry-fuzz-{name}-{seed}-{count}"
                kept.write_bytes(raw)
                print(f"{name}: input {count} of seed {seed}, kept as {kept}", file=sys.stderr)
                raise
            assert [entry.name for entry in Path(folder).iterdir()] == ["input"], (
                f"{name}: input {count} of seed {seed} left something"
            )
            assert path.read_bytes() == raw, f"{name}: input {count} of seed {seed} was written to"
            count += 1
    return count


def main() -> None:
    """Fuzz every target, or the one that is named, for an equal share of the time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--runs", type=int, help="inputs a target, in place of a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS)
    options = parser.parse_args()
    names = [options.target] if options.target else list(TARGETS)
    for name in names:
        until = time.monotonic() + options.seconds / len(names)

        def go_on(count: int, until: float = until) -> bool:
            return time.monotonic() < until if options.runs is None else count < options.runs

        print(f"{name}: {fuzz(name, options.seed, go_on)} inputs, all answered or refused", flush=True)


if __name__ == "__main__":
    main()
