"""Pickles, read by opcode before anything loads them: which globals they name, and whether each is known to be safe.

Promises: nothing of a pickle is imported, called or built here; every way in which a pickle can name a global is
followed (GLOBAL, INST, STACK_GLOBAL through stack and memo), so is every call, and what cannot be followed is refused,
never passed (rules P1 to P5 of docs/reference/bundle-format.md). Knows torch's zip format, torch's older format and plain pickles.
"""

from __future__ import annotations

import io
import pickletools
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from runner.errors import Fault

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
LIMIT_BYTES = 32 << 20
_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PICKLES = 5
_ZIP = b"PK\x03\x04"
_FIX = (
    "nothing was loaded. If the run's own code needs this global, have it saved as plain values or tensors; "
    "otherwise take the file from another source"
)

# Read from real checkpoints: Transformers 5.11.0 with DeepSpeed 0.19.8 (ZeRO-2) and with DDP. None of the first group
# does more than build the value that it is named for.
_TENSORS = r"torch(\._utils _rebuild_(tensor|tensor_v2|parameter|parameter_with_state)|\.storage (Typed|Untyped)Storage)"
_TORCH = r"torch ([A-Z][A-Za-z0-9]*Storage|Size|device|bfloat16|bool|complex(64|128)|float(16|32|64|8_[a-z0-9]+)|u?int(8|16|32|64))"
_NUMPY = r"numpy(\._?core\.multiarray (_reconstruct|scalar)| (dtype|ndarray)|\.dtypes [A-Z][A-Za-z0-9]*DType)"
_PLAIN = r"collections OrderedDict|_codecs encode|(builtins|__builtin__) (set|frozenset|bytes|bytearray)"
_DEEPSPEED = r"deepspeed\.runtime\.fp16\.loss_scaler (Dynamic)?LossScaler|deepspeed\.utils\.tensor_fragment fragment_address"
_CALLABLE = re.compile(f"{_TENSORS}|{_TORCH}|{_NUMPY}|{_PLAIN}|{_DEEPSPEED}")
# Enumerations: their members are fetched by name, with getattr, and by nothing else.
_ENUM = re.compile(
    r"deepspeed\.runtime\.zero\.config (ZeroStageEnum|OffloadDeviceEnum)|transformers\.training_args OptimizerNames"
    r"|transformers\.trainer_utils (IntervalStrategy|SaveStrategy|HubStrategy|SchedulerType|FSDPOption)"
    r"|accelerate\.utils\.dataclasses DistributedType"
)
# Settings that lie beside the state (training_args.bin): their objects may be filled in, but what their classes do
# when called (start a process group, read a file) must not happen.
_FILLED = re.compile(
    r"transformers\.training_args TrainingArguments|transformers\.training_args_seq2seq Seq2SeqTrainingArguments"
    r"|transformers\.trainer_pt_utils AcceleratorConfig|transformers\.integrations\.deepspeed HfTrainerDeepSpeedConfig"
    r"|accelerate\.utils\.dataclasses DeepSpeedPlugin|accelerate\.state PartialState"
)
_GETATTR = re.compile(r"(builtins|__builtin__) getattr")
_KNOWN = (_CALLABLE, _ENUM, _FILLED, _GETATTR)


class Unfollowable(Exception):
    """A pickle that cannot be followed to its end; what it says is the reason. `named` holds what it named before."""

    def __init__(self, reason: str, named: set[str]) -> None:
        super().__init__(reason)
        self.named = named


def faults_of(path: Path, *, where: str | None = None, must_be_pickle: bool = True) -> list[Fault]:
    """Return a fault for every global in the file at `path` that is not known to be safe, and if it cannot be read.

    With `must_be_pickle` false, a file that is no pickle at all passes: `.bin` is also a name for plain data. A
    pickle that names a global before it turns out damaged never passes: loading runs it up to there.
    """
    place = where or str(path)
    try:
        named = globals_of(path)
    except Unfollowable as error:
        faults = _unsafe(place, error.named)
        if must_be_pickle or error.named:
            expected = "torch's formats or a pickle, readable by opcode to its end"
            faults.append(Fault("pickle cannot be followed", place, expected, str(error), _FIX))
        return faults
    return _unsafe(place, named)


def _unsafe(where: str, named: set[str]) -> list[Fault]:
    expected = "only globals that are known to be safe"
    unknown = sorted(name for name in named if not any(kind.fullmatch(name) for kind in _KNOWN))
    return [Fault("unsafe pickle", where, expected, name.replace(" ", "."), _FIX) for name in unknown]


def globals_of(path: Path) -> set[str]:
    """Return every global that loading the file at `path` would look up, as 'module name'.

    Raises `Unfollowable` for what is damaged, too large, or of another format (TorchScript, tar).
    """
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(0)
        # torch decides by the same four bytes.
        if start == _ZIP:
            return _zip_globals(file)
        # The pickles of the older format come first; the tensors' bytes after them are not pickles.
        return _stream_globals(io.BytesIO(file.read(LIMIT_BYTES)))


def _zip_globals(file: BinaryIO) -> set[str]:
    named: set[str] = set()
    try:
        raw = _data_pkl(file)
    except Unfollowable:
        raise
    except Exception as error:
        # zipfile lets zlib.error, struct.error and others through, from whatever the archive is compressed with.
        raise Unfollowable(f"damaged zip archive: {type(error).__name__}: {error}", named) from error
    stream = io.BytesIO(raw)
    _one_pickle(stream, named)
    if stream.read(1):
        raise Unfollowable("bytes after the end of the pickle", named)
    return named


def _data_pkl(file: BinaryIO) -> bytes:
    """The one pickle of torch's zip format."""
    reason = ""
    raw = b""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        pickles = [entry for entry in entries if entry.filename.endswith(".pkl")]
        if len(set(names)) != len(names):
            reason = "a zip archive with two entries of one name"
        elif any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
            reason = "a TorchScript archive: it holds code"
        elif [entry.filename.rpartition("/")[2] for entry in pickles] != ["data.pkl"]:
            reason = f"{len(pickles)} pickles in the archive, not one data.pkl"
        else:
            with archive.open(pickles[0]) as member:
                raw = member.read(LIMIT_BYTES + 1)
    if len(raw) > LIMIT_BYTES:
        reason = f"a pickle of more than {LIMIT_BYTES} bytes"
    if reason:
        raise Unfollowable(reason, set())
    return raw


def _stream_globals(file: BinaryIO) -> set[str]:
    """Globals of torch's older format (five pickles, then raw storages), or of pickles one after another."""
    named: set[str] = set()
    first = _one_pickle(file, named)
    count = 1
    legacy = first == _MAGIC
    while not (legacy and count == _LEGACY_PICKLES):
        position = file.tell()
        if not file.read(1):
            if legacy:
                raise Unfollowable(f"{count} pickles of {_LEGACY_PICKLES}", named)
            break
        file.seek(position)
        _one_pickle(file, named)
        count += 1
    return named


class _Mark:
    """Where a MARK opcode put one."""


class _Global(str):
    """A global on the stack, 'module name'."""

    __slots__ = ()


_TEXT = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4")
# Extension codes name globals in a registry of the reader's; buffers come from outside.
_REFUSED = ("EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER")
# What changes the object that lies below its operands.
_CHANGES = ("BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS")


class _Machine:
    """The pickle machine without values: of what lies on its stack it knows text, numbers, tuples and globals."""

    def __init__(self, named: set[str]) -> None:
        self.named = named
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, opcode: pickletools.OpcodeInfo, arg: Any) -> None:
        """Do what one opcode does to stack and memo."""
        name = opcode.name
        special = getattr(self, "_" + name.lower(), None)
        if name in _REFUSED:
            self._refuse(f"opcode {name}")
        elif special is not None:
            special(arg)
        elif name in _TEXT or name in _NUMBERS:
            self.stack.append(arg)
        else:
            self._move(opcode)
            if name in _CHANGES and isinstance(self._top(), _Global):
                self._refuse(f"it changes {str(self._top()).replace(' ', '.')} itself")

    def pop(self) -> Any:
        """Take the top of the stack."""
        if not self.stack or self.stack[-1] is _Mark:
            self._refuse("the stack runs empty")
        return self.stack.pop()

    def _refuse(self, reason: str) -> NoReturn:
        raise Unfollowable(reason, self.named)

    def _top(self) -> Any:
        value = self.pop()
        self.stack.append(value)
        return value

    def _to_mark(self) -> list[Any]:
        if _Mark not in self.stack:
            self._refuse("no mark on the stack")
        taken: list[Any] = []
        while (value := self.stack.pop()) is not _Mark:
            taken.append(value)
        return taken[::-1]

    def _name(self, name: str) -> _Global:
        self.named.add(name)
        return _Global(name)

    def _global(self, arg: Any) -> None:
        self.stack.append(self._name(str(arg)))

    def _stack_global(self, _: Any) -> None:
        attribute, module = self.pop(), self.pop()
        if type(attribute) is not str or type(module) is not str:
            self._refuse("a global whose name is computed")
        self.stack.append(self._name(f"{module} {attribute}"))

    def _inst(self, arg: Any) -> None:
        self._call(self._name(str(arg)), tuple(self._to_mark()))

    def _obj(self, _: Any) -> None:
        called, *arguments = self._to_mark() or (None,)
        self._call(called, tuple(arguments))

    def _reduce(self, _: Any) -> None:
        arguments, called = self.pop(), self.pop()
        self._call(called, arguments)

    def _newobj(self, _: Any) -> None:
        arguments, made = self.pop(), self.pop()
        self._make(made, arguments)

    def _newobj_ex(self, _: Any) -> None:
        self.pop()
        self._newobj(_)

    def _make(self, made: Any, arguments: Any) -> None:
        """An object without its class being called: for settings, and then without arguments."""
        if isinstance(made, _Global) and _FILLED.fullmatch(made) and arguments == ():
            self.stack.append(None)
        else:
            self._call(made, arguments)

    def _call(self, called: Any, arguments: Any) -> None:
        """Only globals that may be called are; getattr, for the member of an enumeration alone."""
        if not isinstance(called, _Global):
            self._refuse("it calls what is not a global")
        if _GETATTR.fullmatch(called):
            match arguments:
                case (_Global() as owner, str(member)) if _ENUM.fullmatch(owner) and member.isidentifier():
                    if not member.startswith("_"):
                        self.stack.append(None)
                        return
            self._refuse("getattr of something else than the member of a known enumeration")
        if _FILLED.fullmatch(called):
            self._refuse(f"it calls {called.replace(' ', '.')}")
        self.stack.append(None)

    def _empty_tuple(self, _: Any) -> None:
        self.stack.append(())

    def _tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._to_mark()))

    def _tuple1(self, _: Any) -> None:
        self.stack.append((self.pop(),))

    def _tuple2(self, _: Any) -> None:
        second, first = self.pop(), self.pop()
        self.stack.append((first, second))

    def _put(self, arg: Any) -> None:
        self.memo[int(arg)] = self._top()

    _binput = _long_binput = _put

    def _memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self._top()

    def _get(self, arg: Any) -> None:
        if int(arg) not in self.memo:
            self._refuse(f"memo {arg} was never written")
        self.stack.append(self.memo[int(arg)])

    _binget = _long_binget = _get

    def _dup(self, _: Any) -> None:
        self.stack.append(self._top())

    def _mark(self, _: Any) -> None:
        self.stack.append(_Mark)

    def _pop_mark(self, _: Any) -> None:
        self._to_mark()

    def _pop(self, _: Any) -> None:
        if not self.stack:
            self._refuse("the stack runs empty")
        self.stack.pop()

    def _move(self, opcode: pickletools.OpcodeInfo) -> None:
        """Any other opcode: take what it takes; what it leaves below is as it was, what it makes is unknown."""
        before = list(opcode.stack_before)
        if pickletools.markobject in before:
            self._to_mark()
            before = before[: before.index(pickletools.markobject)]
        if opcode.name in _CHANGES:
            before = before[1:]
            for _ in before:
                self.pop()
            return
        for _ in before:
            self.pop()
        self.stack.extend(None for _ in opcode.stack_after)


def _one_pickle(file: BinaryIO, named: set[str]) -> Any:
    """Follow one pickle from where `file` stands to its STOP; add what it names; return its value if it is plain."""
    machine = _Machine(named)
    try:
        with warnings.catch_warnings():
            # An odd escape in old-style text is a warning of Python's own.
            warnings.simplefilter("ignore")
            for opcode, arg, _ in pickletools.genops(file):
                if opcode.name == "STOP":
                    return machine.pop()
                machine.step(opcode, arg)
    except (ValueError, IndexError, OverflowError, MemoryError, EOFError, RecursionError) as error:
        raise Unfollowable(f"not a pickle, or a damaged one: {error}", named) from error
    raise Unfollowable("a pickle without an end", named)
