"""Shows the parameters that decorators of `farandole._arguments` give a function: they are known at
run time, and pages are made of the files alone."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

_DECORATOR = re.compile(r"(?:collective|passes_on|takes)\((?:\w+, )?(\w+)\)")


class Signatures(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        given = [match[1] for d in func.decorators if (match := _DECORATOR.match(str(d.value)))]
        if not given:
            return
        live: Any = importlib.import_module(func.module.path)
        for name in func.path.removeprefix(func.module.path + ".").split("."):
            live = getattr(live, name)
        source = func.module.members.get(given[0])  # as written, if it is in the same file
        written = source.parameters if isinstance(source, griffe.Function) else ()
        known = {p.name: p for p in (*written, *func.parameters)}
        parameters = inspect.signature(live).parameters.values()
        func.parameters = griffe.Parameters(
            *(known.get(p.name) or _as_shown(p) for p in parameters)
        )


def _as_shown(parameter: inspect.Parameter) -> griffe.Parameter:
    has_default = parameter.default is not parameter.empty
    return griffe.Parameter(
        parameter.name,
        annotation=parameter.annotation,
        kind=griffe.ParameterKind(parameter.kind.description),
        default=repr(parameter.default) if has_default else None,
    )
