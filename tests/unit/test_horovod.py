"""`import horovod` means farandole: from inside, under farandole run, and in what ranks start."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from farandole.common import exceptions, util
from harness import launch

LIMIT = 110

# Prints where each rank's horovod comes from. Nothing here needs a framework.
WHOSE = "import horovod.common.util as util; print(util.__name__)"
OURS = "farandole.common.util"


def python(*words: str, cwd: Path | None = None, **environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, *words], env=os.environ | environment, cwd=cwd,
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def under_run(*command: str, cwd: Path | None = None, **environment: str) -> tuple[list[str], str]:
    """Output lines of two ranks under `farandole run --horovod`, and their stderr."""
    run = ["-m", "farandole", "run", "--horovod", "-np", "2", "--no-prefix", "--"]
    out, err = python(*run, *command, cwd=cwd, OMP_NUM_THREADS="1", **environment)
    return out.splitlines(), err


def installed(script: str) -> tuple[str, str]:
    return python("-c", f"from farandole.horovod import install\ninstall()\n{script}")


def test_it_is_known_from_inside() -> None:
    out, err = installed(
        "import horovod, horovod.common.exceptions as e, horovod.runner\n"
        "from horovod.common.util import mpi_built\n"
        "print(horovod.__version__, e.__name__, mpi_built(), horovod.run is horovod.runner.run)\n"
        "install()\n"
        "import sys; print(sum(type(f).__name__ == '_Finder' for f in sys.meta_path))\n"
    )
    assert out == "0.28.1 farandole.common.exceptions False True\n1\n"
    assert err == ""


def test_any_launcher_starts_it_as_a_module(tmp_path: Path) -> None:
    """Also what the program starts, with the interpreter's options."""
    (tmp_path / "program.py").write_text(WHOSE)
    says = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    for words in (["-c", WHOSE], ["-m", "program"], ["program.py"], ["-c", says, WHOSE]):
        assert python("-m", "farandole.horovod", *words, cwd=tmp_path)[0] == f"{OURS}\n"
    optimized = "import sys; print(sys.flags.optimize, sys.argv[1:])"
    said, _ = python("-O", "-m", "farandole.horovod", "-c", optimized, "--epochs", "3")
    assert said == "1 ['--epochs', '3']\n"
    asked = subprocess.run(
        [sys.executable, "-m", "farandole.horovod"], capture_output=True, text=True, check=False
    )
    assert asked.returncode == 2
    assert asked.stderr.startswith("usage: python -m farandole.horovod (train.py | ")


def test_a_command_line_a_module_and_a_script_find_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WHOSE)
    assert under_run(sys.executable, "-c", WHOSE)[0] == [OURS] * 2
    assert under_run(sys.executable, "-m", "program", cwd=tmp_path)[0] == [OURS] * 2
    assert under_run(sys.executable, str(tmp_path / "program.py"))[0] == [OURS] * 2


SPAWNS = f"""
import multiprocessing, subprocess, sys

def work(_):
    import horovod.common.util
    return horovod.common.util.__name__

if __name__ == "__main__":
    for way in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(way).Pool(1) as pool:
            print(*pool.map(work, [0]))
    subprocess.run([sys.executable, "-c", {WHOSE!r}], check=True)
"""


def test_processes_that_ranks_start_find_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SPAWNS)
    assert under_run(sys.executable, str(tmp_path / "program.py"))[0] == [OURS] * 8


def test_the_launchers_copy_of_the_package_may_be_another(tmp_path: Path) -> None:
    package = Path(importlib.util.find_spec("farandole").origin).parent  # type: ignore[union-attr,arg-type]
    (tmp_path / "farandole" / "horovod").mkdir(parents=True)
    shutil.copytree(package / "horovod" / "path", tmp_path / "farandole" / "horovod" / "path")
    theirs = str(tmp_path / "farandole" / "horovod" / "path")
    path = os.pathsep.join(filter(None, [theirs, os.environ.get("PYTHONPATH", "")]))
    assert python("-c", WHOSE, PYTHONPATH=path) == (f"{OURS}\n", "")


def test_without_the_option_it_is_not_there() -> None:
    done = launch(1, [sys.executable, "-c", "import horovod"], code=None)
    if done.returncode == 0:
        pytest.skip("Horovod is installed")
    assert "No module named 'horovod'" in done.stderr


def test_the_ranks_own_pythonpath_stays(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").touch()
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    script = f"import my_module; {WHOSE}"
    assert under_run(sys.executable, "-c", script, PYTHONPATH=path)[0] == [OURS] * 2


def test_nothing_runs_in_a_python_that_does_not_import_it() -> None:
    script = "import sys; print([m for m in sys.modules if 'horovod' in m or 'farandole' in m])"
    assert under_run(sys.executable, "-c", script)[0] == ["[]"] * 2


@pytest.fixture
def another(tmp_path: Path) -> str:
    """A PYTHONPATH with another horovod on it."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("theirs = True")
    return os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def test_an_installed_horovod_is_shadowed_and_one_rank_says_so(another: str) -> None:
    out, err = under_run(sys.executable, "-c", WHOSE, PYTHONPATH=another)
    assert out == [OURS] * 2
    said = [line for line in err.splitlines() if "horovod means farandole here" in line]
    assert len(said) == 1
    assert str(Path(another.split(os.pathsep)[0], "horovod")) in said[0]


def test_one_that_was_imported_before_is_not_replaced(another: str) -> None:
    script = "import horovod, farandole.horovod; farandole.horovod.install()"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": another},
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "before farandole.horovod.install(); call that first" in done.stderr


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("horovod.spark", "farandole.run(function)"),
        ("horovod.ray.elastic", "farandole.ray.run(function, "),
        ("horovod.mxnet", "MXNet is retired"),
        ("horovod.nonsense", "docs/from-horovod.md"),
    ],
)
def test_what_is_not_there_says_what_to_do(name: str, advice: str) -> None:
    top = ".".join(name.split(".")[:2])
    out, _ = installed(
        f"try:\n    import {name}\nexcept ImportError as error:\n    print(error.name, error)"
    )
    assert out.startswith(f"{top} horovod is farandole here, which has no {top}: ")
    assert advice in out


def test_horovods_names_in_torch() -> None:
    pytest.importorskip("torch")
    out, _ = installed(
        "import horovod.torch as hvd, farandole.torch\n"
        "import horovod.torch.compression, horovod.torch.functions, horovod.torch.optimizer\n"
        "import horovod.torch.sync_batch_norm, horovod.torch.elastic\n"
        "from horovod.torch.mpi_ops import allreduce_async_, synchronize, rank, Average\n"
        "from horovod.torch.functions import broadcast_object\n"
        "print(hvd is farandole.torch, hvd.elastic.__name__)\n"
        "print(broadcast_object is hvd.broadcast_object)\n"
    )
    assert out == "True farandole.torch.elastic\nTrue\n"


# Names that programs import: Horovod's documentation and examples, and public programs with it.
WHO = "init shutdown is_initialized rank size local_rank local_size cross_rank cross_size"
BUILT = (
    "mpi_built mpi_enabled mpi_threads_supported gloo_built gloo_enabled nccl_built ddl_built "
    "ccl_built cuda_built rocm_built is_homogeneous start_timeline stop_timeline"
)
SETS = "ProcessSet global_process_set add_process_set remove_process_set"
OPS = (
    "Average Sum Adasum Min Max Product allreduce grouped_allreduce allgather grouped_allgather "
    "broadcast broadcast_ alltoall reducescatter grouped_reducescatter join barrier "
)
ASYNC = (
    "allreduce_ allreduce_async allreduce_async_ grouped_allreduce_async grouped_allreduce_ "
    "grouped_allreduce_async_ sparse_allreduce_async allgather_async grouped_allgather_async "
    "broadcast_async broadcast_async_ alltoall_async reducescatter_async "
    "grouped_reducescatter_async poll synchronize"
)
OLD_AVERAGE = "handle_average_backwards_compatibility check_extension"
OBJECTS = "broadcast_object allgather_object"
NAMES = {
    "common": "HorovodBasics check_extension get_ext_suffix",
    "common.basics": "HorovodBasics",
    "common.elastic": "run_fn State ObjectState",
    "common.exceptions": "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError",
    "common.process_sets": SETS,
    "common.util": (
        "check_extension check_installed_version env extension_available get_ext_suffix "
        "get_average_backwards_compatibility_fun gpu_available is_iterable split_list "
        "is_version_greater_equal_than num_rank_is_power_2 mpi_built gloo_built nccl_built "
        "ddl_built ccl_built cuda_built rocm_built"
    ),
    "torch": (
        f"{WHO} {BUILT} {SETS} {OPS} {ASYNC} {OBJECTS} broadcast_parameters "
        "broadcast_optimizer_state Compression DistributedOptimizer SyncBatchNorm "
        "HorovodInternalError check_extension elastic mpi_ops functions optimizer compression"
    ),
    "torch.mpi_ops": f"{WHO} {BUILT} {SETS} {OPS} {ASYNC} {OLD_AVERAGE} num_rank_is_power_2",
    "torch.functions": f"{OBJECTS} broadcast_parameters broadcast_optimizer_state",
    "torch.optimizer": "DistributedOptimizer",
    "torch.compression": "Compression",
    "torch.sync_batch_norm": "SyncBatchNorm",
    "torch.elastic": "run TorchState ElasticSampler",
    "torch.elastic.sampler": "ElasticSampler",
    "torch.elastic.state": "TorchState StateHandler get_handler_registry set_handler_registry",
    "tensorflow": (
        f"{WHO} {BUILT} {SETS} {OPS} {OBJECTS} rank_op size_op local_rank_op local_size_op "
        "process_set_included_op broadcast_variables broadcast_object_fn "
        "broadcast_global_variables BroadcastGlobalVariablesHook Compression DistributedOptimizer "
        "DistributedGradientTape PartialDistributedGradientTape SyncBatchNormalization elastic "
        "check_extension gpu_available mpi_ops util functions compression"
    ),
    "tensorflow.mpi_ops": (
        f"{WHO} {BUILT} {SETS} {OPS} {OLD_AVERAGE} rank_op size_op local_rank_op local_size_op "
        "process_set_included_op _allreduce _grouped_allreduce gpu_available get_ext_suffix "
        "check_num_rank_power_of_2"
    ),
    "tensorflow.util": "_executing_eagerly _make_subgraph _cache vars_to_refs refs_to_vars",
    "tensorflow.functions": f"{OBJECTS} broadcast_object_fn broadcast_variables",
    "tensorflow.compression": "Compression",
    "tensorflow.sync_batch_norm": "SyncBatchNormalization",
    "tensorflow.elastic": "run TensorFlowState TensorFlowKerasState",
    "tensorflow.keras": f"{WHO} DistributedOptimizer broadcast_global_variables callbacks elastic",
    "tensorflow.keras.callbacks": (
        "BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback "
        "LearningRateWarmupCallback BestModelCheckpoint"
    ),
    "tensorflow.keras.elastic": "run KerasState CommitStateCallback UpdateBatchStateCallback",
    "keras": (
        f"{WHO} Average Sum allreduce allgather broadcast reducescatter load_model Compression "
        "DistributedOptimizer PartialDistributedOptimizer callbacks elastic"
    ),
    "keras.callbacks": "BroadcastGlobalVariablesCallback MetricAverageCallback",
    "keras.elastic": "run KerasState CommitStateCallback UpdateEpochStateCallback",
    "runner": "run",
}


@pytest.mark.parametrize("framework", ["common", "torch", "tensorflow"])
def test_modules_that_programs_import_are_there_and_are_ours(framework: str) -> None:
    if framework != "common" and importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    keras = ("tensorflow", "keras")
    mine = {
        module: names
        for module, names in NAMES.items()
        if module.startswith(keras if framework == "tensorflow" else framework)
        or (framework, module) == ("common", "runner")
    }
    script = (
        "import importlib\n"
        f"for module, names in {mine!r}.items():\n"
        "    theirs = importlib.import_module('horovod.' + module)\n"
        "    place = 'farandole.horovod.' if module == 'runner' else 'farandole.'\n"
        "    assert theirs is importlib.import_module(place + module), module\n"
        "    print(*[f'{module}.{n}' for n in names.split() if not hasattr(theirs, n)])\n"
    )
    assert installed(script)[0].split() == []


def test_horovods_run() -> None:
    script = (
        "import horovod, warnings\n"
        "warnings.simplefilter('error')\n"
        "print(horovod.run(len, ('abc',), num_proc=2), horovod.run(len, ('ab',)))\n"
        "print(horovod.run(len, ('abc',), np=1, hosts='localhost:1', start_timeout=5),\n"
        "      horovod.run(len, ('abc',), {}, 2, None, None, None, None, None, 'localhost:2'))\n"
        "for bad in dict(hosts='elsewhere:2'), dict(min_num_proc=1), dict(nonsense=1), "
        "dict(num_proc=2, hosts='localhost'):\n"
        "    try:\n        horovod.run(len, ('abc',), **bad)\n"
        "    except (ValueError, TypeError) as error:\n        print(type(error).__name__, error)\n"
        "try:\n    horovod.run(len, ('abc',), use_gloo=True)\n"
        "except UserWarning as warning:\n    print(warning)\n"
    )
    lines = installed(script)[0].splitlines()
    assert lines[:2] == ["[3, 3] [2]", "[3] [3, 3]"]
    assert "ValueError host elsewhere is not this one" in lines[2]
    assert lines[3:6] == [
        "ValueError min_num_proc is not supported: a function runs on a fixed number of ranks; "
        "'farandole run' starts elastic jobs",
        "TypeError run() got an unexpected keyword argument 'nonsense'",
        "ValueError num_proc is 2, but this host has 1 slots",
    ]
    assert lines[6] == "horovod.run ignores use_gloo (farandole has transports of its own)"


# -- horovod.common ---------------------------------------------------------------------------


def test_exceptions_have_horovods_shapes() -> None:
    import farandole as fd

    assert issubclass(fd.PeerLost, exceptions.HorovodInternalError)
    assert issubclass(exceptions.HorovodInternalError, RuntimeError)
    assert exceptions.HostsUpdatedInterrupt(True).skip_sync is True
    error = exceptions.HorovodVersionMismatchError("torch", "1.0.0", "2.0.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "1.0.0", "2.0.0")


def test_lists_are_split_as_evenly_as_can_be() -> None:
    for n in range(1, 9):
        for count in range(20):
            parts = util.split_list(list(range(count)), n)
            assert [x for part in parts for x in part] == list(range(count))
            assert len(parts) == n
            lengths = [len(part) for part in parts]
            assert lengths == sorted(lengths, reverse=True)
            assert max(lengths) - min(lengths) <= 1


def test_powers_of_two() -> None:
    assert [n for n in range(-2, 20) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16]


def test_versions_are_compared_by_number() -> None:
    assert util.is_version_greater_equal_than("1.10.0", "1.9.1")
    assert util.is_version_greater_equal_than("2.0.0+cpu", "2.0.0")
    assert not util.is_version_greater_equal_than("1.9.9", "1.10.0")
    with pytest.raises(ValueError, match=r"'2\.0' is not a version"):
        util.is_version_greater_equal_than("2.0", "1.0.0")


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_A", "1")
    monkeypatch.delenv("HVD_B", raising=False)
    with suppress(KeyError), util.env(HVD_A=None, HVD_B="2"):
        assert "HVD_A" not in os.environ
        assert os.environ["HVD_B"] == "2"
        raise KeyError
    assert os.environ["HVD_A"] == "1"
    assert "HVD_B" not in os.environ


def test_answers_about_the_build() -> None:
    built = [
        util.mpi_built(), util.gloo_built(), util.ddl_built(), util.ccl_built(), util.cuda_built(),
        util.rocm_built(), util.gpu_available("torch"), util.extension_available("mxnet"),
    ]  # fmt: skip
    assert built == [False] * 8
    assert util.nccl_built() == 0
    with pytest.raises(ImportError, match=r"horovod\.mxnet is not available"):
        util.check_extension("horovod.mxnet")
    assert util.is_iterable([])
    assert not util.is_iterable(1)
