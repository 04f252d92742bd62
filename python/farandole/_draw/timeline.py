"""One training step out of a trace as a picture: every rank's program, its buckets below it.

Where a bucket lies below forward or backward, communication is hidden behind computation; where it
lies below the wait, the program stands still for it. Time in which a rank waits because another
one has not come yet bears the number of that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from farandole._draw import DrawError
from farandole._draw.bars import (
    GAP,
    ROW,
    WIDTH,
    Axis,
    Bar,
    Row,
    legend,
    lowest,
    rank_name,
    row_marks,
)
from farandole._draw.scene import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    SOFT,
    Scene,
    Text,
)
from farandole._draw.steps import Late, latest, typical_step, window_of, within
from farandole._trace.figures import overlap_share, union
from farandole._trace.parts import Operation, Part, Run, Span
from farandole._trace.waiting import Awaited, Waits, awaited, stood_still

TOP = 74.0
QUEUED = "#B8C2C7"
LATE = INK  # far from all others in lightness, so that it is seen first
LATE_NAMED = "waiting for the rank named in it"
KNOWN = {"forward": SKY, "backward": BLUE, "optimizer": GREEN}
OTHERS = (PURPLE, "#8C6BB1", "#7A8B3B", "#A6761D")  # spans that the program has named otherwise
RANKS, BUCKETS = 16, 12  # at most so many are drawn


@dataclass(frozen=True)
class _Picture:
    """All that a picture is made of."""

    step: int
    window: Span
    parts: Sequence[Part]  # that are shown
    colours: dict[str, str]  # of the program's spans
    waits: Waits
    still: dict[int, list[Awaited]]  # by rank: when its program stood because of another one
    late: Late | None


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
        step = typical_step(run.parts, count)
    if not 0 <= step < count:
        raise DrawError(f"step {step} is not one of the {count} steps in {run.directory}")
    window, waits = window_of(run.parts, step), awaited(run.parts)
    still = {part.header.rank: stood_still(part, waits, window) for part in run.parts}
    late = latest(still, window)
    shown = _shown(run.parts, late)
    return _scene(_Picture(step, window, shown, _colours(shown, window), waits, still, late))


def _shown(parts: Sequence[Part], late: Late | None) -> Sequence[Part]:
    """The first ranks, and the late one, which readers look for."""
    if late is None or late.rank in {part.header.rank for part in parts[:RANKS]}:
        return parts[:RANKS]
    return [*parts[: RANKS - 1], *(part for part in parts if part.header.rank == late.rank)]


def _colours(parts: Iterable[Part], window: Span) -> dict[str, str]:
    """A colour for every span of the program that is seen."""
    names = dict.fromkeys(
        name
        for part in parts
        for name, spans in part.spans.items()
        if any(within(span, window) for span in spans)
    )
    others = [name for name in names if name not in KNOWN]
    return {n: KNOWN.get(n) or OTHERS[others.index(n) % len(OTHERS)] for n in names}


def _rows(picture: _Picture, part: Part) -> Iterator[Row]:
    yield Row("program", list(_program(picture, part)))
    for operation in _buckets(part, picture.window)[:BUCKETS]:
        running = part.running.get((operation.stream, operation.sequence), [])
        bars = [Bar(operation.launched, operation.end, QUEUED)]
        bars += [Bar(*span, RED) for span in running]
        bars += [_late(wait) for wait in picture.waits.get(operation, ())]
        yield Row(f"{operation.name}, {size_text(operation.bytes)}", bars)


def _program(picture: _Picture, part: Part) -> Iterator[Bar]:
    named = [
        Bar(*span, picture.colours[name])
        for name, spans in part.spans.items()
        for span in sorted(spans)
        if name in picture.colours and within(span, picture.window)
    ]
    yield from named or [Bar(*part.steps[picture.step], BLUE)]
    waits = (span for spans in part.final_waits.values() for span in spans)
    yield from (Bar(*span, ORANGE) for span in waits if within(span, picture.window))
    yield from map(_late, picture.still[part.header.rank])


def _late(wait: Awaited) -> Bar:
    return Bar(wait.begin, wait.end, LATE, (f"rank {wait.rank}", str(wait.rank)))


def _buckets(part: Part, window: Span) -> list[Operation]:
    mine = (o for o in part.operations if o.stream in part.step_streams)
    found = [o for o in mine if window[0] <= o.launched and o.end <= window[1]]
    return sorted(found, key=lambda o: o.sequence)


def _scene(picture: _Picture) -> Scene:
    blocks = [(part.header.rank, list(_rows(picture, part))) for part in picture.parts]
    size = picture.parts[0].header.size
    said, late = _said(picture, size), picture.late
    top = TOP + 18 * (late is not None)
    bottom = top + sum(len(rows) for _, rows in blocks) * ROW + len(blocks) * GAP
    named = list(legend(_meanings(picture, blocks), bottom + 62))
    scene = Scene(WIDTH, lowest(named) + 22, f"Training step {picture.step}, {size} ranks", said)
    scene.about += "; every rank's program and below it when its buckets were reduced"
    scene.add(Text(16, 28, scene.title, 16, bold=True), Text(16, 48, said, 12, SOFT))
    if late is not None:
        words = _late_words(late, size)
        scene.about = f"{words}; {scene.about}"
        scene.add(Text(16, 67, words, 12, INK, bold=True))
    axis, y = Axis(*picture.window), top
    scene.add(*axis.marks(top, bottom))
    for rank, rows in blocks:
        scene.add(*rank_name(rank, y, late is not None and rank == late.rank))
        for row in rows:
            scene.add(*row_marks(row, axis, y))
            y += ROW
        y += GAP
    scene.add(*named)
    return scene


def _said(picture: _Picture, size: int) -> str:
    said = _overlap(picture.parts, picture.window)
    if len(picture.parts) < size:
        ranks = ", ".join(str(part.header.rank) for part in picture.parts)
        return f"ranks {ranks} · {said}"
    return said


def _late_words(late: Late, size: int) -> str:
    others = "the others" if size > 2 else "the other one"
    time = f"{late.cost / 1e3:.3g} ms, {late.share:.0%} of the step"
    return f"Rank {late.rank} came late: {others} stood still for it, up to {time}"


def _meanings(picture: _Picture, blocks: Iterable[tuple[int, list[Row]]]) -> dict[str, str]:
    """The meanings of the colours; that of waiting for a rank only if there is such a bar."""
    axis, awaited_ranks = Axis(*picture.window), set[str]()
    for _, rows in blocks:
        bars = (bar for row in rows for bar in row.bars if bar.words)
        awaited_ranks |= {bar.words[0] for bar in bars if axis.shows(bar)}
    late = f"waiting for {min(awaited_ranks)}" if len(awaited_ranks) == 1 else LATE_NAMED
    return {
        **(picture.colours or {"first gradient to last": BLUE}),
        **({late: LATE} if awaited_ranks else {}),
        "waiting for gradients": ORANGE,
        "bucket launched": QUEUED,
        "being reduced": RED,
    }


def _overlap(parts: Iterable[Part], window: Span) -> str:
    """How much of the buckets' time lay outside of the final waits: this step's buckets alone."""
    on_their_way = blocked = 0.0
    for part in parts:
        buckets = [(o.launched, o.end) for o in _buckets(part, window)]
        waits = [s for spans in part.final_waits.values() for s in spans if within(s, window)]
        on_their_way += union(buckets)
        blocked += union(buckets) + union(waits) - union(buckets + waits)  # both at a time
    share = overlap_share(blocked, on_their_way)
    if share is None:
        return "no bucket was reduced"
    return (
        f"{share:.0%} of the time that gradients were on their way, the program went on computing"
    )


def size_text(count: int) -> str:
    """As "1.5 MiB"."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"
