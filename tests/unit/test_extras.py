"""Extras: completion, frameworks and pictures, and the message if one is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farandole import cli

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p farandole | sed 's/.*-F \\([^ ]*\\) .*/\\1/') farandole "${@: -1}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["be"], {"bench"}),
        (["bench", "all_r"], {"all_reduce"}),
        (["bench", "--algo"], {"--algorithm"}),
        (["bench", "--level", "f"], {"fast"}),
        (["run", "--all-"], {"--all-output"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes(typed: list[str], offered: set[str], tmp_path: Path) -> None:
    pytest.importorskip("shtab", reason="completion needs shtab")
    script = tmp_path / "farandole.bash"
    command = [sys.executable, "-m", "farandole", "completion", "bash"]
    script.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    done = subprocess.run(
        ["bash", "-c", ASK, "ask", str(script), "farandole", *typed],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert offered <= set(done.stdout.split()), done.stdout + done.stderr
    assert typed[-1] == "" or all(word.startswith(typed[-1]) for word in done.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="completion needs shtab")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(verb in script for verb in cli.VERBS)
    assert "patience" in script


MISSING = """
import importlib, sys
module, ours = sys.argv[1:]
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=module)
sys.meta_path.insert(0, Nowhere())
try:
    if ours:
        importlib.import_module(ours)
    else:
        getattr(importlib.import_module("farandole.common._needs"), module)
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "ours", "label", "extra"),
    [
        ("torch", "farandole.torch", "PyTorch", "torch"),
        ("torch", "farandole.torch.elastic", "PyTorch", "torch"),
        ("tensorflow", "farandole.tensorflow", "TensorFlow", "tensorflow"),
        ("tensorflow", "farandole.tensorflow.keras", "TensorFlow", "tensorflow"),
        ("keras", "farandole.keras", "Keras", "keras"),
        ("jax", "farandole.jax", "JAX", "jax"),
        ("matplotlib", "", "matplotlib", "bench"),
        ("mpi4py", "", "mpi4py", "bench"),
        ("rich", "", "rich", "cli"),
        ("shtab", "", "shtab", "cli"),
    ],
)
def test_what_is_missing_names_its_extra(module: str, ours: str, label: str, extra: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MISSING, module, ours],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == f"{label} is missing: pip install 'farandole[{extra}]'\n"


def test_a_picture_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert cli.main(["bench", "all_reduce", "-np", "2", "--plot", "x.png"]) == 2
    assert "pip install 'farandole[bench]'" in capfd.readouterr().err
