"""The documentation matches the code: tables, links and names of tests."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from farandole._launchers import LAUNCHERS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate_algorithms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_algorithms_and_its_drawings_are_those_of_the_planner_table(
    generator: ModuleType,
) -> None:
    stale = [str(p.relative_to(DOCS)) for p in generator.stale(generator.pages())]
    assert stale == [], "run: make docs"


def test_another_planner_table_makes_the_page_stale(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = generator._core.schedule.planners()
    fewer = [row for row in rows if (row["collective"], row["name"]) != ("all_reduce", "ring")]
    monkeypatch.setattr(generator, "order", lambda row: row["order"])  # quick
    real = generator._core.schedule.planners

    def planners(*_: Any, collective: str | None = None, **__: Any) -> list[dict[str, Any]]:
        return [row for row in fewer if collective in (None, row["collective"])]

    monkeypatch.setattr(generator._core.schedule, "planners", planners)
    stale = {p.name for p in generator.stale(generator.pages())}
    monkeypatch.setattr(generator._core.schedule, "planners", real)
    assert stale >= {"algorithms.md", "all_reduce-ring-8.svg", "all_reduce-ring-5.svg"}


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("clusters/*.md"))],
    ids=lambda p: p.name,
)
def test_whatever_a_page_links_to_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


NAMED = re.compile(r"`((?:tests/)[\w/]+\.(?:py|cpp))::(\w+)`")


def test_every_command_of_ours_that_a_page_names_exists() -> None:
    rules = re.findall(r"^([a-z][\w/ -]*):", (ROOT / "Makefile").read_text(), re.M)
    targets = {target for rule in rules for target in rule.split()}
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"(?<![\w/])\.ci/[\w.]*\w", text):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
        for target in re.findall(r"`make ([a-z][\w/-]*)", text):
            assert target in targets, f"{page.name}: make {target}"


def test_every_test_that_a_page_names_exists() -> None:
    named = [
        (page.name, *match)
        for page in sorted(DOCS.glob("*.md"))
        for match in NAMED.findall(page.read_text(encoding="utf-8"))
    ]
    assert sum(page == "determinism.md" for page, _, _ in named) >= 20
    for page, file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), (
            f"{page} names {file}::{test}, which does not exist"
        )


def test_the_page_of_clusters_has_every_launcher_with_its_variables() -> None:
    page = (DOCS / "clusters" / "index.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for launcher in LAUNCHERS:
        first = launcher.rank.names[0]
        told = [row for row in rows if f"`{first}`" in row]
        assert told, f"no row has {first} of {launcher.name}"
        for name in (*launcher.job, *(n for group in launcher.needs for n in group)):
            assert f"`{name}`" in page, f"{name} of {launcher.name}"
