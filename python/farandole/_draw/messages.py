"""The marks of a schedule's picture: its ground, its messages as arrows, its folds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from farandole._draw.layout import GAP, LEFT, RIGHT, WORDS, Layout
from farandole._draw.legend import STORED, WHOLE, fold_mark
from farandole._draw.scene import (
    GREEN,
    GROUND,
    INK,
    RULE,
    SHADE,
    SOFT,
    Box,
    Line,
    Mark,
    Text,
    mix,
    on_scale,
    text_width,
)
from farandole._draw.turns import Course, Event, Message, name_of

STUB = 15.0  # how long an arrow to a rank that is left out is
NUMBER = 10.0  # size of the number beside it


def ground(layout: Layout, width: float) -> Iterator[Mark]:
    yield from _turns(layout)
    for rank in layout.shown.ranks:
        y = layout.y(rank)
        yield Text(LEFT - 12, y + 4, f"rank {rank}", 12 if layout.row > 22 else 10, INK, "end")
        yield Line(LEFT, y, width - RIGHT, y, RULE, 1.2)
    for y, (first, last) in layout.no_ranks:
        yield Text(LEFT - 12, y + 4, f"⋮ {first}–{last}", WORDS, SOFT, "end")  # noqa: RUF001
    yield from _gaps(layout)


def _turns(layout: Layout) -> Iterator[Mark]:
    top, bottom, turns = layout.top, layout.bottom + 20, layout.shown.turns
    for turn in turns:
        begin = layout.begin(turn)
        yield Box(begin, top - 6, layout.arrow, bottom - top + 6, SHADE, 3)
        if layout.results or layout.arrow > 30 or turn % 5 == 0 or turn == 1:
            name = f"turn {turn}" if layout.results else str(turn)
            yield Text(begin + layout.arrow / 2, top - 12, name, 11, SOFT, "middle")


def _gaps(layout: Layout) -> Iterator[Mark]:
    """Where turns are left out the ranks' lines are dotted."""
    for x, (first, last) in layout.no_turns:
        middle = x + (GAP - 14) / 2
        yield Text(middle, layout.top - 12, f"{first}–{last}", 11, SOFT, "middle")  # noqa: RUF001
        for y in layout.ys.values():
            yield Box(x, y - 2, GAP - 14, 4, GROUND)
            yield Text(middle, y + 4, "···", 12, SOFT, "middle")


def arrow_of(message: Message, course: Course, layout: Layout) -> Iterator[Mark]:
    """The arrow of a message, if its turn and both its ends are shown."""
    ends = {message.sender, message.receiver}
    if message.turn in layout.begins and ends <= layout.ys.keys():
        yield _line(
            message, course,
            (layout.begin(message.turn), layout.y(message.sender)),
            (layout.end(message.turn), layout.y(message.receiver)),
        )  # fmt: skip


def stubs_of(course: Course, layout: Layout) -> Iterator[Mark]:
    """Short arrows towards the left-out ends of messages, with the numbers of those ranks."""
    cut = [m for m in course.messages if m.turn in layout.begins and _is_cut(m, layout)]
    back = {(m.turn, m.receiver, m.sender) for m in cut}
    for message in cut:
        swapped = (message.turn, message.sender, message.receiver) in back
        yield from _stub(message, course, layout, swapped)


def _is_cut(message: Message, layout: Layout) -> bool:
    return (message.sender in layout.ys) != (message.receiver in layout.ys)


def _stub(message: Message, course: Course, layout: Layout, swapped: bool) -> Iterator[Mark]:
    """Two ranks that swap have one number between their two arrows."""
    sent = message.sender in layout.ys
    here, there = (message.sender, message.receiver)[:: 1 if sent else -1]
    near = (layout.begin(message.turn) if sent else layout.end(message.turn), layout.y(here))
    side, down = (1 if sent else -1), (1 if there > here else -1)
    far = (near[0] + side * STUB, near[1] + down * 0.3 * layout.row)
    yield _line(message, course, *((near, far) if sent else (far, near)))
    half = text_width(str(there), NUMBER) / 2
    if not swapped:
        yield from _number(there, far[0] + side * (2 + half), far[1], half)
    elif sent:
        yield from _number(there, near[0] + layout.arrow / 2, far[1], half)


def _number(rank: int, x: float, y: float, half: float) -> Iterator[Mark]:
    """On a ground of its own, since other arrows may pass there."""
    yield Box(x - half, y - 0.5 * NUMBER, 2 * half, NUMBER, SHADE)
    yield Text(x, y + 0.35 * NUMBER, str(rank), NUMBER, SOFT, "middle")


def _line(
    message: Message, course: Course, begin: tuple[float, float], end: tuple[float, float]
) -> Line:
    """Pale where what arrives is only stored, among others that are folded."""
    colour = WHOLE if message.place is None else on_scale(message.place)
    pale = course.folds and not message.folded
    colour = mix(colour, GROUND, STORED) if pale else colour
    return Line(*begin, *end, colour, 1.4 + 1.6 * message.share, arrow=True)


def last_of_each(events: Iterable[Event]) -> list[Event]:
    """Each rank's last event of each turn: of several folds the one with most in it."""
    kept: dict[tuple[int, int], Event] = {}
    for event in events:
        before = kept.get((event.turn, event.rank))
        if before is None or _members(event) >= _members(before):
            kept[event.turn, event.rank] = event
    return list(kept.values())


def _members(event: Event) -> int:
    return (event.lower | event.upper).bit_count()


def fold_of(event: Event, size: int, layout: Layout) -> Iterator[Mark]:
    if event.rank not in layout.ys or (event.turn and event.turn not in layout.begins):
        return
    x, y = layout.end(event.turn) + 8, layout.y(event.rank)
    yield from fold_mark(x if layout.results else x - 3, y, event.finish, layout.results)
    if not layout.results:
        return
    words = name_of(event.lower | event.upper, size)
    if layout.operands and event.upper:
        words = f"{name_of(event.lower, size)} ⊕ {name_of(event.upper, size)}"
    yield Text(x + 10, y - 5, words, WORDS, GREEN if event.finish else INK, bold=event.finish)
