"""A schedule run turn by turn, and its picture."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from farandole import _core, _draw, _plan, cli
from farandole._draw.leaving_out import Shown, what_to_show
from farandole._draw.scene import Box, Disc, Line, Scene, Text, text_width
from farandole._draw.schedule import draw_plan, draw_schedule
from farandole._draw.turns import Course, Message, course_of, name_of

PLANNERS = [(row["collective"], row["name"]) for row in _core.schedule.planners()]


def course(collective: str, name: str, size: int, count: int = 96, **how: int) -> Course:
    return course_of(_plan.plan_world(_plan.Shape(collective, name, size, count, **how)))


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
        world = _plan.plan_world(_plan.Shape(collective, name, size, 96, **how))
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
        world = _plan.plan_world(_plan.Shape(collective, name, 6, 96))
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
    scene = draw_plan(_plan.Shape(collective, name, size, 128))
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
    scene = draw_plan(_plan.Shape("all_reduce", "binomial", 4, 10, segments=1, lanes=2), lane=1)
    words = [m.text for m in scene.marks if isinstance(m, Text)]
    assert "all_reduce by binomial, 4 ranks" in words
    assert "0–1 ⊕ 2–3" in words  # noqa: RUF001
    assert any("lane 1 of 2" in w for w in words)
    assert "turn 1: 1 to 0, 3 to 2" in scene.about


def test_a_legend_explains_what_is_there_and_no_more() -> None:
    moved = [
        m.text
        for m in draw_plan(_plan.Shape("broadcast", "binomial", 4, 8)).marks
        if isinstance(m, Text)
    ]
    assert not any("fold" in word for word in moved)
    pieces = draw_plan(_plan.Shape("all_reduce", "ring", 4, 8)).marks
    assert any(isinstance(m, Text) and m.text == "carries: first … last elements" for m in pieces)


def test_svg_is_well_formed_and_has_every_mark() -> None:
    from farandole._draw.svg import to_svg

    scene = draw_plan(_plan.Shape("all_reduce", "halving_doubling", 5, 40))
    scene.add(Text(0, 0, "a < b & c"))
    kinds = [e.tag.rpartition("}")[2] for e in ET.fromstring(to_svg(scene)).iter()]
    marks = [type(mark) for mark in scene.marks]
    assert kinds.count("path") == marks.count(Line)
    assert kinds.count("circle") == marks.count(Disc)
    assert kinds.count("rect") == marks.count(Box) + 1
    assert kinds.count("text") == marks.count(Text)


# --- large ones


def shown_of(collective: str, name: str, size: int) -> Shown:
    return what_to_show(course(collective, name, size, 1024), size)


def test_of_a_large_ring_its_begin_its_middle_and_its_end_are_drawn() -> None:
    shown = shown_of("all_reduce", "ring", 64)
    assert shown.turns == [1, 2, 3, 62, 63, 64, 65, 66, 126]  # at the end of 63 all folds are done
    assert shown.ranks == [0, 1, 2, 3, 60, 61, 62, 63]
    turns, ranks = shown.words()
    assert turns == "turns 4–61 and 67–125 left out: messages as in those beside them"  # noqa: RUF001
    assert ranks.startswith("ranks 4–59 left out: in these turns they send and")  # noqa: RUF001


def test_turns_whose_peers_move_on_are_alike_and_it_is_said() -> None:
    shown = shown_of("gather", "direct", 64)
    assert shown.turns == [1, 2, 3, 63]
    assert {0, 1, 2, 3, 63} <= set(shown.ranks)  # all that do something in these
    assert "each time between other ranks" in shown.words()[0]


def test_halves_that_swap_with_their_mirror_images_are_alike() -> None:
    shown = shown_of("all_reduce", "halving_doubling", 64)
    assert shown.turns == list(range(1, 13))
    assert shown.no_ranks == [(4, 59)]


def test_ranks_of_which_every_other_one_folds_are_alike_by_turns() -> None:
    shown = shown_of("all_reduce", "direct", 64)
    assert shown.no_ranks == [(4, 59)]
    assert shown.words()[1].endswith("by turns")


@pytest.mark.parametrize("name", ["binomial", "double_tree"])
def test_nothing_is_left_out_where_nothing_is_alike(name: str) -> None:
    shown = shown_of("all_reduce", name, 64)
    assert (shown.ranks, shown.words()) == (list(range(64)), [])


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize(("collective", "name"), PLANNERS)
def test_small_ones_are_drawn_whole(collective: str, name: str, size: int) -> None:
    assert shown_of(collective, name, size).words() == []


def test_a_turn_that_differs_is_never_left_out() -> None:
    """Sixty turns alike, but in the 30th a message goes astray."""
    astray = [1 if turn == 30 else 2 for turn in range(1, 61)]
    messages = [Message(t, 0, to, False, 1.0, None) for t, to in enumerate(astray, 1)]
    shown = what_to_show(Course(60, messages, [], False), 3)
    assert shown.turns == [1, 2, 3, 29, 30, 31, 32, 33, 34, 60]


def test_a_large_ring_is_narrow_and_says_who_sends_to_whom() -> None:
    scene = draw_plan(_plan.Shape("all_reduce", "ring", 64, 1024))
    assert scene.width < 1200
    assert scene.height < 700
    words = [m.text for m in scene.marks if isinstance(m, Text)]
    assert (words.count("4"), words.count("59")) == (9, 9)  # to rank 4, from rank 59, in 9 turns
    assert "⋮ 4–59" in words  # noqa: RUF001
    assert "to, and from, a rank left out" in words
    assert "turns 4–61 and 67–125 left out" in scene.about  # noqa: RUF001


def test_two_that_swap_share_one_number() -> None:
    marks = draw_plan(_plan.Shape("all_reduce", "halving_doubling", 64, 1024)).marks
    assert sum(isinstance(m, Text) and m.text == "32" for m in marks) == 2  # there and back


def test_nothing_to_send_is_a_picture_too() -> None:
    for size, count in ((1, 8), (4, 0)):
        scene = draw_plan(_plan.Shape("all_reduce", None, size, count))
        assert "nothing is sent" in scene.about


def test_all_lanes_but_no_others_can_be_drawn() -> None:
    world = _plan.plan_world(_plan.Shape("all_reduce", "ring", 3, 12, lanes=2))
    assert draw_schedule("", world, lane=1).marks
    with pytest.raises(ValueError, match="lane 2 is not one of 2"):
        draw_plan(_plan.Shape("all_reduce", "ring", 3, 12, lanes=2), lane=2)


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
