"""Public functions raise only errors of farandole's, for any argument."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest

import farandole as fd
from farandole import _arguments, _core, _mpi
from farandole.typing import ReduceOp
from wrong_arguments import problems_of

pytestmark = pytest.mark.usefixtures("world_of_one")

RIGHT = {
    "x": np.ones(4), "xs": [np.ones(4)], "shape": 4, "file_path": os.devnull, "kind": "all_reduce",
    "input": np.ones(4), "output": np.ones(4), "inputs": [np.ones(4)], "outputs": [np.ones(4)],
    "array": np.ones(4), "calls": [], "ranks": [0], "name": "a name", "directory": "timeline",
}  # fmt: skip
# These end the process' world, or start another.
NOT_HERE = {"init", "shutdown", "abort", "run"}


def public() -> list[str]:
    return [
        name
        for name in fd.__all__
        if callable(getattr(fd, name)) and not inspect.isclass(getattr(fd, name))
        and name not in NOT_HERE
    ]  # fmt: skip


@pytest.mark.parametrize("name", public())
def test_a_wrong_argument_is_an_error_of_ours(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # "2" is the name of a file, too
    function = getattr(fd, name)
    try:
        assert problems_of(function, inspect.signature(function), RIGHT) == []
    finally:
        if name == "start_timeline":
            fd.stop_timeline()


def methods() -> list[str]:
    ends = {"leave", "abort", "report_exception"}  # after these the world is of no use
    return [n for n, m in vars(fd.Group).items() if callable(m) and n[0] != "_" and n not in ends]


@pytest.mark.parametrize("name", methods())
def test_a_wrong_argument_of_a_method_is_an_error_of_ours(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    method = getattr(fd.world(), name)
    try:
        assert problems_of(method, _arguments.native_signature(method), RIGHT) == []
    finally:
        with contextlib.suppress(fd.InvalidArgument):  # none was started
            fd.world().stop_timeline()


def test_reasons_of_an_abort_that_are_no_text_abort_nothing() -> None:
    for wrong in (b"..", None, 3, "\ud800"):
        with pytest.raises(fd.InvalidArgument, match=r"reason=|place="):
            fd.world().abort(wrong)  # type: ignore[arg-type]
        with pytest.raises(fd.InvalidArgument, match=r"reason=|place="):
            fd.world().report_exception("it", wrong)  # type: ignore[arg-type]
    fd.barrier()


def test_the_argument_and_its_value_are_named() -> None:
    world = fd.world()
    for call, words in [
        (lambda: world.split(2**40), "color is 1099511627776; it is a whole number of 32 bits"),
        (lambda: world.start_timeline("x", "y"), "number is 'y'; it is a whole number of 32 bits"),  # type: ignore[arg-type]
        (lambda: world.allocate(-1), "allocate(bytes=-1): a value is not what allocate("),
        (lambda: fd.all_reduce(np.ones(1), prescale="2"), "prescale is '2'; it is a number"),  # type: ignore[arg-type]
        (lambda: fd.split(2**40), "color is 1099511627776; it is a whole number of 32 bits"),
        (lambda: fd.barrier(name="\ud800"), r"name='\ud800' is not text"),
        (lambda: fd.broadcast(np.ones(1), group="all"), "group is 'all'; it is a group"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(fd.InvalidArgument) as caught:
            call()
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        ("all_reduce", "shares"),
        ("broadcast", "level"),
        ("grouped_broadcast", "op"),
        ("send", "to_"),
    ],
)
def test_an_unknown_keyword_is_refused_in_the_name_of_what_was_called(
    name: str, unknown: str
) -> None:
    function, right = getattr(fd, name), {"send": (np.ones(1), 0)}.get(name, ([np.ones(1)],))
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword .* '{unknown}'$"):
        function(*right, **{unknown: 1})
    assert unknown not in inspect.signature(function).parameters


class Fields(NamedTuple):
    size: int
    name: str = "a"


@_arguments.takes(Fields)
def taking(own: int, fields: Fields) -> tuple[int, Fields]:
    return own, fields


def test_a_function_takes_the_fields_of_a_tuple() -> None:
    signature = "(own: 'int', size: 'int', name: 'str' = 'a') -> 'tuple[int, Fields]'"
    assert str(inspect.signature(taking)) == signature
    assert taking(1, 2, "b") == taking(1, name="b", size=2) == (1, Fields(2, "b"))
    assert taking(own=1, size=2) == (1, Fields(2))  # type: ignore[call-arg, misc]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"own": 1, "size": 2, "more": 3}, "got an unexpected keyword argument 'more'"),
        ({"own": 1}, "missing 1 required positional argument: 'size'"),
        ({"size": 1}, "missing a required argument: 'own'"),
    ],
)
def test_what_a_function_does_not_take_is_refused_in_its_name(given: Any, words: str) -> None:
    with pytest.raises(TypeError, match=rf"^taking\(\) {words}$"):
        taking(**given)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": "0", "size": 1}, {"rank": 0, "size": 1.0}, {"rank": 2**40, "size": 2**41},
        {"local_rank": "x"}, {"timeout": "x"}, {"timeout": float("nan")}, {"ranks": 3},
        {"ranks": [0.5]}, {"job": b"x"}, {"job": "\ud800"}, {"agree": 5},
    ],
)  # fmt: skip
def test_wrong_arguments_of_init_are_named(wrong: dict[str, Any]) -> None:
    fd.shutdown()
    name, value = next((n, v) for n, v in wrong.items() if (n, v) != ("rank", 0))
    with pytest.raises(fd.InvalidArgument) as caught:
        fd.init(**wrong)
    assert name in str(caught.value)
    assert ascii(value) in str(caught.value)
    assert not fd.is_initialized()
    fd.init(rank=0, size=1)


@pytest.mark.parametrize(
    "name",
    [
        "FARANDOLE_LEVEL", "FARANDOLE_LOG", "HOROVOD_FUSION_THRESHOLD",
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    ],
)  # fmt: skip
def test_a_setting_of_bytes_that_are_no_text_is_named(name: str) -> None:
    script = (
        "import farandole as fd\n"
        "try:\n    fd.init(rank=0, size=1)\n"
        "except fd.InvalidArgument as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environb | {name.encode(): b"\xff"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == rf"the environment says {name}='\udcff', which is not text in UTF-8" "\n"


def test_an_operation_of_horovods_is_a_constant() -> None:
    @_arguments.checked
    def reduce(op: int | None = None) -> int | None:
        return op

    assert reduce(op=1) == 1
    with pytest.raises(fd.InvalidArgument) as wrong:
        reduce(op="sum")  # type: ignore[arg-type]
    expected = "reduce(): op is 'sum'; it is a constant such as hvd.Average or hvd.Sum"
    assert wrong.value.verdict == expected


def test_types_have_their_article() -> None:
    values: list[object] = [1, [], "", None]
    expected = ["an int", "a list", "a str", "a NoneType"]
    assert [_arguments.type_of(value) for value in values] == expected
    with pytest.raises(fd.InvalidArgument, match="comm is an int; it is a communicator"):
        _mpi.ranks_of(3)  # in a layer below


def test_type_checkers_know_the_engines_words() -> None:
    assert get_args(ReduceOp) == _core.reduce_ops
    assert get_args(fd.Handle[int]) == (int,)
