"""The examples and the code in the readme run and do what their pages say."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import farandole as fd
import grid
import mpis
from farandole._launch.ranks import rank_environment
from farandole.horovod import SEARCH_PATH
from harness import World, launch

Spawn = Callable[..., World]
AS_USERS_DO = {"02_horovod_script.py", "03_ddp.py", "10_horovod_keras.py", "12_jax_optax.py"}
# One row in two of those that each test's own draw has left.
ROOT = Path(__file__).resolve().parents[1]


def run(*command: str, ranks: int = 2, options: Sequence[str] = ()) -> str:
    """The output of the ranks; fails with it if a rank fails."""
    return launch(ranks, command, "--no-prefix", *options).stdout


def play(
    spawn: Spawn,
    framework: str,
    program: str,
    ranks: int = 2,
    *,
    horovod: bool = False,
) -> str:
    """The output of an example. Its ranks are forked from a process that has imported the
    framework. On two ranks AS_USERS_DO, or all of a full grid, run under `farandole run`."""
    if ranks == 2 and (program.strip() in AS_USERS_DO or grid.full()):
        name, *arguments = program.split()
        path = str(ROOT / "examples" / name)
        return run(sys.executable, path, *arguments, options=["--horovod"] if horovod else [])
    return play_in(spawn, framework, program, ranks, {}, horovod=horovod)


def play_in(
    spawn: Spawn,
    framework: str,
    program: str,
    ranks: int,
    environment: dict[str, str],
    *,
    horovod: bool = False,
) -> str:
    """Rank 0's output of an example on forked ranks, with `environment` added to theirs."""
    name, *arguments = program.split()
    each = [rank_environment(r, [ranks]) | environment for r in range(ranks)]
    world = spawn(ranks, framework, each=each)
    world.run(play_on_rank, str(ROOT / "examples" / name), arguments, horovod, timeout=100)
    return world.output(0)


def play_on_rank(path: str, arguments: list[str], horovod: bool) -> None:
    sys.argv = [path, *arguments]
    if horovod:
        sys.path.insert(0, str(SEARCH_PATH))
    runpy.run_path(path, run_name="__main__")


FOLLOWING = """
import os, sys
sys.path.insert(0, sys.argv[1])
import demo
job = "import os, sys, time\\nprint('epoch 1/2: loss 3', flush=True)\\n"
job += "while not os.path.exists(sys.argv[1]): time.sleep(0.005)\\nprint('epoch 2/2: loss 2')"
demo.follow("training", [sys.executable, "-c", job, sys.argv[2]], dict(os.environ))
"""


def test_the_demo_shows_an_epoch_before_the_next_one_ends(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    command = [sys.executable, "-c", FOLLOWING, str(ROOT / "examples"), str(seen)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline() == "training: epoch 1/2: loss 3\n"
        seen.touch()
        assert demo.stdout.read() == "training: epoch 2/2: loss 2\n"
    assert demo.returncode == 0


def accuracy_of(output: str) -> float:
    found = re.search(r"accuracy[^:\n]*[: ]+([\d.]+)", output)
    assert found is not None, output
    return float(found[1])


def code_of(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_readme_s_ten_lines_print_what_the_readme_shows(tmp_path: Path) -> None:
    program = tmp_path / "ten_lines.py"
    program.write_text(code_of("README.md", "python")[0])
    shown = re.findall(r"^\[\d\] (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert run(sys.executable, str(program)).splitlines() == shown


def test_first_steps_all_reduce_runs(tmp_path: Path) -> None:
    program = tmp_path / "first.py"
    program.write_text(code_of("docs/start.md", "python")[0] + "print(total.tolist())\n")
    assert run(sys.executable, str(program)).splitlines() == ["[2.0, 1.0]"] * 2


def test_pages_link_to_pages_that_exist() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not dead


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "program",
    [
        "01_pytorch.py",
        "03_ddp.py",
        "03_ddp.py --hook",
        "04_fsdp.py",
        "05_gradient_compression.py",
        "05_gradient_compression.py --compression rounded",
    ],
)
def test_pytorch_example_learns(spawn: Spawn, program: str, ranks: int) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    assert accuracy_of(play(spawn, "torch", program, ranks)) > 0.9


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("program", "package"),
    [
        ("07_lightning.py", "lightning"),
        ("08_accelerate.py", "accelerate"),
        ("21_trainer.py", "transformers"),
    ],
)
def test_what_others_built_on_torch_distributed_runs_over_farandole(
    spawn: Spawn, program: str, package: str, ranks: int
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    output = play(spawn, "torch", program, ranks)
    assert "reduced by farandole" in output
    assert accuracy_of(output) > 0.87


@pytest.mark.parametrize("ranks", [1, 2] if grid.full() else [2])
def test_synchronized_layers_keep_statistics_equal(spawn: Spawn, ranks: int) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    output = play(spawn, "torch", "06_sync_batch_norm.py", ranks)
    assert accuracy_of(output) > 0.9
    assert "differ between ranks by up to 0\n" in output
    if ranks > 1:
        output = play(spawn, "torch", "06_sync_batch_norm.py --local", ranks)
        found = re.search(r"by up to (\S+)", output)
        assert found is not None, output
        assert float(found[1]) > 0


@pytest.mark.parametrize("ranks", [1, 2] if grid.full() else [2])
def test_jax_example_learns(spawn: Spawn, ranks: int) -> None:
    pytest.importorskip("jax", minversion="0.10", reason="JAX is not installed")
    pytest.importorskip("optax", reason="optax is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    output = play(spawn, "jax", "12_jax_optax.py", ranks)
    assert len(re.findall(r"^epoch", output, re.MULTILINE)) == 10, output
    assert accuracy_of(output) > 0.9


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--fp16-allreduce --gradient-predivide-factor 2",
        "--use-adasum --sync-batch-norm",
    ],
)
def test_a_script_for_horovod_runs_as_it_is(spawn: Spawn, arguments: str) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    script = ROOT / "examples/02_horovod_script.py"
    imported = re.findall(r"^\s*(?:import|from) (\S+)", script.read_text(), re.MULTILINE)
    assert "horovod.torch" in imported
    assert not [name for name in imported if name.startswith("farandole")]
    output = play(spawn, "torch", f"{script.name} {arguments}", horovod=True)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    accuracy = re.findall(r"accuracy ([\d.]+)", output)
    assert len(losses) == 6, output
    assert losses[-1] < losses[0] / 3
    assert float(accuracy[-1]) > 0.85


@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
def test_a_script_for_horovod_runs_under_any_launcher(launcher: str) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    program = ["-m", "farandole.horovod", str(ROOT / "examples/02_horovod_script.py")]
    if launcher == "mpiexec":
        done = mpis.find("openmpi").start(2, program)
    else:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [sys.executable, "-m", *torchrun, *program],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert float(re.findall(r"accuracy ([\d.]+)", done.stdout)[-1]) > 0.85


@pytest.mark.parametrize("arguments", ["", "--fp16-allreduce"])
def test_a_tensorflow_script_for_horovod_runs_as_it_is(spawn: Spawn, arguments: str) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    script = ROOT / "examples/09_tensorflow_gradient_tape.py"
    imported = re.findall(r"^\s*(?:import|from) (\S+)", script.read_text(), re.MULTILINE)
    assert "horovod.tensorflow" in imported
    assert not [name for name in imported if name.startswith("farandole")]
    output = play(spawn, "tensorflow", f"{script.name} {arguments}", horovod=True)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0] / 3, output
    assert accuracy_of(output) > 0.85


def backend_of_keras(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chooses the ranks' backend. It is not imported here, as that takes seconds."""
    for package in ("keras", name, f"farandole.{name}", "sklearn"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", name)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.mark.parametrize("arguments", ["", "--fp16-allreduce"])
def test_a_keras_script_for_horovod_runs_as_it_is(
    spawn: Spawn, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_of_keras("tensorflow", monkeypatch)
    script = ROOT / "examples/10_horovod_keras.py"
    imported = re.findall(r"^\s*(?:import|from) (\S+)", script.read_text(), re.MULTILINE)
    assert "horovod.keras" in imported
    assert not [name for name in imported if name.startswith("farandole")]
    output = play(spawn, "keras on tensorflow", f"{script.name} {arguments}", horovod=True)
    losses = [float(loss) for loss in re.findall(r" loss: ([\d.]+)", output)]
    assert losses[-1] < losses[0] / 3, output
    assert "finished gradual learning rate warmup to 0.04" in output
    assert "SGD after" in output
    assert float(re.findall(r"^accuracy ([\d.]+)", output, re.MULTILINE)[0]) > 0.85, output


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_one_keras_script_learns_on_every_backend(
    spawn: Spawn, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_of_keras(backend, monkeypatch)
    output = play(spawn, f"keras on {backend}", "11_keras.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0] / 3, output
    assert float(re.findall(rf"accuracy on {backend}: ([\d.]+)", output)[0]) > 0.85, output


def test_the_program_of_one_process_learns_the_same_on_two_ranks(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_of_keras("tensorflow", monkeypatch)
    alone, two = (
        [
            float(number)
            for number in re.findall(
                r"(\d\.\d{4})",
                play(spawn, "keras on tensorflow", "13_global_batch.py", ranks),
            )
        ]
        for ranks in (1, 2)
    )
    assert len(alone) == 2 * 8 + 2
    assert two == pytest.approx(alone, abs=5e-3)  # after 152 steps of Adam
    assert two[-1] > 0.85


def test_a_pytorch_program_of_one_process_learns_the_same_on_two_ranks_and_goes_on(
    spawn: Spawn, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")

    def numbers(options: str, ranks: int) -> list[float]:
        output = play(spawn, "torch", f"16_pytorch_global_batch.py {options}", ranks)
        return [float(number) for number in re.findall(r"(\d\.\d{4})", output)]

    alone, two = numbers("", 1), numbers("", 2)
    assert len(alone) == 6 + 2
    assert two == pytest.approx(alone, abs=2e-3)
    assert two[-1] > 0.9
    state = tmp_path / "state.pt"
    assert numbers(f"--state {state} --stop-after 30", 2) == pytest.approx(alone[:1], abs=2e-3)
    assert numbers(f"--state {state}", 1)[1:] == pytest.approx(alone[2:], abs=2e-3)


def test_a_model_that_does_not_fit_one_rank_learns_on_two(spawn: Spawn) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    output = play(spawn, "torch", "19_pipeline.py --epochs 3")
    assert accuracy_of(output) > 0.85
    assert "bubble 11.1% of a step in theory; idle " in output
    used = [float(mib) for mib in re.findall(r"uses ([\d.]+) of 10.0 MiB", output)]
    assert len(used) == 2
    assert max(used) < 10 < sum(used)
    told = spawn(1, "torch").run(end_of, str(ROOT / "examples/19_pipeline.py"))
    assert "does not fit 10 MiB: stage 0 of 1" in told[0]
    assert "advice: 2 stages" in told[0]


def end_of(path: str) -> str:
    """The message with which an example exits."""
    with pytest.raises(SystemExit) as caught:
        play_on_rank(path, [], False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("program", "numbers"), [("14_mirrored_fit.py", 8 * 2 + 4), ("15_mirrored_loop.py", 6 * 4 + 1)]
)
def test_tutorials_of_tensorflow_learn_the_same_on_two_ranks(
    spawn: Spawn, program: str, numbers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend_of_keras("tensorflow", monkeypatch)
    shown = []
    for ranks in (1, 2):
        folder = tmp_path / f"{ranks}"
        folder.mkdir()
        folders = {"CHECKPOINTS": str(folder)}
        output = play_in(spawn, "keras on tensorflow", program, ranks, folders)
        assert f"Number of devices: {ranks}" in output
        shown.append([float(number) for number in re.findall(r"(\d\.\d{4})", output)])
        assert len(list(folder.glob("ckpt*"))) >= 6
    assert len(shown[0]) == numbers, shown[0]
    assert shown[1] == pytest.approx(shown[0], abs=5e-3)  # after more than 100 steps of Adam
    assert shown[1][-1] > 0.85


def test_a_training_goes_on_where_a_rank_is_lost() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    command = (sys.executable, str(ROOT / "examples/20_elastic.py"), "--lose", "4")
    output = run(*command, options=["--min-np", "1"])
    assert "epoch 4, batch 8: rank 0 of 1\n" in output
    assert accuracy_of(output) > 0.88


def test_digits_on_a_parameter_server_with_a_slow_worker(spawn: Spawn) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    assert accuracy_of(play(spawn, "", "17_parameter_server.py --slow 10", 4)) > 0.9


def to_its_end(path: str) -> None:
    """Runs a program on a rank to its end and shuts down, as servers wait for that."""
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as left:
        if left.code:
            raise
    finally:
        fd.shutdown()


def test_the_tutorial_of_parameter_servers_runs(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_of_keras("tensorflow", monkeypatch)
    each = [rank_environment(r, [4]) for r in range(4)]
    world = spawn(4, "keras on tensorflow", each=each)
    program = ROOT / "examples" / "18_parameter_server_strategy.py"
    world.run(to_its_end, str(program), timeout=100)
    output = world.output(0)
    assert float(re.findall(r"accuracy is (\d\.\d+)", output)[3]) > 0.9
    assert "after 21 updates" in output


def test_digits_train_alike_under_farandole_run_and_torchrun_and_alone(
    spawn: Spawn, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    program = str(ROOT / "examples/digits.py")
    files = [tmp_path / f"{name}.json" for name in ("two", "torchrun", "alone")]
    words = [["--epochs", "1", "--json", str(file)] for file in files]
    run(sys.executable, program, *words[0])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, program, *words[1]], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    play(spawn, "torch", " ".join(["digits.py", *words[2]]), ranks=1)
    two, torchrun_curve, alone = (json.loads(file.read_text())["losses"] for file in files)
    assert two == torchrun_curve, "the same ranks, the same bits"
    assert two == pytest.approx(alone, rel=1e-4)
