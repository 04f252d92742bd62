"""The parts of `farandole run` over several hosts, one by one, and an agent that is led by hand."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from farandole._launch.agents import address, frames, secret
from farandole._launch.agents.carried import carried, named
from farandole._launch.agents.frames import Decoder, FrameError, Message
from farandole._launch.agents.inlets import Inlets
from farandole._launch.agents.order import Order, package, version
from farandole._launch.agents.reach import AGENT, address_of, advice_for, command_for
from farandole._launch.agents.remote import Remote
from farandole._launch.agents.silence import SILENCE, Next, Silence
from farandole._launch.display import labels
from farandole._launch.here import Here
from farandole._launch.hosts import hosts_of, is_everywhere, is_here, shared_out
from farandole._launch.job import LaunchError, Reach, Share
from farandole._launch.place import where_to_meet
from farandole._launch.polling import wait
from harness import LIMIT

# -- which hosts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["", "-oProxyCommand=x", "a b", "a;b", "$(id)", "a\nb", "a/b", "ä", "@a", "a@", "[a]"]
)
def test_a_host_is_a_name_and_nothing_else(host: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="is no name of a host"):
        hosts_of(f"{host}:2", None)
    file = tmp_path / "hosts"
    file.write_text(f"{host.replace(' ', ';')} slots=2\n".replace("a\nb", "a;b"))
    with pytest.raises(LaunchError):
        hosts_of(None, file)


def test_hosts_are_read_and_filled_in_order(tmp_path: Path) -> None:
    slots = hosts_of("a:2,me@b.example.com,[fd00::1]:3,a:1", None)
    assert slots == [("a", 3), ("me@b.example.com", 1), ("[fd00::1]", 3)]
    assert shared_out(4, slots) == [("a", 3), ("me@b.example.com", 1)]
    file = tmp_path / "hosts"
    file.write_text("a slots=2 # two\n\nb\n")
    assert hosts_of(None, file) == [("a", 2), ("b", 1)]


def test_this_host_is_known_by_its_names_and_addresses() -> None:
    own = address.of_interfaces()
    for host in ("localhost", "127.0.0.1", "[::1]", socket.gethostname(), *([own] if own else [])):
        assert is_here(host), host
    for host in ("elsewhere.example.com", "192.0.2.250", "me@localhost"):
        assert not is_here(host), host
    assert is_everywhere("localhost")
    assert is_everywhere("127.0.0.2")
    assert not is_everywhere(socket.gethostname())


# -- where they meet ----------------------------------------------------------------------------


def test_sshd_says_where_it_was_reached() -> None:
    assert address.seen_by_sshd({}) is None
    assert address.seen_by_sshd({"SSH_CONNECTION": "fe80::1%eth0 1 fe80::2%eth0 22"}) is None
    seen = address.seen_by_sshd({"SSH_CONNECTION": "10.0.0.1 40000 10.0.0.2 22"})
    assert seen == ("10.0.0.1", "10.0.0.2")


def test_an_interface_has_an_address_of_ours_which_is_not_the_loopbacks() -> None:
    assert address.of_interfaces("lo") == ""
    assert address.of_interfaces("nosuch0") == ""
    if found := address.of_interfaces():
        assert address.is_ours(found)
        assert not address.is_loopback(found)


def place(host_address: str, launchers: str = "") -> Here:
    found = Here(["true"], [1, 1], {}, host="a", address=host_address)
    found.launchers_address = launchers
    return found


def test_ranks_meet_at_an_address_of_the_first_host() -> None:
    mine = address.of_interfaces() or socket.gethostname()
    cases = [
        ([place("10.0.0.1"), place("10.0.0.2", "10.0.0.9")], "10.0.0.1"),
        # The first is this one: as the second sees it, if that is an address of ours.
        ([place(""), place("10.0.0.2", "127.0.0.3")], "127.0.0.3"),
        ([place(""), place("10.0.0.2", "198.51.100.1")], mine),
        ([place(""), place("10.0.0.2")], mine),
    ]
    for places, expected in cases:
        found = where_to_meet(places, "")
        assert (found.address, found.port) == (expected, places[0].port)


# -- how they are reached -----------------------------------------------------------------------


def test_an_agent_is_started_by_words() -> None:
    reach = Reach(python="/a b/python", ssh_port=2222, ssh_identity=Path("key"))
    assert command_for("me@b", reach, 29.5) == [
        "ssh", "-o", "BatchMode=yes", "-T", "-o", "ConnectTimeout=10", "-p", "2222", "-i", "key",
        "--", "me@b", shlex.join(["/a b/python", "-c", AGENT]),
    ]  # fmt: skip
    assert command_for("[fd00::1]", reach, 1)[-2] == "fd00::1"
    agent = ["-c", AGENT]
    assert command_for(socket.gethostname(), reach, 1) == [sys.executable, *agent]
    assert command_for("b", reach._replace(launcher="local"), 1) == ["/a b/python", *agent]
    found = command_for("b", reach._replace(launcher="netns"), 1)
    assert found == ["ip", "netns", "exec", "b", "/a b/python", *agent]


def test_advice_is_of_use() -> None:
    reach = Reach(python="/py", ssh_port=2222)
    netns = reach._replace(launcher="netns")
    for how, code, said, advice in [
        (reach, 255, "Warning: No such file", "try: ssh -o BatchMode=yes -p 2222 -- b true"),
        (reach, 127, "", "is /py the Python there?"),
        (reach, 1, "/py: Command not found.", "is /py the Python there?"),
        (reach, 1, "No module named farandole", "install the same farandole"),
        (reach, None, "", "does /py work there?"),
        (netns, 1, "Cannot open network namespace: No such file", "'ip netns list' shows"),
        (netns, 1, 'exec of "/py" failed: No such file', "is /py the Python there?"),
    ]:
        assert advice_for("b", how, code, said).startswith(advice)


def test_an_address_that_was_written_down_is_used() -> None:
    for host, found in [("me@10.0.0.1", "10.0.0.1"), ("[fd00::1]", "fd00::1"), ("b", "")]:
        assert address_of(host) == found


def test_which_variables_go_along() -> None:
    here = {"PATH": "/bin", "HOME": "/me", "TOKEN": "x", "FARANDOLE_LOG": "info", "WORD": "a=b"}
    assert carried(here) == {"PATH": "/bin", "FARANDOLE_LOG": "info"}
    assert named(["WORD", "OTHER=c=d", "EMPTY="], here) == {
        "WORD": "a=b", "OTHER": "c=d", "EMPTY": ""
    }  # fmt: skip
    for words, says in [
        ("MISSING", "not set here"),
        ("=x", "takes NAME"),
        ("RANK=3", "the launcher itself sets it"),
        ("FARANDOLE_SECRET_FILE=/x", "the launcher itself sets it"),
    ]:
        with pytest.raises(LaunchError, match=says):
            named([words], here)


# -- what is shown ------------------------------------------------------------------------------


def test_lines_name_the_host_in_short_where_that_tells_them_apart() -> None:
    assert labels(2, []) == ["0", "1"]
    assert labels(3, [Share("a.example.com", 2), Share("me@b.example.com", 1)]) == [
        "0 a", "1 a", "2 b"
    ]  # fmt: skip
    assert labels(2, [Share("a.x", 1), Share("a.y", 1)]) == ["0 a.x", "1 a.y"]
    assert labels(2, [Share("10.0.0.1", 1), Share("10.0.0.2", 1)])[1] == "1 10.0.0.2"


# -- what the two say ---------------------------------------------------------------------------


def test_frames_come_whole_however_they_are_cut() -> None:
    data = frames.message("died", rank=3, exit_code=-9) + frames.output(1, 0, b"x\n" * 1000)
    decoder = Decoder()
    found = [frame for i in range(len(data)) for frame in decoder.feed(data[i : i + 1])]
    assert found == [
        Message("died", {"rank": 3, "exit_code": -9}),
        Message("output", {"rank": 1, "which": 0}, b"x\n" * 1000),
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"Welcome to this host\n",
        b"\xff\xff\xff\xff\x00",
        b"\0\0\0\2\x00[]",
        b"\0\0\0\2\x00{}",
        b"\0\0\0\2\x01ab",
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        list(Decoder().feed(data))


def test_more_output_than_was_asked_for_is_refused() -> None:
    inlets = Inlets()
    ends = inlets.add(0)
    (whole,) = Decoder().feed(frames.output(0, 0, b"x" * frames.WINDOW))
    inlets.take(whole)
    with pytest.raises(FrameError, match="more output of rank 0"):
        inlets.take(whole._replace(data=b"x"))
    inlets.close()
    for end in ends:
        os.close(end)


def test_silence_is_the_agents_only_while_the_launcher_listens() -> None:
    silence = Silence(SILENCE)
    assert silence.look(100.0) is Next.ASK
    assert silence.look(100.5) is Next.NOTHING
    assert silence.look(101.5) is Next.ASK
    assert silence.look(110.0) is Next.ASK  # it is we who did not look
    for tenth in range(1, 10 * int(SILENCE)):
        assert silence.look(110.0 + tenth / 10) is not Next.GIVE_UP
    assert silence.look(110.1 + SILENCE) is Next.GIVE_UP


def test_a_secret_can_be_read_by_its_user_alone_and_is_removed() -> None:
    name = f"farandole-test-{os.urandom(8).hex()}"
    file = secret.SecretFile(name, secret.new_secret())
    assert [path.stat().st_mode & 0o777 for path in (file.path, file.path.parent)] == [0o600, 0o700]
    assert len(bytes.fromhex(file.path.read_text())) == 32
    with pytest.raises(FileExistsError):
        secret.SecretFile(name, "")
    file.remove()
    assert not file.path.parent.exists()


# -- the launcher's end -------------------------------------------------------------------------

LIAR = """
import json, sys, zlib
length = int.from_bytes(sys.stdin.buffer.read(4), "big")
order = json.loads(sys.stdin.buffer.read(1 + length)[1:])
noise, said = [zlib.decompress(bytes.fromhex(word)) for word in sys.argv[1:]]
sys.stdout.buffer.write(noise + order["marker"].encode() + said)
sys.stdout.buffer.flush()
sys.stdin.buffer.read()
"""
READY = frames.message("ready", address="10.0.0.1", port=5, launchers_address="", threads=None)
STARTED = frames.message("started", pids=[8, 9])


def start(order: Order, said: bytes, noise: bytes = b"") -> Remote:
    """The launcher's end of an agent that says just this."""
    words = [zlib.compress(data).hex() for data in (noise, said)]
    remote = Remote(order, [sys.executable, "-S", "-c", LIAR, *words], lambda *_: "some advice")
    remote.open(LIMIT)
    return remote


def turn(remote: Remote, deadline: float) -> None:
    assert time.monotonic() < deadline
    remote.turn(wait(remote.descriptors(), deadline), time.monotonic())


def led(order: Order, said: bytes, noise: bytes = b"") -> tuple[Remote, list[str]]:
    """The same, once it was heard; and the remarks that it made."""
    remote = start(order, said, noise)
    deadline = time.monotonic() + LIMIT
    remarks: list[str] = []
    while not remote.trouble and "last" not in remarks:
        turn(remote, deadline)
        remarks += remote.remarks()
    end(remote)
    return remote, remarks


def end(remote: Remote) -> None:
    remote.leave()
    remote.close(time.monotonic() + LIMIT)
    for _, pipes in remote.new_ranks():
        for fd in pipes:
            os.close(fd)


def test_what_an_agent_said_last_is_not_lost_where_the_reader_is_slow(order: Order) -> None:
    """More than a pipe holds, and the agent has nothing more to say."""
    text = b"".join(frames.output(1, 0, b"x" * frames.PIECE) for _ in range(6))
    ends = b"".join(frames.output(rank, which, b"") for rank in (1, 2) for which in (0, 1))
    left = frames.message("left", out_of_memory=False)
    remote = start(order, READY + STARTED + text + ends + left + frames.message("dry"))
    deadline = time.monotonic() + LIMIT
    while not remote.finished:
        turn(remote, deadline)
    taken = 0
    (_, pipes), (_, others) = remote.new_ranks()
    while not remote.dry:
        taken += len(os.read(pipes[0], 1 << 14))
        turn(remote, deadline)
    os.set_blocking(pipes[0], False)
    with suppress(BlockingIOError):
        while data := os.read(pipes[0], 1 << 16):
            taken += len(data)
    end(remote)
    for fd in (*pipes, *others):
        os.close(fd)
    assert taken == 6 * frames.PIECE


def test_an_agent_is_heard_behind_what_shells_print(order: Order) -> None:
    last = frames.message("remark", text="last")
    died = frames.message("died", rank=2, exit_code=-9)
    remote, remarks = led(order, READY + STARTED + died + last, b"Welcome!\n" * 100)
    assert (remote.address, remote.port, remarks) == ("10.0.0.1", 5, ["last"])
    assert [(rank.number, rank.pid, rank.exit_code) for rank in remote.ranks] == [
        (1, 8, None), (2, 9, -9)
    ]  # fmt: skip
    assert remote.ranks[1].describe_end() == "rank 2 (pid 9 on b) was killed by SIGKILL"


def test_what_an_agent_says_moves_no_cursor(order: Order) -> None:
    bell = frames.message("remark", text="\x1b[2J\a")
    _, remarks = led(order, READY + bell + frames.message("remark", text="last"))
    assert remarks == [r"\x1b[2J\x07", "last"]


@pytest.mark.parametrize(
    "said",
    [
        b"no frame at all",
        frames.message("started", pids=[8]),
        STARTED + frames.message("died", rank=99, exit_code=1),
        STARTED + frames.message("died", rank=0, exit_code=1),
        STARTED + frames.message("died", rank=1, exit_code=1000),
        STARTED + frames.output(5, 0, b"x"),
        STARTED + frames.message("output", b"x", rank=[], which={}),
        STARTED + frames.message("parcel", b"x", name=1),
        STARTED + frames.output(1, 0, b"x" * (frames.WINDOW + 1)),
        frames.message("started"),
        frames.message("please", run="rm"),
    ],
)
def test_what_no_agent_says_is_the_end_of_it(order: Order, said: bytes) -> None:
    remote, _ = led(order, READY + said)
    assert remote.trouble.startswith("host b: its agent said what no agent says: ")
    assert all(rank.lost for rank in remote.ranks)


# -- an agent -----------------------------------------------------------------------------------

RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked to end\\n"))
os.write(1, b"up\\n")
while True: time.sleep(0.01)
"""


PROGRAM = ("-m", "farandole._launch.agents")
IMPATIENT = """
import sys
import tempfile
from farandole._launch.agents import silence
silence.SILENCE_OF_LAUNCHER = 3.0
from farandole._launch.agents.__main__ import main
sys.exit(main())
"""


class Agent:
    """Led by the test instead of a launcher."""

    def __init__(self, order: Order, program: Sequence[str] = PROGRAM) -> None:
        self.order = order
        words = [sys.executable, *program]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe)
        self._decoder = Decoder()
        self._write(order.frame())
        assert self._read_exactly(len(order.marker)) == order.marker.encode()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with self.process:  # closes its pipes
            pass

    def tell(self, kind: str, **content: Any) -> None:
        self._write(frames.message(kind, **content))

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def hear(self, *kinds: str) -> Message:
        """The next of these; others are left out."""
        return next(frame for frame in self.frames() if frame.kind in kinds)

    def hear_output(self, line: bytes) -> None:
        heard = b""
        for frame in self.frames():
            heard += frame.data
            if line in heard:
                return

    def frames(self) -> Iterator[Message]:
        assert self.process.stdout is not None
        deadline = time.monotonic() + LIMIT
        while select.select([self.process.stdout], [], [], deadline - time.monotonic())[0]:
            data = os.read(self.process.stdout.fileno(), 1)
            assert data, "the agent ended"
            yield from self._decoder.feed(data)
        pytest.fail("the agent said nothing")

    def _read_exactly(self, count: int) -> bytes:
        assert self.process.stdout is not None
        return b"".join(os.read(self.process.stdout.fileno(), 1) for _ in range(count))


@pytest.fixture
def order() -> Order:
    return Order(
        version=version(),
        package=package(),
        marker=os.urandom(16).hex(),
        launcher="local",
        host="b",
        number=1,
        counts=[1, 2],
        command=[sys.executable, "-S", "-c", RANK],
        directory=str(Path.cwd()),
        environment={"OMP_NUM_THREADS": "1"},
        secret=secret.new_secret(),
        patience=0.5,
        binding="none",
    )


def lead(agent: Agent) -> list[int]:
    """Up to where its ranks run; returns them."""
    ready = agent.hear("ready", "refused")
    assert ready.kind == "ready", ready
    assert ready.content["threads"] is None
    agent.tell("start", address=ready.content["address"], port=1, run_id=os.urandom(8).hex())
    pids = agent.hear("started").content["pids"]
    assert len(pids) == 2
    agent.hear_output(b"up\n")
    return pids


def assert_gone(agent: Agent, pids: list[int]) -> None:
    assert agent.process.wait(LIMIT) == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not Path(tempfile.gettempdir(), agent.order.secret_name).exists()


def test_an_agent_ends_its_ranks_when_its_stdin_ends(order: Order) -> None:
    with Agent(order) as agent:
        pids = lead(agent)
        assert agent.process.stdin is not None
        agent.process.stdin.close()
        assert_gone(agent, pids)


def test_an_agent_ends_its_ranks_when_it_is_told_to_end_itself(order: Order) -> None:
    with Agent(order) as agent:
        pids = lead(agent)
        agent.process.send_signal(signal.SIGTERM)
        assert_gone(agent, pids)


def test_an_agent_ends_its_ranks_when_the_launcher_is_silent(order: Order) -> None:
    """As where its host has vanished; the pipes stay open."""
    with Agent(order, ["-c", IMPATIENT]) as agent:
        agent.tell("start", address="10.0.0.1", port=1, run_id=os.urandom(8).hex())
        assert_gone(agent, agent.hear("started").content["pids"])


def test_an_agent_tells_how_ranks_end(order: Order) -> None:
    with Agent(order) as agent:
        pids = lead(agent)
        os.kill(pids[0], signal.SIGKILL)
        assert agent.hear("died").content == {"rank": 1, "exit_code": -9}
        agent.tell("ping")
        assert agent.hear("pong").content == {"orphans": False, "ranks": []}
        agent.tell("end", number=int(signal.SIGKILL))
        assert agent.hear("died").content == {"rank": 2, "exit_code": -9}
        agent.tell("finish", at_once=True)
        assert agent.hear("left").content == {"out_of_memory": False}
        agent.hear("dry")
        assert_gone(agent, pids)


@pytest.mark.parametrize(
    ("change", "says", "code"),
    [
        ({"version": "0.0.1"}, "farandole is .* there and 0.0.1 here", 2),
        ({"directory": "/no/such/place"}, "/no/such/place cannot be entered there: No such", 2),
        ({"command": ["no-such-command"]}, "no-such-command: command not found", 127),
    ],
)
def test_an_agent_refuses_what_it_cannot_do(
    order: Order, change: dict[str, Any], says: str, code: int
) -> None:
    with Agent(order._replace(**change)) as agent:
        refused = agent.hear("refused").content
        assert re.search(says, refused["why"])
        assert refused["exit_code"] == code
        assert agent.process.wait(LIMIT) == code
        assert not Path(tempfile.gettempdir(), order.secret_name).exists()


@pytest.mark.parametrize("said", [b"", b"hello agent, how are you?\n"])
def test_an_agent_that_nobody_gives_an_order_says_so(said: bytes) -> None:
    words = [sys.executable, "-m", "farandole._launch.agents"]
    done = subprocess.run(words, input=said, capture_output=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"farandole agent: ")
