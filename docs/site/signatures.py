"""Shows the keywords that a function hands on in place of its ``**options``: they are known at run
time (`farandole._arguments.passes_on`), and pages are made of the files alone."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe

_HANDS_ON = ("passes_on", "collective")  # names of decorators


class Signatures(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if not any(str(each.value).startswith(_HANDS_ON) for each in func.decorators):
            return
        live = getattr(importlib.import_module(func.module.path), func.name)
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
