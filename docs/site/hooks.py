"""What the site adds to the pages: links to files of the repository, reference pages filled from
the package, and the check that the reference leaves nothing out.

Directives are comments, so that the pages read well without them::

    <!-- api farandole.torch: init shutdown -->   docstrings of these names
    <!-- help run -->                             what `farandole run --help` prints
    <!-- settings -->                             every environment variable

A link that leads nowhere, a public name that no page mentions and one without a docstring are
warnings, which `mkdocs build --strict` ends on.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import posixpath
import re
from pathlib import Path
from types import ModuleType
from typing import Any

_log = logging.getLogger("mkdocs.hooks.farandole")
_root = Path(__file__).parents[2]

_LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
_DIRECTIVE = re.compile(r"^<!-- (api|help|settings)(?: ([\w.]+))?(?:: ([\w\s]+))? -->$", re.M)

_told: dict[str, set[str]] = {}  # module -> names that its page has


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    here = posixpath.dirname(page.file.src_uri)
    markdown = _LINK.sub(lambda link: _outside(link, here, config), markdown)
    if page.file.src_uri.startswith("reference/"):
        markdown = _DIRECTIVE.sub(lambda found: _filled(found, markdown), markdown)
    return markdown


def on_post_build(**_: Any) -> None:
    for name, told in _told.items():
        _check(importlib.import_module(name), told)


def _outside(link: re.Match[str], here: str, config: Any) -> str:
    """A link to a file of the repository that is no page goes to the repository."""
    path = posixpath.normpath(posixpath.join("docs", here, link[1]))
    if path.startswith("docs/"):
        return link[0]
    if not (_root / path).exists():
        _log.warning("a link leads to %s, which is not there", path)
    return f"]({config.repo_url.rstrip('/')}/blob/main/{path}{link[2] or ''})"


def _filled(found: re.Match[str], page: str) -> str:
    kind, subject, names = found.groups()
    if kind == "help":
        return f"```text\n{_help(subject)}\n```"
    if kind == "settings":
        return _settings()
    told = _told.setdefault(subject, set())
    told.update(names.split(), re.findall(r"`(\w+)`", page))
    return "\n\n".join(f"::: {subject}.{name}" for name in names.split())


def _help(verb: str) -> str:
    from farandole.cli import parser_of

    return parser_of(verb).format_help().rstrip()


def _settings() -> str:
    from farandole import _core

    rows = [
        f"| `{s['name']}` | {s['type']} | {_cell(s['default'])} | {_cell(s['doc'])} | "
        f"{' '.join(f'`{name}`' for name in s['horovod'].split())} |"
        for s in _core.settings()
    ]
    head = "| Variable | Type | Default | What it does | Horovod's |\n|---|---|---|---|---|\n"
    return head + "\n".join(rows)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|") if value not in (None, "") else ""


def _check(module: ModuleType, told: set[str]) -> None:
    """Every public name is on its page, and says what it is."""
    for name in sorted(set(module.__all__)):
        value = getattr(module, name)
        if name not in told:
            _log.warning("%s.%s is on no page of the reference", module.__name__, name)
        elif callable(value) and not inspect.getdoc(value):
            _log.warning("%s.%s has no docstring", module.__name__, name)
        elif inspect.isclass(value) and value.__module__.startswith("farandole"):
            for method in _silent_methods(value):
                _log.warning("%s.%s.%s has no docstring", module.__name__, name, method)


def _silent_methods(kind: type) -> list[str]:
    return [
        name
        for name, value in vars(kind).items()
        if not name.startswith("_") and callable(value) and not inspect.getdoc(getattr(kind, name))
    ]
