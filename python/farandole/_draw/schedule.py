"""A schedule as a picture: ranks from top to bottom, turns from left to right, messages as arrows.

Between the turns lies room for what each rank has folded by then, so arrows cross no words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from farandole import _core  # type: ignore[attr-defined, unused-ignore]
from farandole._draw.scene import (
    GREEN,
    GROUND,
    INK,
    RULE,
    SCALE,
    SHADE,
    SOFT,
    Box,
    Disc,
    Line,
    Mark,
    Scene,
    Text,
    mix,
    on_scale,
    text_width,
)
from farandole._draw.turns import RANKS, Course, Event, Message, course_of, name_of
from farandole._plan import Lanes, plan_world
from farandole._tables import counted

LEFT, RIGHT, TOP = 82.0, 24.0, 88.0
NARROWEST = 620.0
WORDS = 11.0  # size of the words at the folds
WHOLE = "#455A64"  # messages that carry all of the data, or pieces that are not neighbours
Sample = Callable[[float, float], Iterable[Mark]]

STORED = 0.45  # how far the colour of a message that is only stored goes towards the ground


@dataclass(frozen=True)
class Layout:
    """How much room there is: the more turns, the less is written at a fold."""

    begins: list[float]  # where each turn's arrows begin; after the last, the end
    arrow: float  # room for the arrows of a turn
    row: float
    operands: bool
    results: bool

    def begin(self, turn: int) -> float:
        return self.begins[turn - 1]

    def end(self, turn: int) -> float:
        return self.begin(turn) + self.arrow if turn else LEFT

    def y(self, rank: int) -> float:
        return TOP + 22 + rank * self.row


def layout_for(course: Course, size: int) -> Layout:
    """Between two turns is room for words, if anything was folded in the first."""
    turns, row = course.turns, 44.0 if size <= 8 else 34.0 if size <= 16 else 22.0
    operands = turns <= 7 and size <= 16
    results = operands or (turns <= 16 and size <= 16)
    longest = f"{size - 1}–{size - 1}" + f" ⊕ {size - 1}–{size - 1}" * operands  # noqa: RUF001
    words = 26 + text_width(longest, WORDS) if results else 14.0
    arrow = 62.0 if operands else 46.0 if results else max(14.0, min(34.0, 1600 / turns))
    folding = {event.turn for event in course.events}
    begins = [LEFT + 14]
    for turn in range(1, turns + 1):
        begins.append(begins[-1] + arrow + (words if turn in folding else min(words, 18.0)))
    return Layout(begins, arrow, row, operands, results)


def draw_plan(
    collective: str,
    algorithm: str | None,
    ranks: int,
    count: int,
    *,
    lanes: int = 1,
    segments: int = 1,
    root: int = 0,
    counts: Sequence[int] = (),
    lane: int = 0,
) -> Scene:
    """What a planner makes of a shape. The arguments are those of `farandole._plan.render`.

    Raises:
        InvalidArgument: there is no such algorithm for the collective, or the shape makes no sense.
        ValueError: there is no such lane, or there are more ranks than can be drawn.
    """
    if ranks > RANKS:
        raise ValueError(f"at most {RANKS} ranks can be drawn, not {ranks}")
    if count < 0:
        raise ValueError(f"a collective has at least 0 elements, not {count}")
    if algorithm is None:
        algorithm = str(_core.schedule.choose(collective, ranks, count, counts=list(counts)))
    world = plan_world(collective, algorithm, ranks, count, lanes, segments, root, counts)
    if not 0 <= lane < len(world[0]):
        raise ValueError(f"lane {lane} is not one of {len(world[0])}")
    elements = f"counts {','.join(map(str, counts))}" if counts else counted(count, "element")
    notes = [elements] * (collective != "barrier")
    notes += [counted(segments, "segment")] * (segments > 1) + [f"root {root}"] * (root > 0)
    title = f"{collective} by {algorithm}, {counted(ranks, 'rank')}"
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
    layout = layout_for(course, size)
    width = max(NARROWEST, layout.begins[-1] + RIGHT)
    legend = list(_legend(course, layout, layout.y(size - 1) + 44, width))
    height = max(mark.y for mark in legend) + 22 if legend else layout.y(size - 1) + 36
    turns = counted(course.turns, "turn") if course.messages else "nothing is sent"
    said = [turns, *notes]
    if len(world[0]) > 1:
        said.append(f"lane {lane} of {len(world[0])}")
    if course.turns > 1:
        said.append("in a turn, a rank sends one message and receives one")
    scene = Scene(width, height, title, "; ".join([title, *said, *_about(course, size)]))
    scene.add(Text(16, 28, title, 16, bold=True), Text(16, 48, " · ".join(said), 12, SOFT))
    scene.add(*_ground(course, size, layout, width))
    for message in sorted(course.messages, key=lambda m: m.folded):
        scene.add(_arrow(message, layout, pale=course.folds and not message.folded))
    for event in _last_of_each(course.events):
        scene.add(*_node(event, size, layout))
    scene.add(*legend)
    return scene


def _about(course: Course, size: int) -> Iterator[str]:
    """The messages in words, as long as they are few."""
    if len(course.messages) <= 4 * size:
        for turn in range(1, course.turns + 1):
            sent = (f"{m.sender} to {m.receiver}" for m in course.messages if m.turn == turn)
            yield f"turn {turn}: {', '.join(sent)}"


def _ground(course: Course, size: int, layout: Layout, width: float) -> Iterator[Mark]:
    bottom = layout.y(size - 1) + 20
    for turn in range(1, course.turns + 1):
        begin = layout.begin(turn)
        yield Box(begin, TOP - 6, layout.arrow, bottom - TOP + 6, SHADE, 3)
        if layout.results or turn % 5 == 0 or turn == 1:
            name = f"turn {turn}" if layout.results else str(turn)
            yield Text(begin + layout.arrow / 2, TOP - 12, name, 11, SOFT, "middle")
    for rank in range(size):
        y = layout.y(rank)
        yield Text(LEFT - 12, y + 4, f"rank {rank}", 12 if size <= 16 else 10, INK, "end")
        yield Line(LEFT, y, width - RIGHT, y, RULE, 1.2)


def _arrow(message: Message, layout: Layout, pale: bool) -> Line:
    colour = WHOLE if message.place is None else on_scale(message.place)
    return Line(
        layout.begin(message.turn),
        layout.y(message.sender),
        layout.end(message.turn),
        layout.y(message.receiver),
        mix(colour, GROUND, STORED) if pale else colour,
        1.4 + 1.6 * message.share,
        arrow=True,
    )


def _last_of_each(events: Iterable[Event]) -> list[Event]:
    """What a rank has at the end of a turn: of several folds the one with most in it."""
    kept: dict[tuple[int, int], Event] = {}
    for event in events:
        before = kept.get((event.turn, event.rank))
        if before is None or _members(event) >= _members(before):
            kept[event.turn, event.rank] = event
    return list(kept.values())


def _members(event: Event) -> int:
    return (event.lower | event.upper).bit_count()


def _node(event: Event, size: int, layout: Layout) -> Iterator[Mark]:
    x, y = layout.end(event.turn) + 8, layout.y(event.rank)
    yield from _fold_mark(x if layout.results else x - 3, y, event.finish, layout.results)
    if not layout.results:
        return
    words = name_of(event.lower | event.upper, size)
    if layout.operands and event.upper:
        words = f"{name_of(event.lower, size)} ⊕ {name_of(event.upper, size)}"
    yield Text(x + 10, y - 5, words, WORDS, GREEN if event.finish else INK, bold=event.finish)


def _fold_mark(x: float, y: float, finish: bool, large: bool) -> Iterator[Mark]:
    fill, edge, plus = (GREEN, GREEN, GROUND) if finish else (GROUND, INK, INK)
    yield Disc(x, y, 6.5 if large else 3.5, fill, edge)
    if large:
        yield Line(x - 4, y, x + 4, y, plus, 1.4)
        yield Line(x, y - 4, x, y + 4, plus, 1.4)


def _legend(course: Course, layout: Layout, y: float, width: float) -> Iterator[Mark]:
    """Only of what is there; items follow each other and go on in a new line if they must."""
    x = 16.0
    for length, marks in _legend_items(course, layout.results):
        if x > 16 and x + length > width - 16:
            x, y = 16.0, y + 24
        yield from marks(x, y)
        x += length + 20


def _legend_items(course: Course, large: bool) -> Iterator[tuple[float, Sample]]:
    def arrow(colour: str) -> Sample:
        return lambda x, y: [Line(x, y, x + 26, y, colour, 1.8, arrow=True)]

    whole = any(m.place is None for m in course.messages)
    colour = WHOLE if whole else SCALE[0]
    if course.folds:
        yield _item("fold: lower ⊕ upper ranks", lambda x, y: _fold_mark(x + 16, y, False, large))
        if any(event.finish for event in course.events):
            yield _item("fold that completes", lambda x, y: _fold_mark(x + 16, y, True, large))
        yield _item("to be folded", arrow(colour))
        if not all(m.folded for m in course.messages):
            yield _item("to be stored", arrow(mix(colour, GROUND, STORED)))
    if any(m.place is not None for m in course.messages):
        what = "data of first … last rank" if course.by_owner else "first … last elements"
        yield _item(f"carries: {what}", _strip)
        if whole:
            yield _item("all, or several pieces", arrow(WHOLE))


def _item(words: str, sample: Sample) -> tuple[float, Sample]:
    """Its width, and its marks at a place: the sample in 34 pixels, then the words."""

    def marks(x: float, y: float) -> Iterator[Mark]:
        yield from sample(x, y)
        yield Text(x + 36, y + 4, words, WORDS, SOFT)

    return 36 + text_width(words, WORDS), marks


def _strip(x: float, y: float) -> Iterator[Mark]:
    for place in range(8):
        yield Box(x + 3.6 * place, y - 5, 3.8, 10, on_scale(place / 7))
