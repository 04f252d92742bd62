"""A training step as a picture, on traces made by hand."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from test_trace import GRADIENTS, MAIN, STREAM, Part, two_ranks

from farandole import _draw, _trace, cli
from farandole._draw.bars import LEFT, RIGHT, WIDTH
from farandole._draw.scene import GROUND, ORANGE, SKY, Box, Scene, Text
from farandole._draw.timeline import LATE, QUEUED, RED, draw_step


def boxes(scene: Scene, colour: str) -> list[tuple[float, float]]:
    """Begin and length of the bars in pixels, without the box of the legend."""
    found = [m for m in scene.marks if isinstance(m, Box) and m.fill == colour]
    return [(m.x, m.width) for m in found[:-1]]


def words(scene: Scene) -> list[str]:
    return [m.text for m in scene.marks if isinstance(m, Text)]


def named_steps(directory: Path, steps: int = 3) -> Path:
    for rank in (0, 1):
        part = Part(rank)
        for step in range(steps):
            zero = 1000.0 * step
            part.add("user", MAIN, zero, zero + 300, "forward")
            part.add("user", MAIN, zero + 300, zero + 700, "backward")
            part.step(zero + 400, zero + 690).operation(step, zero + 450, zero + 500, zero + 690)
            about = {"stream": GRADIENTS, "sequence": step}
            part.add("phase", STREAM, zero + 600, zero + 690, "running", **about)
            part.wait(zero + 640, zero + 690, final=True)
            part.add("user", MAIN, zero + 700, zero + 800, "optimizer")
        part.write(directory)
    return directory


def test_a_step_goes_from_forward_to_optimizer_and_bars_are_where_they_were(tmp_path: Path) -> None:
    scene = draw_step(_trace.load(named_steps(tmp_path)), 1)
    pixels = (WIDTH - LEFT - RIGHT) / 800  # per microsecond
    assert boxes(scene, SKY) == [pytest.approx((LEFT, 300 * pixels))] * 2
    assert boxes(scene, ORANGE) == [pytest.approx((LEFT + 640 * pixels, 50 * pixels))] * 2
    assert boxes(scene, QUEUED) == [pytest.approx((LEFT + 450 * pixels, 240 * pixels))] * 2
    assert boxes(scene, RED) == [pytest.approx((LEFT + 600 * pixels, 90 * pixels))] * 2
    assert "bucket 1, 1 KiB" in words(scene)


def late_step(directory: Path, size: int, late: int, by: float = 400) -> Path:
    """One step of 1000 µs. A rank launches its only bucket late, and the others wait for it."""
    for rank in range(size):
        begin = 300 + (by if rank == late else 0)
        part = Part(rank, size=size).add("user", MAIN, 0, begin, "backward")
        part.add("user", MAIN, 900, 1000, "optimizer").add("user", MAIN, 0, 1, "forward")
        part.step(begin, 900).operation(0, begin, begin, 900)
        part.add("phase", STREAM, 750, 900, "running", stream=GRADIENTS, sequence=0)
        part.wait(begin, 900, final=True).write(directory)
    return directory


def test_a_late_rank_is_named_by_all_that_wait_for_it(tmp_path: Path) -> None:
    scene = draw_step(_trace.load(late_step(tmp_path, 4, late=2)))
    pixels = (WIDTH - LEFT - RIGHT) / 1000
    waits = [pytest.approx((LEFT + 300 * pixels, 400 * pixels))] * 2  # of program and bucket
    mark, (name,) = boxes(scene, LATE), [m for m in scene.marks if named(m, "rank 2") and m.bold]
    assert [bar for bar in mark if bar[0] > LEFT] == waits * 3
    assert len([m for m in scene.marks if named(m, "rank 2") and not m.bold]) == 6
    assert name.colour == GROUND  # its own name stands out
    assert len([bar for bar in mark if bar[0] < LEFT]) == 1
    assert "waiting for rank 2" in words(scene)
    late = "Rank 2 came late: the others stood still for it, up to 0.4 ms, 40% of the step"
    assert late in words(scene)
    assert late in scene.about


def named(mark: object, words: str) -> bool:
    return isinstance(mark, Text) and mark.text == words


def test_several_late_ranks_are_told_apart_by_their_numbers(tmp_path: Path) -> None:
    for rank in (0, 1):
        first, second = (100, 500) if rank else (300, 400)
        part = Part(rank).step(0, 1000).operation(0, first, first, 390)
        part.operation(1, second, second, 700).wait(100, 900, final=True).write(tmp_path)
    scene = draw_step(_trace.load(tmp_path))
    assert "waiting for the rank named in it" in words(scene)
    assert {"rank 0", "rank 1"} <= set(words(scene))


def test_a_rank_that_is_hardly_late_is_not_blamed(tmp_path: Path) -> None:
    scene = draw_step(_trace.load(late_step(tmp_path, 2, late=1, by=1)))
    assert not any("late" in word or "waiting for rank" in word for word in words(scene))
    assert LATE not in {m.fill for m in scene.marks if isinstance(m, Box)}


def test_the_late_rank_is_among_those_that_are_drawn(tmp_path: Path) -> None:
    scene = draw_step(_trace.load(late_step(tmp_path, 20, late=18)))
    ranks = [m.text for m in scene.marks if isinstance(m, Text) and m.bold][2:]
    assert ranks == [f"rank {rank}" for rank in (*range(15), 18)]


def test_waits_of_other_steps_do_not_count_against_this_ones_overlap(tmp_path: Path) -> None:
    for rank in (0, 1):
        part = Part(rank).add("user", MAIN, 0, 100, "forward")
        part.step(100, 300).wait(0, 90, final=True)  # the rest of the step before
        part.operation(0, 100, 100, 300).wait(250, 300, final=True).write(tmp_path)
    assert words(draw_step(_trace.load(tmp_path)))[1].startswith("75% of the time")


def test_the_share_that_was_overlapped_is_told_for_the_step(tmp_path: Path) -> None:
    scene = draw_step(_trace.load(two_ranks(tmp_path)))
    # Blocked for 40 and 80 of the 100 µs that gradients were on their way.
    assert words(scene)[1].startswith("40% of the time that gradients were on their way")


def test_a_trace_of_an_unnamed_program_is_drawn_too(tmp_path: Path) -> None:
    scene = draw_step(_trace.load(two_ranks(tmp_path)), 0)
    assert "first gradient to last" in words(scene)
    assert "forward" not in words(scene)


def test_many_ranks_and_long_names_stay_readable(tmp_path: Path) -> None:
    for rank in range(20):
        part = Part(rank, size=20).step(0, 100).operation(1, 10, 20, 90)
        part.events[-1]["name"] = "a name that is much too long for its row"
        part.write(tmp_path)
    scene = draw_step(_trace.load(tmp_path))
    assert "rank 15" in words(scene)
    assert "rank 16" not in words(scene)
    assert "ranks 0, 1, 2" in words(scene)[1]
    assert "a name that is much t…" in words(scene)
    assert all(0 <= m.y <= scene.height for m in scene.marks)


def test_what_cannot_be_drawn_says_why(tmp_path: Path) -> None:
    run = _trace.load(named_steps(tmp_path / "good"))
    with pytest.raises(_draw.DrawError, match="step 3 is not one of the 3 steps"):
        draw_step(run, 3)
    Part(0, size=1).write(tmp_path / "none")
    with pytest.raises(_draw.DrawError, match="no training steps"):
        draw_step(_trace.load(tmp_path / "none"))


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, file = str(named_steps(tmp_path / "trace")), tmp_path / "step.svg"
    assert cli.main(["trace", trace, "--draw", str(file), "--step", "2"]) == 0
    assert capsys.readouterr().out == f"drew {file}\n"
    assert "Training step 2, 2 ranks" in ET.fromstring(file.read_text("utf-8")).itertext()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--draw", "x.pdf"], "ends in .svg or .png"),
        (["--draw", "x.svg", "--step", "9"], "step 9 is not one of the 3 steps"),
        (["--draw", "x.svg", "--json"], "exclude each other"),
        (["--step", "1"], "--step chooses the step that --draw FILE draws"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    trace = str(named_steps(tmp_path / "trace"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trace", trace, *options]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("x.*"))
