"""A schedule run turn by turn, and its picture."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from farandole import _core, _draw, _plan, cli
from farandole._draw.scene import Box, Disc, Line, Scene, Text, text_width
from farandole._draw.schedule import draw_plan, draw_schedule
from farandole._draw.turns import Course, course_of, name_of

PLANNERS = [(row["collective"], row["name"]) for row in _core.schedule.planners()]


def course(collective: str, name: str, size: int, count: int = 96, **how: int) -> Course:
    return course_of(_plan.plan_world(collective, name, size, count, **how))


def test_a_binomial_all_reduce_goes_up_and_down_one_tree() -> None:
    found = course("all_reduce", "binomial", 8)
    sent = [
        sorted((m.sender, m.receiver) for m in found.messages if m.turn == turn)
        for turn in range(1, found.turns + 1)
    ]
    up = [[(1, 0), (3, 2), (5, 4), (7, 6)], [(2, 0), (6, 4)], [(4, 0)]]
    assert sent == [*up, *(sorted((b, a) for a, b in turn) for turn in reversed(up))]
    folded = [m.folded for m in sorted(found.messages, key=lambda m: m.turn)]
    assert folded == [True] * 7 + [False] * 7


def test_events_tell_which_ranks_are_lower_and_upper() -> None:
    (last,) = (e for e in course("all_reduce", "binomial", 8).events if e.finish)
    assert (last.turn, last.rank, last.lower, last.upper) == (3, 0, 0b1111, 0b11110000)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize(("collective", "name"), PLANNERS)
def test_every_message_of_every_planner_has_a_turn(collective: str, name: str, size: int) -> None:
    for how in ({}, {"segments": 3, "lanes": 2}):
        world = _plan.plan_world(collective, name, size, 96, **how)
        for lane in range(len(world[0])):
            found = course_of(world, lane)
            steps = [(r, s) for r, lanes in enumerate(world) for s in lanes[lane]]
            assert len(found.messages) == sum(s["to"] not in (None, r) for r, s in steps)
            for end in ("sender", "receiver"):  # one message each way in a turn
                busy = [(m.turn, getattr(m, end)) for m in found.messages]
                assert len(set(busy)) == len(busy)


@pytest.mark.parametrize("name", [n for c, n in PLANNERS if c == "all_reduce"])
def test_whatever_is_finished_has_all_ranks(name: str) -> None:
    for size in (1, 2, 5, 8):
        finished = [e for e in course("all_reduce", name, size).events if e.finish]
        assert finished
        for event in finished:
            assert event.lower | event.upper in (0, (1 << size) - 1)
            assert event.lower & event.upper == 0


def test_turns_are_at_least_the_rounds() -> None:
    for collective, name in PLANNERS:
        world = _plan.plan_world(collective, name, 6, 96)
        assert course_of(world).turns >= _plan.totals(world, "").rounds


def test_shares_and_places_say_what_a_message_carries() -> None:
    found = course("all_reduce", "halving_doubling", 4)
    first = [m for m in found.messages if m.turn == 1]
    assert {m.share for m in first} == {0.5}
    assert {m.place for m in first} == {0.25, 0.75}
    assert {m.place for m in course("all_reduce", "binomial", 4).messages} == {None}
    gathered = [m for m in course("all_gather", "ring", 4).messages if m.turn == 1]
    assert sorted((m.sender, m.place) for m in gathered) == [
        (0, 0.125), (1, 0.375), (2, 0.625), (3, 0.875)
    ]  # fmt: skip


def test_schedules_that_do_not_fit_together_are_refused() -> None:
    wait: dict[str, Any] = {
        "to": None, "send": None, "from": 1, "recv": ("scratch", 0, 1), "held": None,
        "action": "store", "leaf_arrived": False, "leaf_held": False, "finish": False,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="do not fit"):
        course_of([[[wait]], [[]]])


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(0b1, "0"), (0b1111, "0–3"), (0b110000, "4–5"), (0b10000001, "7–0"),  # noqa: RUF001
     (0b11111111, "0–7"), (0b101, "2 of 8"), (0, "")],  # noqa: RUF001
)  # fmt: skip
def test_a_set_of_ranks_has_a_short_name(ranks: int, name: str) -> None:
    assert name_of(ranks, 8) == name


# --- pictures


def boxes_of_texts(scene: Scene) -> list[tuple[float, float, float, float]]:
    found = []
    for mark in scene.marks:
        if isinstance(mark, Text):
            wide = text_width(mark.text, mark.size)
            x = mark.x - {"start": 0, "middle": wide / 2, "end": wide}[mark.anchor]
            found.append((x, mark.y - 0.8 * mark.size, x + wide, mark.y + 0.2 * mark.size))
    return found


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, 33, 64])
@pytest.mark.parametrize(("collective", "name"), PLANNERS)
def test_words_touch_neither_each_other_nor_the_border(
    collective: str, name: str, size: int
) -> None:
    scene = draw_plan(collective, name, size, 128)
    texts = boxes_of_texts(scene)
    for x, y, x2, y2 in texts:
        assert x >= 0
        assert y >= 0
        assert x2 <= scene.width
        assert y2 <= scene.height
    texts.sort()
    for i, a in enumerate(texts):
        for b in texts[i + 1 :]:
            if b[0] >= a[2]:
                break
            assert b[1] >= a[3] or a[1] >= b[3], (a, b)


def test_a_picture_says_in_words_what_it_shows() -> None:
    scene = draw_plan("all_reduce", "binomial", 4, 10, segments=1, lanes=2, lane=1)
    words = [m.text for m in scene.marks if isinstance(m, Text)]
    assert "all_reduce by binomial, 4 ranks" in words
    assert "0–1 ⊕ 2–3" in words  # noqa: RUF001
    assert any("lane 1 of 2" in w for w in words)
    assert "turn 1: 1 to 0, 3 to 2" in scene.about


def test_a_legend_explains_what_is_there_and_no_more() -> None:
    moved = [m.text for m in draw_plan("broadcast", "binomial", 4, 8).marks if isinstance(m, Text)]
    assert not any("fold" in word for word in moved)
    pieces = draw_plan("all_reduce", "ring", 4, 8).marks
    assert any(isinstance(m, Text) and m.text == "carries: first … last elements" for m in pieces)


def test_svg_is_well_formed_and_has_every_mark() -> None:
    from farandole._draw.svg import to_svg

    scene = draw_plan("all_reduce", "halving_doubling", 5, 40)
    scene.add(Text(0, 0, "a < b & c"))
    kinds = [e.tag.rpartition("}")[2] for e in ET.fromstring(to_svg(scene)).iter()]
    marks = [type(mark) for mark in scene.marks]
    assert kinds.count("path") == marks.count(Line)
    assert kinds.count("circle") == marks.count(Disc)
    assert kinds.count("rect") == marks.count(Box) + 1
    assert kinds.count("text") == marks.count(Text)


def test_nothing_to_send_is_a_picture_too() -> None:
    for size, count in ((1, 8), (4, 0)):
        scene = draw_plan("all_reduce", None, size, count)
        assert "nothing is sent" in scene.about


def test_all_lanes_but_no_others_can_be_drawn() -> None:
    world = _plan.plan_world("all_reduce", "ring", 3, 12, lanes=2)
    assert draw_schedule("", world, lane=1).marks
    with pytest.raises(ValueError, match="lane 2 is not one of 2"):
        draw_plan("all_reduce", "ring", 3, 12, lanes=2, lane=2)


# --- the command


def test_the_command_draws_svg_and_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, start in (("plan.svg", b"<svg "), ("plan.png", b"\x89PNG")):
        words = ["plan", "all_reduce", "--algorithm", "ring", "--draw", str(tmp_path / name)]
        assert cli.main(words) == 0
        assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--draw", "x.gif"], "ends in .svg or .png, not 'x.gif'"),
        (["--draw", "no/such/folder/x.svg"], "no/such/folder/x.svg cannot be written"),
        (["--draw", "x.svg", "--ranks", "65"], "at most 64 ranks can be drawn, not 65"),
        (["--draw", "x.svg", "--ranks", "0"], "at least one rank, not 0"),
        (["--draw", "x.svg", "--lane", "1"], "lane 1 is not one of 1"),
        (["--draw", "x.svg", "--count", "-1"], "at least 0 elements, not -1"),
        (["--draw", "x.svg", "--rank", "1"], "--draw shows all ranks"),
        (["--lane", "0"], "--lane chooses the lane that --draw FILE draws"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "all_reduce", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_png_is_refused_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(_draw.DrawError, match=r"pip install matplotlib.*plan\.svg needs nothing"):
        _draw.check_name(tmp_path / "plan.png")
    _draw.check_name(tmp_path / "plan.svg")
