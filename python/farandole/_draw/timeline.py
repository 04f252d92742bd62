"""One training step out of a trace as a picture: every rank's program, its buckets below it.

Where a bucket lies below forward or backward, communication is hidden behind computation; where it
lies below the wait, the program stands still for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, log10

from farandole._draw import DrawError
from farandole._draw.scene import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    RULE,
    SHADE,
    SKY,
    SOFT,
    Box,
    Line,
    Mark,
    Scene,
    Text,
    text_width,
)
from farandole._trace.figures import overlap_share, union
from farandole._trace.parts import Operation, Part, Run, Span

WIDTH, LEFT, RIGHT, TOP = 940.0, 176.0, 24.0, 74.0
ROW, BAR, GAP = 19.0, 13.0, 14.0
LETTERS = 22  # of a row's name, beside that of the rank
QUEUED = "#B8C2C7"
KNOWN = {"forward": SKY, "backward": BLUE, "optimizer": GREEN}
OTHERS = (PURPLE, "#8C6BB1", "#7A8B3B", "#A6761D")  # spans that the program has named otherwise
RANKS, BUCKETS = 16, 12  # at most so many are drawn


@dataclass(frozen=True)
class _Bar:
    begin: float
    end: float
    colour: str


@dataclass(frozen=True)
class _Row:
    name: str
    bars: list[_Bar]


def draw_step(run: Run, step: int | None = None) -> Scene:
    """A training step of all ranks, on one clock.

    Args:
        run: what `farandole._trace.load` gives.
        step: its number, 0 the first one in the trace; None: one that is as long as most are.

    Raises:
        DrawError: the trace has no training steps, or not this one.
    """
    count = min(len(part.steps) for part in run.parts)
    if not count:
        raise DrawError(f"{run.directory} has no training steps of all ranks to draw")
    if step is None:
        step = _typical(run, count)
    if not 0 <= step < count:
        raise DrawError(f"step {step} is not one of the {count} steps in {run.directory}")
    shown = run.parts[:RANKS]
    begin, end = _window(run.parts, step)
    colours = _colours(shown, (begin, end))
    blocks = [(part.header.rank, list(_rows(part, (begin, end), step, colours))) for part in shown]
    return _scene(run, step, (begin, end), blocks, colours)


def _typical(run: Run, count: int) -> int:
    """The lower quartile of the second half: other programs only make steps longer."""

    later = range(count // 2, count)
    return sorted(later, key=lambda step: _length(_window(run.parts, step)))[len(later) // 4]


def _length(span: Span) -> float:
    return span[1] - span[0]


def _window(parts: Sequence[Part], step: int) -> Span:
    """From the first rank's `forward` to the last one's `optimizer`, as far as they are named so.

    What a reducer calls a step is shorter: first gradient ready to all gradients reduced.
    """
    begins, ends = [], []
    for part in parts:
        begin, end = part.steps[step]
        later = part.steps[step + 1][0] if step + 1 < len(part.steps) else float("inf")
        forward, optimizer = (part.spans.get(name, []) for name in ("forward", "optimizer"))
        first = bisect_right(forward, begin, key=lambda span: span[0]) - 1
        last = bisect_left(optimizer, end, key=lambda span: span[1])
        begins.append(forward[first][0] if first >= 0 else begin)
        named = last < len(optimizer) and optimizer[last][1] <= later
        ends.append(optimizer[last][1] if named else end)
    return min(begins), max(ends)


def _colours(parts: Iterable[Part], window: Span) -> dict[str, str]:
    """A colour for every span of the program that is seen."""
    names = dict.fromkeys(
        name
        for part in parts
        for name, spans in part.spans.items()
        if any(_within(span, window) for span in spans)
    )
    others = [name for name in names if name not in KNOWN]
    return {n: KNOWN.get(n) or OTHERS[others.index(n) % len(OTHERS)] for n in names}


def _within(span: Span, window: Span) -> bool:
    return span[1] > window[0] and span[0] < window[1]


def _rows(part: Part, window: Span, step: int, colours: dict[str, str]) -> Iterator[_Row]:
    program = [
        _Bar(*span, colours[name])
        for name, spans in part.spans.items()
        for span in sorted(spans)
        if name in colours and _within(span, window)
    ]
    if not program:
        program = [_Bar(*part.steps[step], BLUE)]
    waits = [span for spans in part.final_waits.values() for span in spans]
    program += [_Bar(*span, ORANGE) for span in waits if _within(span, window)]
    yield _Row("program", program)
    for operation in _buckets(part, window)[:BUCKETS]:
        running = part.running.get((operation.stream, operation.sequence), [])
        bars = [_Bar(operation.launched, operation.end, QUEUED)]
        bars += [_Bar(*span, RED) for span in running]
        yield _Row(f"{operation.name}, {size_text(operation.bytes)}", bars)


def _buckets(part: Part, window: Span) -> list[Operation]:
    mine = (o for o in part.operations if o.stream in part.step_streams)
    found = [o for o in mine if window[0] <= o.launched and o.end <= window[1]]
    return sorted(found, key=lambda o: o.sequence)


def _scene(
    run: Run, step: int, window: Span, blocks: list[tuple[int, list[_Row]]], colours: dict[str, str]
) -> Scene:
    rows = sum(len(rows) for _, rows in blocks)
    bottom = TOP + rows * ROW + len(blocks) * GAP
    size = run.parts[0].header.size
    scene = Scene(WIDTH, bottom + 84, f"Training step {step}, {size} ranks", "")
    said = _overlap(run.parts[: len(blocks)], window)
    if len(blocks) < size:
        said = f"ranks {', '.join(str(rank) for rank, _ in blocks)} · {said}"
    scene.about = f"{said}; every rank's program and below it when its buckets were reduced"
    scene.add(Text(16, 28, scene.title, 16, bold=True), Text(16, 48, said, 12, SOFT))
    scale = (WIDTH - LEFT - RIGHT) / _length(window)
    scene.add(*_axis(window, scale, bottom))
    y = TOP
    for rank, rows_of_rank in blocks:
        scene.add(Text(16, y + 11, f"rank {rank}", 12, bold=True))
        for row in rows_of_rank:
            scene.add(*_bars(row, window, scale, y))
            y += ROW
        y += GAP
    scene.add(*_legend(colours, bottom + 62))
    return scene


def _overlap(parts: Iterable[Part], window: Span) -> str:
    """How much of the buckets' time lay outside of the final waits, in this step."""
    on_their_way = blocked = 0.0
    for part in parts:
        on_their_way += union((o.launched, o.end) for o in _buckets(part, window))
        waits = (s for spans in part.final_waits.values() for s in spans)
        blocked += union(s for s in waits if _within(s, window))
    share = overlap_share(blocked, on_their_way)
    if share is None:
        return "no bucket was reduced"
    return (
        f"{share:.0%} of the time that gradients were on their way, the program went on computing"
    )


def _axis(window: Span, scale: float, bottom: float) -> Iterator[Mark]:
    unit, size = ("ms", 1e3) if _length(window) < 1e6 else ("s", 1e6)
    tick = _tick(_length(window) / size)
    for index in range(int(_length(window) / size / tick) + 1):
        x = LEFT + index * tick * size * scale
        yield Line(x, TOP - 8, x, bottom, SHADE if index else RULE, 1.2)
        yield Text(x, bottom + 14, f"{index * tick:g}", 11, SOFT, "middle")
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield Text(middle, bottom + 32, f"{unit} since the step began", 11, SOFT, "middle")


def _tick(length: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are four to ten of them."""
    power = 10.0 ** floor(log10(length / 4))
    return max(power * factor for factor in (1, 2, 5) if length / (power * factor) >= 4)


def _bars(row: _Row, window: Span, scale: float, y: float) -> Iterator[Mark]:
    name = row.name if len(row.name) <= LETTERS else row.name[: LETTERS - 1] + "…"
    yield Text(LEFT - 10, y + 11, name, 11, SOFT if row.name != "program" else INK, "end")
    for bar in row.bars:
        begin, end = max(bar.begin, window[0]), min(bar.end, window[1])
        x = LEFT + (begin - window[0]) * scale
        yield Box(x, y, max(1.0, (end - begin) * scale), BAR, bar.colour)


def _legend(colours: dict[str, str], y: float) -> Iterator[Mark]:
    named = colours or {"first gradient to last": BLUE}
    items = {
        **named,
        "waiting for gradients": ORANGE,
        "bucket launched": QUEUED,
        "being reduced": RED,
    }
    x = 16.0
    for name, colour in items.items():
        wide = 20 + text_width(name, 11)
        if x + wide > WIDTH - 16:
            x, y = 16.0, y + 18
        yield Box(x, y - 9, 14, 10, colour)
        yield Text(x + 20, y, name, 11, SOFT)
        x += wide + 12


def size_text(count: int) -> str:
    """As "1.5 MiB"."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"
