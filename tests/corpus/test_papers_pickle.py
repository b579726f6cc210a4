"""Pickles of plain values, and pickles that try to run code."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normscope import NormscopeError
from normscope.corpus import read
from normscope.corpus.readers.plain_pickle import ABSENT, load_plain_pickle
from tests.helpers.files import bad, good, write

TOKENS = ["[CLS]", "caf", "##é", "[SEP]", "b", "[SEP]"]
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.floats(allow_nan=False))
VALUES = st.recursive(
    st.one_of(st.none(), KEYS),
    lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(KEYS, inner), st.tuples(inner), st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_excerpts_with_their_attention_maps(tmp_path: Path, protocol: int) -> None:
    maps = np.ones((2, 2, 6, 6), np.float16)
    excerpts: list[Any] = [
        {"tokens": TOKENS, "attns": maps},
        {"tokens": TOKENS[:4], "attns": maps},
        {"tokens": [1]},
        {},
    ]
    path = write(tmp_path, pickle.dumps(excerpts, protocol), "x.pkl")
    first, second, third, fourth = read(path)
    assert (good(first).words, good(first).pieces, first.id) == (tuple(TOKENS), True, "x.pkl:1")
    assert good(second).words == tuple(TOKENS[:4])
    assert bad(third).where == f"{path}:3"
    assert '"tokens"' in bad(fourth).reason


def test_strings_of_python_2(tmp_path: Path) -> None:
    token = "é".encode()
    short = b"\x80\x02]q\x00}q\x01U\x06tokens]U" + bytes([len(token)]) + token + b"asa."
    assert good(next(read(write(tmp_path, short, "x.pkl")))).words == ("é",)
    long = b"\x80\x02]T" + struct.pack("<i", 1 << 21) + b"\xff" * (1 << 21) + b"a."
    assert load_plain_pickle(write(tmp_path, long, "x.pkl")) == [ABSENT]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(value=VALUES, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_as_pickle_itself_reads_them(tmp_path: Path, value: Any, protocol: int) -> None:
    assert load_plain_pickle(write(tmp_path, pickle.dumps(value, protocol))) == value


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


ATTACKS = {
    "system": Call(os.system, "touch attacked"),
    "eval": Call(eval, "open('attacked', 'w')"),
    "nested": [{"tokens": ["a"], "x": {"y": [Call(os.mkdir, "attacked")]}}],
    "object": Path("attacked"),
    "set": {1, 2},
    "complex": 1j,
    "instance": ABSENT,
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ATTACKS)
def test_pickles_that_build_more_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, pickle.dumps(ATTACKS[name], protocol), "x.pkl")
    with pytest.raises(NormscopeError, match=r"x\.pkl: Refused at byte"):
        read(path)
    assert not Path("attacked").exists()


HAND_MADE = {
    "instance": b"(S'touch attacked'\nios\nsystem\n.",
    "object": b"\x80\x02(cos\nsystem\nX\x01\x00\x00\x00ao.",
    "array's name called with a function": b"\x80\x02cnumpy\nndarray\ncos\nsystem\n\x85R.",
    "call of a list": b"\x80\x02])R.",
    "call of a string": b"X\x06\x00\x00\x00system)R.",
    "build on a dict": b"}}b.",
    "extension registry": b"\x80\x02\x82\x01.",
    "persistent id": b"Psomething\n.",
    "binary persistent id": b"K\x01Q.",
    "new object": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "buffer": b"\x80\x05\x97.",
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_attacks_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(NormscopeError, match="Refused at byte"):
        read(write(tmp_path, HAND_MADE[name], "x.pkl"))


DAMAGED = {
    "no stop": b"]",
    "nothing on the stack": b".",
    "no mark": b"e.",
    "unknown opcode": b"\xee.",
    "not in the memo": b"h\x05.",
    "append to a dict": b"}K\x01a.",
    "odd dict": b"(K\x01d.",
    "list as a key": b"}]K\x01s.",
    "array as a key": b"}C\x01aK\x01s.",
    "long string cut short": b"X\xff\xff\xff\x7fa.",
    "longer string cut short": b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fa.",
    "deep tuple as a key": b"}K\x01" + b"\x85" * 1_000_000 + b"K\x01s.",
    "number of many digits": b"I" + b"9" * 10_000 + b"\n.",
    "text": b"hello\n",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_pickles(tmp_path: Path, name: str) -> None:
    with pytest.raises(NormscopeError, match=r"x\.pkl: (Not a pickle|The pickle ends)"):
        read(write(tmp_path, DAMAGED[name], "x.pkl"))


def test_a_huge_memo_index_takes_no_memory(tmp_path: Path) -> None:
    assert load_plain_pickle(write(tmp_path, b"]r\xff\xff\xff\xff.")) == []


def test_lists_that_hold_themselves(tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match="list of dicts"):
        read(write(tmp_path, b"\x80\x02]q\x00h\x00a.", "x.pkl"))


@pytest.mark.parametrize("value", [{"tokens": ["a"]}, "tokens", [["a"]], None])
def test_something_else_in_the_pickle(tmp_path: Path, value: Any) -> None:
    with pytest.raises(NormscopeError, match="list of dicts"):
        read(write(tmp_path, pickle.dumps(value), "x.pkl"))
