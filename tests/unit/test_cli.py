"""The command line without ranks: help, mistakes, tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from farandole import cli
from farandole._launch.processes import descendants, read_process
from farandole._launch.ranks import describe_exit, shell_code
from farandole._plan_size import Shape
from farandole.cli import _terminal, info

CORES = len(os.sched_getaffinity(0))


# -- mistakes -----------------------------------------------------------------------------------

MISTAKES = [
    (["rnu"], 2, "did you mean 'run'?"),
    (["run"], 2, "the command is missing"),
    (["run", "-np", "2"], 2, "the command is missing"),
    (["run", "-np", "2", "--"], 2, "the command is missing"),
    (["run", "--", "true"], 2, f"farandole run -np {CORES} -- true"),
    (["run", "--", "echo", "a b"], 2, f"farandole run -np {CORES} -- echo 'a b'"),
    (["run", "-np", "0", "true"], 2, "-np must be at least 1, not 0"),
    (["run", "-np", "-3", "true"], 2, "-np must be at least 1, not -3"),
    (["run", "-np", "many", "true"], 2, "not 'many'"),
    (["run", "-np", "1" + 20 * "0", "true"], 2, "Linux has at most 4194304 processes"),
    (["run", "-np", "1", "--bogus", "true"], 2, "--bogus"),
    (["run", "-np", "1", "--grace", "-1", "true"], 2, "--grace takes a number of seconds"),
    (["run", "-np", "1", "--patience", "nan", "true"], 2, "--patience takes a number of seconds"),
    (["run", "-np", "1", "no-such-command"], 127, "command not found"),
    (["run", "-np", "1", "/no/such/command"], 127, "command not found"),
    (["run", "-np", "1", "/"], 126, "is a directory"),
    (["info", "--bogus"], 2, "--bogus"),
    (["plan"], 2, "required"),
    # A plan that would take for ever is refused at once.
    (["plan", "all_reduce", "--ranks", "100000"], 2, "elements may be at most 10,000,000"),
    (["plan", "all_to_all", "--ranks", "1000"], 2, "elements (or 512) may be at most 5,000,000"),
    (["plan", "all_reduce", "--ranks", f"1{'0' * 25}"], 2, "at most 2147483647"),
    (["plan", "all_reduce", "--count", f"1{'0' * 18}"], 2, "at most 2147483647"),
    (["plan", "all_reduce", "--count", "10000000"], 2, "elements may be at most 10,000,000"),
    (["plan", "gather", "--ranks", "2", "--counts", f"1,1{'0' * 30}"], 2, "at most 2147483647"),
    (["plan", "all_reduce", "--lanes", f"1{'0' * 12}"], 2, "at most 2147483647"),
    (["plan", "all_reduce", "--lanes", f"1{'0' * 9}"], 2, "at most 40,000 are shown"),
    (
        ["plan", "all_reduce", "--algorithm", "ring", "--ranks", "400"],
        2,
        "at most 40,000 are shown",
    ),
    (["plan", "barrier", "--ranks", f"1{'0' * 9}"], 2, "are too many"),
    (["plan", "broadcast", "--root", f"1{'0' * 25}"], 2, "is not one of 4 ranks"),
    (["plan", "all_reduce", "--ranks", "100000", "--draw", "x.svg"], 2, "are too many"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), MISTAKES)
def test_a_mistake_is_one_clear_line(
    arguments: list[str], code: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("farandole")
    assert words in err


def test_a_script_without_permission_gets_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert cli.main(["run", "-np", "1", "train.py"]) == 126
    assert "perhaps: python train.py" in capfd.readouterr().err
    (tmp_path / "job").touch(mode=0o755)
    assert cli.main(["run", "-np", "1", "job"]) == 127
    assert "perhaps: ./job" in capfd.readouterr().err


def test_a_command_the_kernel_refuses_gives_126(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job").write_bytes(b"\x7fELF of no use")
    (tmp_path / "job").chmod(0o755)
    assert cli.main(["run", "-np", "1", str(tmp_path / "job")]) == 126
    assert "rank 0 could not be started" in capfd.readouterr().err


# -- help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_help_is_shown_where_the_terminal_lacks_its_letters(encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "farandole", "run", "--help"],
        env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "COMMAND [ARGUMENT \\u2026]" in done.stdout


@pytest.mark.parametrize(
    ("where", "code", "said"), [(">/dev/full", 1, "No space left"), (">&-", 0, "")]
)
def test_a_stdout_that_takes_nothing(where: str, code: int, said: str) -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m farandole info {where}',
        shell=True, stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == code
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == (1 if said else 0), done.stderr


def test_the_overview_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb, summary in cli.VERBS.items():
        assert verb in shown
        assert summary in shown
    assert cli.main([]) == 2
    assert cli.main(["help", "plan"]) == 0
    assert "usage: farandole plan" in capsys.readouterr().out
    for word in ("version", "--version", "-v", "-V"):
        assert cli.main([word]) == 0
        assert capsys.readouterr().out == f"farandole {info.version()}\n"


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself_with_examples(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: farandole {verb}" in shown
    assert f"examples:\n  farandole {verb}" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_run_imports_nothing_but_the_standard_library() -> None:
    script = """
import sys, farandole
before = set(sys.modules)
import farandole.cli.run, farandole._launch
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - sys.stdlib_module_names - {"farandole"}))
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == ""


# -- info and plan ------------------------------------------------------------------------------


def test_info_as_json_holds_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["machine"]["usable cores"] == CORES
    assert facts["installation"]["farandole"] == info.version()
    there = {"torch", "keras", "jax", "mpi4py"} & {each.name for each in metadata.distributions()}
    shown = {each.partition(" ")[0] for each in facts["installation"]["frameworks"]}
    assert shown - {"tensorflow", "tensorflow-cpu"} == there
    assert facts["kernel"]["memfd_create"].startswith(("yes", "no: "))
    assert isinstance(facts["settings"], list)


def test_info_says_what_is_wrong_with_the_native_core() -> None:
    script = "import sys; sys.modules['farandole._core'] = None\n"
    script += "from farandole.cli import main; sys.exit(main(['info']))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert "installation native core: cannot be loaded: " in done.stdout
    assert "kernel memfd_create: " in done.stdout


def test_info_shows_every_setting(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    setting = {
        "name": "FARANDOLE_X", "type": "int", "default": 1, "value": 2, "doc": "what it is",
        "horovod": "HOROVOD_X",
    }  # fmt: skip
    core = types.SimpleNamespace(
        settings=lambda: [setting, setting],
        instruction_sets=list,
        unread_variables=list,
        kernel_compiler=int,
    )
    monkeypatch.setattr(info, "_core", lambda: (core, ""))
    assert info.collect()["settings"] == [setting, setting]
    assert cli.main(["info"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines.count("FARANDOLE_X: 2 (int, default 1): what it is") == 2


PARTS = {"machine": {"usable cores": "2", "processor": "a long name " * 8}}
SETTING = {"name": "FARANDOLE_X", "type": "int", "default": "1", "value": "2", "doc": "word " * 40}


def test_facts_in_a_pipe_are_a_line_each() -> None:
    lines = list(info.lines_of(PARTS, [SETTING], 0))
    assert len(lines) == 3
    assert lines[0] == "machine usable cores: 2"
    assert lines[2].startswith("FARANDOLE_X: 2 (int, default 1): word word ")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_facts_on_a_terminal_fit_it(width: int) -> None:
    lines = list(info.lines_of(PARTS, [SETTING], width))
    assert max(map(len, lines)) <= width
    assert " ".join(lines).split().count("word") == 40
    assert "  FARANDOLE_X = 2  (default 1)" in lines


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["bench", "all_reduce", "-np", "2", "--algoritm", "ring"], "--algorithm"),
        (["run", "--al-output", "-np", "2", "true"], "--all-output"),
        (["info", "--jsn"], "--json"),
        (["tune", "--dry-rnu"], "--dry-run"),
        (["trace", "--drw", "x", "y"], "--draw"),
        (["plan", "all_reduce", "--rank-s", "3"], "--ranks"),
        (["bench", "all_redcue", "-np", "2"], "all_reduce"),
        (["plan", "all_redcue"], "all_reduce"),
        (["plan", "all_reduce", "--algorithm", "bionmial"], "binomial"),
        (["bench", "all_reduce", "-np", "2", "--dtype", "flot32"], "float32"),
        (["bench", "all_reduce", "-np", "2", "--op", "summ"], "sum"),
        (["bench", "all_reduce", "-np", "2", "--level", "canonicle"], "canonical"),
        (["bench", "all_reduce", "-np", "2", "--compare", "glo"], "gloo"),
        (["info", "--why", "4M", "--collective", "all_redcue"], "all_reduce"),
        (["completion", "bahs"], "bash"),
    ],
)
def test_the_nearest_name_is_suggested(
    arguments: list[str], meant: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert f"; did you mean {meant}?" in err.replace("'", "")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--np", "here that is -np"),
        ("--nproc_per_node=4", "here that is -np"),
        ("--nodelist", "here that is -H"),
        ("--max-restarts=3", "here that is --restarts"),
        ("--bind-to", "here that is --bind"),
        ("--cpus-per-task", "set OMP_NUM_THREADS instead"),
    ],
)
def test_options_of_other_launchers_are_answered_with_ours(
    option: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", option, "4", "--", "true"]) == 2
    whole = f"farandole run: unrecognized arguments: {option}; {said} (see: farandole run --help)\n"
    assert capfd.readouterr().err == whole


def test_plan_hands_its_arguments_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def render(shape: Shape, *, rank: int | None) -> str:
        seen.update(vars(shape), rank=rank)
        if shape.ranks < 1:
            raise ValueError("ranks must be at least 1\n  evidence: …")
        return "the plan"

    plan: Any = types.SimpleNamespace(render=render, Shape=Shape)
    monkeypatch.setitem(sys.modules, "farandole._plan", plan)
    asked = ["plan", "gather", "--algorithm", "direct", "--ranks", "3", "--count", "7"]
    assert cli.main([*asked, "--counts", "3,0,5"]) == 0
    assert capsys.readouterr().out == "the plan\n"
    assert seen == {
        "collective": "gather",
        "algorithm": "direct",
        "ranks": 3,
        "count": 7,
        "counts": (3, 0, 5),
        "lanes": 1,
        "segments": 1,
        "root": 0,
        "rank": None,
        "host_of": (),
    }
    assert cli.main(["plan", "all_reduce", "--ranks", "3", "--hosts", "2,1"]) == 0
    assert seen["host_of"] == [0, 0, 1]
    assert capsys.readouterr().out == "the plan\n"
    assert cli.main(["plan", "all_reduce", "--ranks", "4", "--hosts", "2,1"]) == 2
    assert "2,1 does not divide 4 ranks" in capsys.readouterr().err
    assert cli.main(["plan", "all_reduce", "--ranks", "0"]) == 2
    assert capsys.readouterr().err == "farandole plan: ranks must be at least 1\n"
    assert cli.main(["plan", "gather", "--counts", "3,x"]) == 2
    assert "'3,x' is not a list of numbers, such as 3,0,5" in capsys.readouterr().err


def test_a_plain_table_is_aligned() -> None:
    text = _terminal.plain_table("title", ("a", "long"), [("xyz", "1"), ("", "22")])
    assert text == "title\n\na    long\n---  ----\nxyz  1\n     22\n"


# -- processes ----------------------------------------------------------------------------------


def test_descendants_are_found_with_any_name(tmp_path: Path) -> None:
    awkward = tmp_path / "a) R (b"
    awkward.symlink_to("/bin/sleep")
    with subprocess.Popen([awkward, "1000"]) as child:
        try:
            found = {process.pid: process for process in descendants(os.getpid())}
            assert found[child.pid] == read_process(child.pid)
            assert found[child.pid].parent == os.getpid()
        finally:
            child.kill()


def test_ends_are_described_and_coded_as_a_shell_does() -> None:
    assert (describe_exit(3), shell_code(3)) == ("exited with code 3", 3)
    assert (describe_exit(-9), shell_code(-9)) == ("was killed by SIGKILL", 137)
    assert describe_exit(-62) == "was killed by signal 62"
