"""Shows the parameters that decorators of `farandole._arguments` give a function: they are known at
run time, and pages are made of the files alone."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe

_DECORATORS = ("collective(", "passes_on(", "takes(")


class Signatures(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if not any(str(each.value).startswith(_DECORATORS) for each in func.decorators):
            return
        live: Any = importlib.import_module(func.module.path)
        for name in func.path.removeprefix(func.module.path + ".").split("."):
            live = getattr(live, name)
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    p.name,
                    annotation=p.annotation,
                    kind=griffe.ParameterKind(p.kind.description),
                    default=None if p.default is p.empty else repr(p.default),
                )
                for p in inspect.signature(live).parameters.values()
            )
        )
