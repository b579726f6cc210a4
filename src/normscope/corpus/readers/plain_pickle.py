"""Pickles of plain values, read without importing or calling anything that they name.

The standard library's pickletools gives the opcodes. Only those that build lists, dicts, tuples, strings, numbers,
booleans and None are executed; all others are refused. NumPy arrays are recognised by name and replaced by `ABSENT`.
"""

from __future__ import annotations

import mmap
import pickletools
from typing import IO, Any, Final, cast

from normscope.corpus.readers.data_files import DataFile, open_binary
from normscope.errors import NormscopeError


class _Absent:
    """Placeholder for an array or bytes."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()
ARRAYS = {
    "numpy ndarray",
    "numpy dtype",
    "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray _reconstruct",
    "numpy.core.numeric _frombuffer",
    "numpy._core.numeric _frombuffer",
    "_codecs encode",  # how Python 3 writes the bytes of an array for Python 2
}
LONG_STRING = 1 << 20  # longer strings are the data of arrays, as Python 2 writes them

NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
STRINGS = {"STRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
BYTE_STRINGS = {"BINSTRING", "SHORT_BINSTRING"}  # str of Python 2
BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def load_plain_pickle(path: DataFile) -> Any:
    """The value in a pickle file."""
    with open_binary(path) as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (ValueError, OSError) as error:
            raise NormscopeError(f"{path}:1: The file is empty or cannot be read.") from error
        with data:
            machine = _PickleMachine()
            position = 0
            try:
                for opcode, argument, place in pickletools.genops(cast(IO[bytes], data)):
                    position = place or 0
                    if opcode.name == "STOP":
                        return machine.stack.pop()
                    machine.step(opcode.name, argument)
            except NormscopeError as error:
                raise NormscopeError(f"{path}: Refused at byte {position}: {error}") from None
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError) as error:
                raise NormscopeError(f"{path}: Not a pickle, or damaged, after byte {position}.") from error
    raise NormscopeError(f"{path}: The pickle ends early.")


class _PickleMachine:
    """A pickle's stack, marks and memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Execute one opcode."""
        push = self.stack.append
        if name in NUMBERS:
            push(argument)
        elif name in STRINGS or name in BYTE_STRINGS:
            push(_decode_string(argument, name in BYTE_STRINGS))
        elif name in BYTES:
            push(ABSENT)
        elif name in CONSTANTS:
            push(CONSTANTS[name])
        elif name in TUPLES:
            push(tuple(reversed([self.stack.pop() for _ in range(TUPLES[name])])))
        elif name not in ("PROTO", "FRAME"):
            action = getattr(self, f"do_{name.lower()}", None)
            if action is None:
                raise NormscopeError(f"the opcode {name} builds more than plain values.")
            action(argument)

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def do_mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def do_pop(self, _: Any) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def do_pop_mark(self, _: Any) -> None:
        self.since_mark()

    def do_dup(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def do_empty_list(self, _: Any) -> None:
        self.stack.append([])

    def do_empty_dict(self, _: Any) -> None:
        self.stack.append({})

    def do_empty_tuple(self, _: Any) -> None:
        self.stack.append(())

    def do_list(self, _: Any) -> None:
        self.stack.append(self.since_mark())

    def do_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self.since_mark()))

    def do_dict(self, _: Any) -> None:
        self.stack.append(_fill_dict({}, self.since_mark()))

    def do_append(self, _: Any) -> None:
        value = self.stack.pop()
        _expect_type(self.stack[-1], list).append(value)

    def do_appends(self, _: Any) -> None:
        values = self.since_mark()
        _expect_type(self.stack[-1], list).extend(values)

    def do_setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _fill_dict(_expect_type(self.stack[-1], dict), [key, value])

    def do_setitems(self, _: Any) -> None:
        values = self.since_mark()
        _fill_dict(_expect_type(self.stack[-1], dict), values)

    def do_put(self, index: Any) -> None:
        self.memo[int(index)] = self.stack[-1]

    do_binput = do_long_binput = do_put

    def do_memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def do_get(self, index: Any) -> None:
        self.stack.append(self.memo[int(index)])

    do_binget = do_long_binget = do_get

    def do_global(self, name: Any) -> None:
        if name not in ARRAYS:
            raise NormscopeError(f"it refers to {name!r}, which is not a plain value.")
        self.stack.append(ABSENT)

    def do_stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.do_global(f"{module} {name}")

    def do_reduce(self, _: Any) -> None:
        self.stack.pop()
        if self.stack[-1] is not ABSENT:
            raise NormscopeError("it calls a function.")

    do_build = do_reduce


def _decode_string(text: str, byte_string: bool) -> Any:
    if len(text) > LONG_STRING:
        return ABSENT
    if byte_string and not text.isascii():  # pickletools reads the bytes as Latin-1
        try:
            return text.encode("latin-1").decode("utf-8")
        except UnicodeError:
            return text
    return text


def _expect_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected a {kind.__name__}")
    return value


def _fill_dict(into: dict[Any, Any], flat: list[Any]) -> dict[Any, Any]:
    """Add alternating keys and values to a dict.

    Keys must be strings or numbers: hashing a deeply nested tuple would exhaust the stack.
    """
    if len(flat) % 2 or not all(isinstance(key, str | int | float) for key in flat[::2]):
        raise ValueError("a dict needs pairs of a key, a string or number, and a value")
    into.update(zip(flat[::2], flat[1::2], strict=True))
    return into
