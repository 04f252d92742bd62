"""The script that lists repeated blocks finds those that are planted, and nothing else."""

from __future__ import annotations

from repeats import LEAST, Repeat, repeats, sources

MOST = 61  # two thirds of the first count
BLOCK = [f"total += weight[{i}] * value" for i in range(LEAST)]


def text(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def test_a_planted_pair_is_found_where_it_stands() -> None:
    files = {"a.py": text("begin()", *BLOCK, "end()"), "b.py": text("x = 1", "y = 2", *BLOCK)}
    assert repeats(files) == [Repeat(("a.py", 2), ("b.py", 3), LEAST)]


def test_one_line_less_is_no_repeat() -> None:
    assert repeats({"a.py": text(*BLOCK[1:]), "b.py": text(*BLOCK[1:])}) == []


def test_a_longer_block_is_one_repeat() -> None:
    longer = text(*BLOCK, "done()", "gone()")
    assert [r.lines for r in repeats({"a.py": longer, "b.py": longer})] == [LEAST + 2]


def test_three_copies_are_three_pairs() -> None:
    assert len(repeats({name: text(*BLOCK) for name in ("a.py", "b.py", "c.py")})) == 3


def test_a_block_repeats_within_a_file() -> None:
    assert repeats({"a.py": text(*BLOCK, "between()", *BLOCK)}) == [
        Repeat(("a.py", 1), ("a.py", LEAST + 2), LEAST)
    ]


def test_lines_that_are_all_the_same_do_not_overlap() -> None:
    assert repeats({"a.py": text(*["step()"] * (2 * LEAST - 1))}) == []


def test_spaces_blank_lines_and_closing_brackets_do_not_tell_blocks_apart() -> None:
    one = [f"if (x[{i}])  {{" for i in range(LEAST)]
    other = [f"    {line}\n\n    }};\n" for line in one]
    assert len(repeats({"a.cpp": text(*one), "b.cpp": text(*other)})) == 1


def test_imports_namespaces_and_the_licence_do_not_count() -> None:
    python = text(
        "from a import (", *(f"    b{i}," for i in range(LEAST)), ")", "import c", "import d"
    )
    cpp = [f'#include "x{i}.h"' for i in range(LEAST)]
    cpp += [
        "#pragma once",
        "namespace farandole {",
        "// Copyright 2026",
        "}  // namespace farandole",
    ]
    files = {"a.py": python, "b.py": python, "a.h": text(*cpp), "b.h": text(*cpp)}
    assert repeats(files) == []


def test_the_sources_repeat_themselves_seldom() -> None:
    found = repeats(sources())
    assert len(found) <= MOST, "\n".join(map(str, found))


def test_all_folders_are_read() -> None:
    assert {name.partition("/")[0] for name in sources()} == {"csrc", "python", "tests", "bench"}
