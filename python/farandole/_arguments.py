"""Errors of public functions about arguments of a wrong type.

Nothing is checked before the call, which would cost every right one: when a call has failed with an
error that is not ours, its arguments are held against the function's annotations.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import re
import struct
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from farandole import _core
from farandole._core import Error, Group, InvalidArgument
from farandole._words import type_of as type_of  # beside the other words for arguments

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])
_S = TypeVar("_S")
_M = TypeVar("_M")
_T_co = TypeVar("_T_co", covariant=True)

Kind = tuple[str, Callable[[Any], bool]]  # what an argument is, in words; whether a value is it
_WRONG = (
    TypeError, AttributeError, LookupError, ValueError, ArithmeticError, RuntimeError, struct.error,
)  # fmt: skip


@overload
def explained(function: Callable[_P, _R], /) -> Callable[_P, _R]: ...
@overload
def explained(
    function: None = None, /, **kinds: Kind
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def explained(function: Any = None, /, **kinds: Kind) -> Any:
    """Wraps the function, so that a wrong argument raises InvalidArgument that names it. `kinds`:
    of the parameters whose annotations do not say it."""
    if function is None:
        return functools.partial(explained_by, InvalidArgument, kinds)
    return explained_by(InvalidArgument, kinds, function)


def explained_by(
    error_of: Callable[[str], Exception], kinds: Mapping[str, Kind], function: Callable[_P, _R]
) -> Callable[_P, _R]:
    """Like explained(), with an error of another kind."""
    signature = inspect.signature(function)
    hands_on = hasattr(function, "__signature__")

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Error:
            raise
        except _WRONG as error:
            unknown = [name for name in kwargs if name not in signature.parameters]
            if hands_on and unknown:  # in Python's words, which would name another function
                raise TypeError(
                    f"{_called(function)}() got an unexpected keyword argument '{unknown[0]}'"
                ) from None
            why = _wrong(_called(function), signature, args, kwargs, kinds)
            if why is None:
                raise
            raise error_of(why) from error

    return call


def passes_on(*others: Callable[..., Any]) -> Callable[[_F], _F]:
    """Shows the keywords of other functions in place of the ``**options`` that it passes on."""

    def with_keywords(function: Any) -> Any:
        own = inspect.signature(function)
        shown = {name: p for name, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        for other in others:
            for name, p in inspect.signature(other).parameters.items():
                if p.kind is p.KEYWORD_ONLY:
                    shown.setdefault(name, p)
        function.__signature__ = own.replace(parameters=list(shown.values()))
        return function

    return with_keywords


class _Taking(Protocol[_P, _T_co]):
    @overload
    def __call__(self, function: Callable[[_T_co], _R], /) -> Callable[_P, _R]: ...
    @overload
    def __call__(
        self, function: Callable[[_S, _T_co], _R], /
    ) -> Callable[Concatenate[_S, _P], _R]: ...
    @overload
    def __call__(
        self, function: Callable[[_S, _M, _T_co], _R], /
    ) -> Callable[Concatenate[_S, _M, _P], _R]: ...


def takes(fields: Callable[_P, _T_co]) -> _Taking[_P, _T_co]:
    """Gives a function the parameters of `fields`, a NamedTuple, say: calls make one of them, which
    is the function's last argument. So a signature that several functions share stands once."""

    def with_fields(function: Any) -> Any:
        own, theirs = inspect.signature(function), inspect.signature(fields)
        before = list(own.parameters.values())[:-1]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            mine = [*args[: len(before)]]
            mine += [kwargs.pop(p.name) for p in before[len(args) :] if p.name in kwargs]
            try:
                if len(mine) < len(before):
                    raise TypeError(f"() missing a required argument: '{before[len(mine)].name}'")
                asked = fields(*args[len(before) :], **kwargs)
            except TypeError as error:  # in the name of what was called
                words = str(error).partition("() ")[2]
                raise TypeError(f"{function.__qualname__}() {words}") from None
            return function(*mine, asked)

        call.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[*before, *map(_as_written, theirs.parameters.values())]
        )
        return call

    return with_fields


def _as_written(parameter: inspect.Parameter) -> inspect.Parameter:
    """Fields of a NamedTuple have made something of their annotations."""
    annotation = parameter.annotation
    return parameter.replace(annotation=getattr(annotation, "__forward_arg__", annotation))


@overload
def checked(function: Callable[_P, _R], /) -> Callable[_P, _R]: ...
@overload
def checked(
    function: None = None, /, **kinds: Kind
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def checked(function: Any = None, /, **kinds: Kind) -> Any:
    """Like explained(), but checks before the call. For functions that are called once, and whose
    wrong values would go unnoticed for long."""
    if function is None:
        return functools.partial(_checked, kinds)
    return _checked(kinds, function)


def _checked(kinds: Mapping[str, Kind], function: Callable[_P, _R]) -> Callable[_P, _R]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        why = _wrong(_called(function), signature, args, kwargs, kinds)
        if why is not None:
            raise InvalidArgument(why)
        return function(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]  # Keras looks at the call itself
    return call


def _called(function: Any) -> str:
    """The name that a program calls: of the class, for its `__init__`."""
    name: str = function.__qualname__.removesuffix(".__init__")
    return name.rpartition(".")[2]


_SURROGATE = re.compile("[\ud800-\udfff]")


def is_text(value: Any) -> bool:
    """Text that UTF-8 has: no surrogates, as of bytes that are none."""
    return isinstance(value, str) and _SURROGATE.search(value) is None


def is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and -(2**31) <= int(value) < 2**31


def _are_whole(value: Any) -> bool:
    return isinstance(value, Sequence) and all(map(is_whole, value))


def one_of(what: str, *types: type) -> Kind:
    """Instances of these types."""
    return what, lambda v: isinstance(v, types)


A_NUMBER: Kind = ("a number", lambda v: isinstance(v, numbers.Real))
A_WHOLE_NUMBER: Kind = ("a whole number of 32 bits", is_whole)

# By annotation, as it is written. A framework's side adds its own.
KINDS: dict[str, Kind] = {
    "str": ("text, of characters that UTF-8 has", is_text),
    "int": A_WHOLE_NUMBER,
    "bool": ("True or False", lambda v: isinstance(v, bool | int)),
    "Sequence[Any]": ("a list", lambda v: isinstance(v, Iterable) and isinstance(v, Sized)),
    "Iterable[Any]": one_of("a list", Iterable),
    "os.PathLike[str]": one_of("a path", str, os.PathLike),
    "float": A_NUMBER,
    "Sequence[int]": ("a list of whole numbers", _are_whole),
    "Group": one_of("a group, as of farandole.split()", Group),
    "Mapping[str, str]": (
        "a dictionary of text",
        lambda v: isinstance(v, Mapping) and all(map(is_text, (*v, *v.values()))),
    ),
    "Callable[..., Any]": ("a function", callable),
}


# By name, too, where the annotation says less.
_NAMED: dict[tuple[str, str], Kind] = {
    ("op", "int"): ("a constant such as hvd.Average or hvd.Sum", is_whole),
}


def _wrong(
    name: str,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    own: Mapping[str, Kind],
) -> str | None:
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None  # Python's own words are the right ones
    for parameter, value in given.items():
        words = str(signature.parameters[parameter].annotation).split(" | ")
        if value is None and "None" in words:
            continue
        kinds = [
            own.get(parameter) or _NAMED.get((parameter, word)) or KINDS.get(word)
            for word in words
            if word != "None"
        ]
        known = [kind for kind in kinds if kind is not None]
        if len(known) < len(kinds) or any(fits(value) for _, fits in known):
            continue
        what = " or ".join(dict.fromkeys(what for what, _ in known))
        return f"{name}(): {parameter} is {shown(value)}; it is {what}"
    return None


def shown(value: Any) -> str:
    """In a message: short, and of characters that every terminal has."""
    text = repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def encodable(text: object) -> str:
    """The text with surrogates escaped: other libraries' messages may repeat them."""
    return str(text).encode(errors="backslashreplace").decode()


def no_such_dtype(what: str, dtype: object, known: Iterable[str] = _core.dtypes) -> InvalidArgument:
    return InvalidArgument(
        f"{what} has dtype {dtype}, which is not supported; there are {', '.join(known)}"
    )


# ---- native methods ----


def explain_methods(of: type) -> None:
    """Wrong arguments of a native class' methods raise InvalidArgument that names them."""
    for name, method in list(vars(of).items()):
        native = getattr(method, "__func__", None)
        if isinstance(native, types.BuiltinFunctionType) and not name.startswith("_"):
            setattr(of, name, _core.guarded(native, functools.partial(_refusal, native)))


_PYBINDS_WORDS = [
    ("typing.SupportsInt | typing.SupportsIndex", "int"),
    ("typing.SupportsFloat | typing.SupportsIndex", "float"),
    ("collections.abc.", ""),
    ("farandole._core.", ""),
    ("Sequence[object]", "Sequence[Any]"),
]


def _refusal(native: Any, *args: Any, **kwargs: Any) -> str | None:
    """The reason why a failed call was wrong; None if there is none."""
    signature = native_signature(native)
    why = _wrong(native.__name__, signature, args, kwargs, {})
    if why is not None:
        return why
    try:
        given = list(signature.bind(*args, **kwargs).arguments.items())[1:]
    except TypeError:
        return None
    values = ", ".join(f"{name}={shown(value)}" for name, value in given)
    return f"{native.__name__}({values}): a value is not what {native.__name__}{signature} takes"


def native_signature(native: Any) -> inspect.Signature:
    """pybind11 writes it into the first line of a function's text."""
    line = native.__doc__.partition("\n")[0]
    for theirs, ours in _PYBINDS_WORDS:
        line = line.replace(theirs, ours)
    return _signature(line)


@functools.cache
def _signature(line: str) -> inspect.Signature:
    import ast

    function: Any = ast.parse(f"def {line}: ...").body[0]
    names, defaults = function.args.args, function.args.defaults
    optional = len(names) - len(defaults)
    return inspect.Signature(
        [
            inspect.Parameter(
                each.arg,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                annotation=ast.unparse(each.annotation),
                default=inspect.Parameter.empty
                if i < optional
                else ast.literal_eval(defaults[i - optional]),
            )
            for i, each in enumerate(names)
        ]
    )


explain_methods(Group)
