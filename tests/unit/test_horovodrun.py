"""farandole-horovodrun, and horovodrun's options of `farandole run`."""

from __future__ import annotations

import os
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from farandole import _core, cli
from farandole._launch import LaunchError
from farandole._launch.hosts import slots_here
from farandole.cli import horovodrun
from farandole.cli._horovod_flags import FLAGS, NEVER

SHOW = ["bash", "-c", 'echo "$RANK/$WORLD_SIZE $FARANDOLE_BUCKET_BYTES"']


def run(*words: str) -> int:
    return cli.main(["run", *words])


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# -- settings ---------------------------------------------------------------------------------

SETTINGS = [
    (["--fusion-threshold-mb", "32"], "FARANDOLE_BUCKET_BYTES", str(32 << 20)),
    (["--fusion-threshold-mb", "32"], "FARANDOLE_FUSION_BYTES", str(32 << 20)),
    (["--fusion-threshold-mb", "0.5"], "FARANDOLE_BUCKET_BYTES", str(1 << 19)),
    (["--start-timeout", "20"], "FARANDOLE_START_TIMEOUT", "20"),
    (["--cache-capacity", "2048"], "FARANDOLE_NAME_CACHE", "2048"),
    (["--cache-capacity", "0"], "FARANDOLE_NAME_CACHE", "0"),
    (["--stall-check-warning-time-seconds", "3.5"], "FARANDOLE_WARN_AFTER", "3.5"),
    (["--stall-check-shutdown-time-seconds", "7"], "FARANDOLE_TIMEOUT", "7"),
    (["--no-stall-check"], "FARANDOLE_WARN_AFTER", NEVER),
    (["--timeline-filename", "t.json"], "FARANDOLE_TIMELINE", "t.json"),
    (["--log-level", "TRACE"], "FARANDOLE_LOG", "debug"),
    (["--log-level", "fatal"], "FARANDOLE_LOG", "error"),
    (["--verbose"], "FARANDOLE_LOG", "info"),
    (["--network-interface", "eth1"], "FARANDOLE_IFACE", "eth1"),
    (["--network-interfaces", "eth1,eth2"], "FARANDOLE_IFACE", "eth1"),
    (["--iface", "eth1"], "FARANDOLE_IFACE", "eth1"),
]


@pytest.mark.parametrize(("words", "name", "value"), SETTINGS)
@pytest.mark.parametrize("main", [run, lambda *words: horovodrun.main(words)])
def test_an_option_becomes_a_setting(
    main: Any, words: list[str], name: str, value: str,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(name, "the option wins")
    assert main("-np", "1", *words, "printenv", name) == 0
    assert capfd.readouterr().out == f"[0] {value}\n"


def test_every_setting_that_an_option_makes_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {row["name"] for row in _core.settings()}
    assert {name for flag in FLAGS for name in flag.sets.split()} <= known
    for _, name, value in SETTINGS:
        monkeypatch.setenv(name, value)
        _core.settings()


def test_every_row_does_one_thing() -> None:
    for flag in FLAGS:
        assert sum(map(bool, (flag.sets, flag.ignored, flag.refused))) == 1, flag


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--fusion-threshold-mb", "much"],
            "--fusion-threshold-mb takes a number of MB, not 'much'",
        ),
        (["--cache-capacity", "1.5"], "--cache-capacity takes a whole number, not '1.5'"),
        (["--start-timeout", "-1"], "--start-timeout takes a number of seconds, not '-1'"),
        (["--log-level", "LOUD"], "--log-level takes one of TRACE, DEBUG, INFO"),
        (["-H-oProxyCommand=x:2"], "is no name of a host"),
        (["-H", "a;true:2"], "is no name of a host"),
        (["-H", "localhost:1,elsewhere:2"], "host localhost means another machine on each host"),
        (["-H", "a:1,b:1", "--launcher", "local", "-x", "NO_SUCH_NAME"], "-x NO_SUCH_NAME: it is"),
        (["--launcher", "local"], "name them with -H"),
        (["-H", "localhost:x"], "'localhost:x' is not 'name:slots'"),
        (["-H", "localhost:1"], "-np is 2, but this host has 1 slot"),
        (["--hostfile", "/no/such"], "--hostfile: /no/such: No such file"),
        (["--output-dir", "a", "--output-filename", "b"], "choose one"),
        (["--cycle-time-ms", "1"], "--cycle-time-ms"),
    ],
)
def test_mistakes(words: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("-np", "2", *words, "true") == 2
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert says in err


# -- hosts ------------------------------------------------------------------------------------


def test_slots_of_this_host(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    assert slots_here(None, None) is None
    assert slots_here("localhost", None) == 1
    assert slots_here(f"localhost:3,{socket.gethostname()}:2", None) == 5
    file.write_text("# a comment\n\nlocalhost slots=4  # four\n127.0.0.1\n")
    assert slots_here(None, file) == 5
    for text, says in [
        ("", "names no host"),
        ("localhost cores=4", "line 1: 'localhost cores=4' is not 'name slots=n'"),
        ("localhost slots=0", "at least 1 slot"),
        ("localhost slots=2\nelsewhere slots=2", "host elsewhere is not this one"),
    ]:
        file.write_text(text)
        with pytest.raises(LaunchError, match=says):
            slots_here(None, file)
    file.write_bytes("söme.example.com".encode("latin-1"))
    with pytest.raises(LaunchError, match="is not text in UTF-8"):
        slots_here(None, file)
    with pytest.raises(LaunchError, match="both given"):
        slots_here("localhost", file)


def test_without_np_all_slots_are_used(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("-H", "localhost:3", "--no-prefix", "--", *SHOW) == 0
    assert sorted(capfd.readouterr().out.split()) == ["0/3", "1/3", "2/3"]


# -- files ------------------------------------------------------------------------------------


def test_output_is_written_where_horovod_writes_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "echo out of $RANK; echo err of $RANK >&2"
    for ranks in (2, 11):
        for _ in range(2):  # and again: it is replaced
            words = ["-np", str(ranks), "--output-filename", str(tmp_path / "logs")]
            assert run(*words, "--", "bash", "-c", script) == 0
    capfd.readouterr()
    for rank in range(11):
        folder = tmp_path / "logs" / f"rank.{rank:02}"
        assert (folder / "stdout").read_text() == f"out of {rank}\n"
        assert (folder / "stderr").read_text() == f"err of {rank}\n"
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "out of 1\n"
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700


# -- the file of settings ---------------------------------------------------------------------

YAML = """
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10
  hierarchical_allreduce: false
stall_check:
  enabled: false
logging:
  level: INFO
"""


@pytest.fixture
def settings(tmp_path: Path) -> str:
    pytest.importorskip("yaml")
    (tmp_path / "config.yaml").write_text(YAML)
    return str(tmp_path / "config.yaml")


def printed(capfd: pytest.CaptureFixture[str], *words: str) -> list[str]:
    names = ["FARANDOLE_BUCKET_BYTES", "FARANDOLE_WARN_AFTER", "FARANDOLE_LOG"]
    assert run("-np", "1", "--no-prefix", *words, "--", "printenv", *names) == 0
    return capfd.readouterr().out.split()


def test_a_file_wins_over_options_before_it_and_not_over_those_after_it(
    settings: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file, option = ["--config-file", settings], ["--fusion-threshold-mb", "1"]
    assert printed(capfd, *file) == [str(32 << 20), NEVER, "info"]
    assert printed(capfd, *option, *file) == [str(32 << 20), NEVER, "info"]
    assert printed(capfd, *file, *option) == [str(1 << 20), NEVER, "info"]


def test_mistakes_in_the_file_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "config.yaml"
    for text, says in [
        ("params:\n  nonsense: 1", "'params.nonsense: 1' is not known"),
        ("params: [", "is not YAML"),
        ("params:\n  fusion_threshold_mb: much", "takes a number of MB, not 'much'"),
        ("just words", "is not known"),
    ]:
        file.write_text(text)
        assert run("-np", "1", "--config-file", str(file), "true") == 2
        assert says in capfd.readouterr().err
    assert run("-np", "1", "--config-file", str(tmp_path / "none"), "true") == 2
    assert "No such file" in capfd.readouterr().err


def test_without_pyyaml_the_file_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert run("-np", "1", "--config-file", str(tmp_path / "x"), "true") == 2
    assert "--config-file needs PyYAML" in capfd.readouterr().err


def test_a_pretended_yaml_reader_is_enough(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("whatever")
    content = {"params": {"fusion_threshold_mb": 2}, "stall_check": {"enabled": True}}
    pretended = types.SimpleNamespace(safe_load=lambda _: content, YAMLError=ValueError)
    monkeypatch.setitem(sys.modules, "yaml", pretended)
    assert run("-np", "1", "--config-file", str(tmp_path / "x"), "printenv", SETTINGS[0][1]) == 0
    assert capfd.readouterr().out == f"[0] {2 << 20}\n"


# -- farandole-horovodrun ---------------------------------------------------------------------


def test_every_option_of_horovodrun_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    words, ignored = [], []
    for flag in FLAGS:
        if flag.ignored:
            words += [flag.name, *("1" for _ in flag.takes.split())]
            ignored.append(f"{flag.name} ({flag.ignored})")
    assert horovodrun.main(["-np", "2", *words, *SHOW]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] 0/2 ", "[1] 1/2 "]
    assert err == f"farandole-horovodrun: ignored: {', '.join(ignored)}\n"


@pytest.mark.parametrize("name", [flag.name for flag in FLAGS if flag.refused])
def test_what_cannot_be_done_is_refused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    takes = next(flag.takes for flag in FLAGS if flag.name == name)
    assert horovodrun.main(["-np", "1", name, *takes.split(), "true"]) == 2
    assert f"{name} is not supported: " in capfd.readouterr().err


def test_horovod_is_farandole_without_being_asked(capfd: pytest.CaptureFixture[str]) -> None:
    script = "import horovod.common.util as u; print(u.__name__)"
    assert horovodrun.main(["-np", "1", sys.executable, "-c", script]) == 0
    assert capfd.readouterr().out == "[0] farandole.common.util\n"


def test_ranks_find_horovods_variables(capfd: pytest.CaptureFixture[str]) -> None:
    names = [f"HOROVOD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_SIZE")]
    assert horovodrun.main(["-np", "1", "printenv", *names]) == 0
    assert capfd.readouterr().out.split("[0] ")[1:] == ["0\n", "1\n", "0\n", "1\n", "1\n"]


def test_version_and_build(capfd: pytest.CaptureFixture[str]) -> None:
    assert horovodrun.main(["--version"]) == 0
    assert "with the names of Horovod 0.28.1" in capfd.readouterr().out
    assert horovodrun.main(["-cb"]) == 0
    out = capfd.readouterr().out
    assert "[ ] MPI" in out
    assert "[X] farandole" in out
    assert ("[X] PyTorch" in out) == (_torch_is_there())


def _torch_is_there() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "the command is missing: farandole-horovodrun -np 4"),
        (["true"], f"farandole-horovodrun -np {len(os.sched_getaffinity(0))} -- true"),
        (["-np", "1", "--nonsense", "true"], "unrecognized arguments: --nonsense"),
    ],
)
def test_mistakes_of_horovodrun(
    words: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert horovodrun.main(words) == 2
    assert says in capfd.readouterr().err
