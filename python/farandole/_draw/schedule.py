"""A schedule as a picture: ranks from top to bottom, turns from left to right, messages as arrows.

Between the turns lies room for what each rank has folded by then, so arrows cross no words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from farandole._draw.layout import LINE, RIGHT, layout_for
from farandole._draw.leaving_out import what_to_show
from farandole._draw.legend import legend
from farandole._draw.messages import arrow_of, fold_of, ground, last_of_each, stubs_of
from farandole._draw.scene import SOFT, Scene, Text
from farandole._draw.turns import RANKS, Course, course_of
from farandole._plan import Lanes, plan_world
from farandole._plan_size import Shape, checked
from farandole._tables import counted

NARROWEST = 620.0


def draw_plan(shape: Shape, *, lane: int = 0) -> Scene:
    """Draws what a planner makes of a shape.

    Raises:
        InvalidArgument: there is no such algorithm for the collective, or the shape makes no sense.
        ValueError: there is no such lane, or there are more ranks than can be drawn.
    """
    shape = checked(shape)
    ranks, segments, root, host_of = shape.ranks, shape.segments, shape.root, shape.host_of
    if ranks > RANKS:
        raise ValueError(f"at most {RANKS} ranks can be drawn, not {ranks}")
    world = plan_world(shape)
    if not 0 <= lane < len(world[0]):
        raise ValueError(f"lane {lane} is not one of {len(world[0])}")
    notes = [shape.elements] * (shape.collective != "barrier")
    notes += [counted(segments, "segment")] * (segments > 1) + [f"root {root}"] * (root > 0)
    title = f"{shape.collective} by {shape.algorithm}, {counted(ranks, 'rank')}"
    if host_of:
        title += f" on {counted(len(set(host_of)), 'host')}"
        notes += [f"hosts {':'.join(map(str, host_of))}"]
    return draw_schedule(title, world, lane=lane, notes=notes)


def draw_schedule(
    title: str, world: Sequence[Lanes], *, lane: int = 0, notes: Iterable[str] = ()
) -> Scene:
    """One lane of a world of schedules.

    Args:
        title: what it is, such as "all_reduce by ring, 4 ranks".
        world: every rank's lanes, as `farandole._plan.plan_world` gives them.
        lane: the one that is drawn.
        notes: what the line below the title says besides the number of turns.

    Raises:
        ValueError: there are more ranks than can be drawn.
    """
    course, size = course_of(world, lane), len(world)
    shown = what_to_show(course, size)
    layout, gaps = layout_for(course, size, shown), shown.words()
    width = max(NARROWEST, layout.right + RIGHT)
    stubs = list(stubs_of(course, layout))
    meanings = list(legend(course, layout.results, bool(stubs), layout.bottom + 44, width))
    height = max(mark.y for mark in meanings) + 22 if meanings else layout.bottom + 36
    said = _said(course, len(world[0]), lane, notes)
    about = "; ".join([title, *said, *gaps, *_about(course, size)])
    scene = Scene(width, height, title, about)
    scene.add(Text(16, 28, title, 16, bold=True))
    for line, words in enumerate([" · ".join(said), *gaps]):
        scene.add(Text(16, 48 + LINE * line, words, 12, SOFT))
    scene.add(*ground(layout, width))
    for message in sorted(course.messages, key=lambda m: m.folded):
        scene.add(*arrow_of(message, course, layout))
    scene.add(*stubs)
    for event in last_of_each(course.events):
        scene.add(*fold_of(event, size, layout))
    scene.add(*meanings)
    return scene


def _said(course: Course, lanes: int, lane: int, notes: Iterable[str]) -> list[str]:
    said = [counted(course.turns, "turn") if course.messages else "nothing is sent", *notes]
    if lanes > 1:
        said.append(f"lane {lane} of {lanes}")
    if course.turns > 1:
        said.append("in a turn, a rank sends one message and receives one")
    return said


def _about(course: Course, size: int) -> Iterator[str]:
    """The messages in words, as long as they are few."""
    if len(course.messages) <= 4 * size:
        for turn in range(1, course.turns + 1):
            sent = (f"{m.sender} to {m.receiver}" for m in course.messages if m.turn == turn)
            yield f"turn {turn}: {', '.join(sent)}"
