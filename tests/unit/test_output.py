"""How the lines of many ranks are put together on one screen, and which progress bars are shown."""

from __future__ import annotations

import os
import pty
from collections.abc import Iterator

import pytest

from farandole._launch import bars
from farandole._launch.output import Stream
from farandole._launch.screen import Screen


class Shown:
    """A screen that is a pipe, and what was printed on it."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.screen = Screen(self.writer)

    def stream(self, prefix: bytes, *, quiet: bool = False) -> Stream:
        return Stream(os.open(os.devnull, os.O_RDONLY), prefix, self.screen, quiet=quiet)

    def text(self) -> bytes:
        self.screen.put(b"#")  # so that there is always something to read
        self.screen.flush()
        return os.read(self.reader, 1 << 16)[:-1]


@pytest.fixture
def shown() -> Iterator[Shown]:
    result = Shown()
    yield result
    os.close(result.reader)
    os.close(result.writer)


def test_parts_become_lines(shown: Shown) -> None:
    a, b = shown.stream(b"[0] "), shown.stream(b"[1] ")
    a.feed(b"one\ntw", 0.0)
    b.feed(b"x\r\n\ny", 0.0)
    a.feed(b"o\n", 0.0)
    b.feed(b"\n", 0.0)
    assert shown.text() == b"[0] one\n[1] x\n[1] \n[0] two\n[1] y\n"


def test_an_open_line_goes_on_or_is_ended_by_another(shown: Shown) -> None:
    a, b = shown.stream(b"[0] "), shown.stream(b"[1] ")
    a.feed(b"wait", 0.0)
    assert a.due() is not None
    a.show_part(1.0)
    assert a.due() is None
    a.feed(b"ing\n", 1.0)
    a.feed(b"more", 2.0)
    a.show_part(3.0)
    b.feed(b"me\n", 3.0)
    a.feed(b" of it\n", 3.0)
    assert shown.text() == b"[0] waiting\n[0] more\n[1] me\n[0]  of it\n"


def test_only_the_newest_state_of_a_progress_bar_is_shown(shown: Shown) -> None:
    a = shown.stream(b"[0] ")
    for percent in range(0, 101, 10):
        a.feed(b"\r%3d%%" % percent, percent / 1000)
    a.feed(b"\n", 0.2)
    assert shown.text() == b"[0] 100%\n"


def test_a_progress_bar_in_a_file_is_shown_now_and_then(shown: Shown) -> None:
    a = shown.stream(b"[0] ")
    now = 0.0
    for percent in range(100):
        now = percent / 10
        a.feed(b"%d%%\r" % percent, now)
        due = a.due()
        assert due is not None
        if due <= now:
            a.show_part(now)
    assert shown.text() == b"[0] 50%"
    a.close()
    assert shown.text() == b"\n[0] 99%\n"


def test_a_screen_without_reader_swallows(shown: Shown) -> None:
    os.close(shown.reader)
    a = shown.stream(b"")
    a.feed(b"gone\n", 0.0)
    shown.screen.flush()
    assert shown.screen.gone
    assert a.unwanted
    shown.reader = os.open(os.devnull, os.O_RDONLY)


# -- bars -----------------------------------------------------------------------------------------

# As the two write them: a return before each state, and backspaces over the state before it.
TQDM = [b"\r  0%|     | 0/2", b"\r 50%|##   | 1/2", b"\r100%|#####| 2/2", b"\n"]
KERAS = [
    b"\r\x1b[1m1/2\x1b[0m \x1b[37m-\x1b[0m loss: 0.50",
    b"\b" * 15 + b"\r\x1b[1m2/2\x1b[0m \x1b[37m-\x1b[0m loss: 0.25",
    b"\b" * 15 + b"\r\x1b[1m2/2\x1b[0m \x1b[37m-\x1b[0m loss: 0.20 - val_loss: 0.40",
    b"\n",
]
BACKSPACES = [b"step 1", b"\b1", b"\b2", b"\b3", b"\n"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain", b"plain"),
        (b"plain\r", b"plain"),
        (b"\r 10%\r 20%", b" 20%"),
        (b" 10%\b\b\b\b 20%", b" 20%"),
        (b"12345\b\b67", b"12367"),
        (b"1\b\b\b2", b"2"),
        ("━━\b\b╸".encode(), "╸━".encode()),
        (b"\x1b[1m1\x1b[0m/2\b\b\b\x1b[1m2", b"\x1b[1m2\x1b[0m/2"),
    ],
)
def test_a_redrawn_line_is_what_a_terminal_shows(line: bytes, shown: bytes) -> None:
    assert bars.newest(line) == shown


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"123", b"123"),
        (b"1234", b"123"),
        ("━━━━".encode(), "━━━".encode()),
        (b"\x1b[1m1\x1b[0m23", b"\x1b[1m1\x1b[0m23"),
        (b"\x1b[1m1\x1b[0m234", b"\x1b[1m1\x1b[0m23\x1b[0m"),
    ],
)
def test_a_line_is_cut_to_columns_and_not_to_bytes(line: bytes, shown: bytes) -> None:
    assert bars.fitted(line, 3) == shown


@pytest.mark.parametrize("bar", [TQDM, KERAS, BACKSPACES])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_quiet_stream_shows_its_lines_and_no_bar(
    shown: Shown, bar: list[bytes], at_once: bool
) -> None:
    a = shown.stream(b"[1] ", quiet=True)
    now = 0.0
    a.feed(b"Epoch 1/2\n", now)
    for piece in [b"".join(bar)] if at_once else bar:
        a.feed(piece, now)
        now += 0.3
        due = a.due()
        if due is not None and due <= now:
            a.show_part(now)
    a.feed(b"Epoch 2/2\n", now)
    assert shown.text() == b"[1] Epoch 1/2\n[1] Epoch 2/2\n"
    a.show_hidden_bar()
    assert shown.text() == b"[1] " + bars.newest(b"".join(bar[:-1])) + b"\n"
    a.show_hidden_bar()
    assert shown.text() == b""


def test_a_hidden_bar_that_was_never_ended_can_be_shown(shown: Shown) -> None:
    a = shown.stream(b"[1] ", quiet=True)
    for piece in TQDM[:2]:
        a.feed(piece, 0.0)
        assert a.due() is None
    a.close()
    assert shown.text() == b""
    a.show_hidden_bar()
    assert shown.text() == b"[1]  50%|##   | 1/2\n"


def test_a_quiet_stream_keeps_no_words_behind_a_bar(shown: Shown) -> None:
    a = shown.stream(b"[1] ", quiet=True)
    a.feed(b"\r 50%|##   | 1/2", 0.0)
    a.feed(b"Traceback (most recent call last):\n  File 1\n", 0.0)
    assert shown.text() == b"[1]  50%|##   | 1/2Traceback (most recent call last):\n[1]   File 1\n"
    a.feed(b"\r 50%|##   | 1/2", 0.0)
    a.feed(b"\r                \r", 0.0)  # as tqdm.write() does before it writes
    a.feed(b"a word\n\r 50%|##   | 1/2", 0.0)
    a.feed(b"\r100%|#####| 2/2\nthe end\r\n\n", 0.0)
    assert shown.text() == b"[1] a word\n[1] the end\n[1] \n"


def test_a_quiet_bar_costs_no_memory(shown: Shown) -> None:
    a = shown.stream(b"[1] ", quiet=True)
    for number in range(100_000):
        a.feed(b"\r%5d of 100000" % number, 0.0)
    assert len(a._part) < 100
    a.close()
    a.show_hidden_bar()
    assert shown.text() == b"[1] 99999 of 100000\n"


def test_without_prefix_nothing_is_kept_quiet(shown: Shown) -> None:
    a = shown.stream(b"", quiet=True)
    text = b"".join(TQDM + KERAS)
    a.feed(text, 0.0)
    assert shown.text() == text


def test_a_bar_of_backspaces_goes_on_where_it_was_shown(shown: Shown) -> None:
    a = shown.stream(b"[0] ")
    for at, piece in enumerate([b"step 1\b", b"2\b", b"3\b"]):
        a.feed(piece, 6.0 * at)
        a.show_part(6.0 * at)
    a.feed(b"4\n", 20.0)
    assert shown.text() == b"[0] step 1\n[0] step 2\n[0] step 3\n[0] step 4\n"


class Terminal(Shown):
    """A screen that is a terminal."""

    def __init__(self) -> None:
        self.reader, self.writer = pty.openpty()
        self.screen = Screen(self.writer)

    def text(self) -> bytes:
        return super().text().replace(b"\r\n", b"\n").replace(b"\r\x1b[K", b"<")


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    result = Terminal()
    yield result
    os.close(result.reader)
    os.close(result.writer)


def test_others_write_above_a_bar_on_a_terminal(terminal: Terminal) -> None:
    a, b = terminal.stream(b"[0] "), terminal.stream(b"[1] ", quiet=True)
    a.feed(b"\r 10%", 0.0)
    a.show_part(0.2)
    b.feed(b"one\ntwo\n", 0.2)
    terminal.screen.say("ours")
    a.feed(b"\r 20%", 0.3)
    a.show_part(0.4)
    a.feed(b"\n", 0.5)
    b.feed(b"three\n", 0.5)
    assert terminal.text() == (
        b"[0]  10%<[1] one\n[1] two\n[0]  10%<ours\n[0]  10%<[0]  20%<[0]  20%\n[1] three\n"
    )


def test_a_bar_is_no_wider_than_the_terminal_until_it_ends(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Screen, "columns", lambda _: 10)
    a = terminal.stream(b"[0] ")
    a.feed(b"\r123456789", 0.0)
    a.show_part(0.2)
    a.feed(b"\n", 0.3)
    assert terminal.text() == b"[0] 123456<[0] 123456789\n"
