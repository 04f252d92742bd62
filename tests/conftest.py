"""Fixtures that start worlds of rank processes, and check that these leave nothing behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import draws
import farandole
import grid
import harness
import namespaces
from harness import Nursery, World, jax_that_compiles_quickly

ROOT = Path(__file__).parent.parent
CASE = 180.0  # seconds: an upper bound, also for a case that compiles on a busy machine


@pytest.fixture(scope="session")
def nurseries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Nursery]]:
    """The nursery of a framework, made once; "" is the nursery that has imported none."""
    made: dict[str, Nursery] = {}
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    jax = jax_that_compiles_quickly(str(tmp_path_factory.mktemp("jax")))

    def nursery_of(framework: str) -> Nursery:
        if framework not in made:
            env = quiet | (jax if framework.endswith("jax") else {})
            made[framework] = Nursery(framework=framework, **env)
        return made[framework]

    yield nursery_of
    for nursery in made.values():
        nursery.close()


@pytest.fixture(scope="session")
def faulty_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package over a core with fault points, made where the installed one is made."""
    harness.build("faulty_core")
    package = tmp_path_factory.mktemp("faulty") / "farandole"
    shutil.copytree(
        ROOT / "python" / "farandole", package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for module in (harness.TREE / "faulty").glob("_core*.so"):
        (package / module.name).symlink_to(module)
    for kernels in Path(farandole.__file__).parent.glob("kernels-*.fatbin"):
        (package / kernels.name).symlink_to(kernels)
    return package.parent


@pytest.fixture(scope="session")
def faulty_nursery(faulty_package: Path) -> Iterator[Nursery]:
    nursery = Nursery([faulty_package])
    yield nursery
    nursery.close()


def _spawner(nursery_of: Callable[[str], Nursery]) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []
    before: list[int] = []

    def spawn(size: int, framework: str = "", **options: Any) -> World:
        nursery = nursery_of(framework)
        before.append(harness.open_files())
        worlds.append(World(size, nursery, **options))
        return worlds[-1]

    yield spawn
    for world in worlds:
        world.close()
        for pid in world.pids:
            assert not Path(f"/proc/{pid}").exists(), f"process {pid} is left"
        assert harness.traces_of(world.run_id) == []
    assert not before or harness.open_files() <= before[0]


@pytest.fixture
def spaces() -> Iterator[list[str]]:
    """Two network namespaces, by name."""
    with namespaces.two() as names:
        yield names


@pytest.fixture
def spawn(nurseries: Callable[[str], Nursery]) -> Iterator[Callable[..., World]]:
    """Starts worlds that end with the test, and checks that they leave nothing behind."""
    yield from _spawner(nurseries)


@pytest.fixture
def spawn_faulty(faulty_nursery: Nursery) -> Iterator[Callable[..., World]]:
    """The same over a core with fault points (FARANDOLE_FAULT)."""
    yield from _spawner(lambda _: faulty_nursery)


@pytest.fixture(scope="session")
def standing(nurseries: Callable[[str], Nursery]) -> Iterator[Callable[[int], World]]:
    """A world of a size that many tests share; a new one after a test that failed in it."""
    worlds: dict[int, World] = {}

    def world_of(size: int) -> World:
        world = worlds.get(size)
        if world is not None and not _is_well(world):
            world.close()
            world = None
        if world is None:
            world = worlds[size] = World(size, nurseries(""))
        return world

    yield world_of
    for world in worlds.values():
        assert all(status == 0 for status in world.close()), "a rank did not leave by itself"
        assert harness.traces_of(world.run_id) == []


def _is_well(world: World) -> bool:
    try:
        world.start(check_health)
        return all(o.error is None for o in world.outcomes(timeout=5))
    except (TimeoutError, harness.Ended, OSError):
        return False


def check_health() -> None:
    """On a rank: every operation of the test before has come to its end."""
    import farandole as fd

    if fd.is_initialized():
        fd.barrier(timeout=4)


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """This process alone."""
    import farandole as fd

    fd.init(rank=0, size=1)
    yield
    fd.shutdown()


@pytest.fixture(scope="module")
def run_case(nurseries: Callable[[str], Nursery]) -> Iterator[Callable[..., None]]:
    """Runs one of the cases that share ranks (rank_cases.py); after one that failed, the next has
    new ranks."""
    world: World | None = None
    of = ""  # the framework of its ranks

    def leave() -> None:
        nonlocal world
        left, world = world, None
        if left is not None:
            statuses = left.close(harness.LIMIT)
            assert not any(statuses), f"ranks did not leave by themselves: {statuses}"
            assert harness.traces_of(left.run_id) == []

    def run(
        size: int, framework: str, prepare: Callable[[], None], case: Callable[[], None]
    ) -> None:
        nonlocal world, of
        if world is not None and (len(world), of) != (size, framework):
            leave()
        try:
            if world is None:
                world, of = World(size, nurseries(framework)), framework
                world.run(prepare, timeout=CASE)
            world.run(case, timeout=CASE)
        except BaseException:
            if world is not None:
                world.close()
            world = None
            raise

    yield run
    leave()


# ---- which tests run, and beside which ----


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--odds", action="store_true", help="print how often rows of each table run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    words = config.args
    one_file = len(words) == 1 and words[0].endswith(".py")
    by_name = config.option.keyword or one_file or any("::" in word for word in words)
    if not grid.full() and not by_name:
        made = draws.draw(items, draws.costly())
        if config.option.odds:
            for table in sorted(made.tables(), key=lambda table: table.odds):
                print(f"{table.odds:.3f} {table.rows:4d} rows  {table.name}")
        config.hook.pytest_deselected(items=[item for item in items if item in made.left_out])
        items[:] = [item for item in items if item not in made.left_out]
    # Cases that share one set of ranks (rank_cases.py) belong to one worker.
    for item in items:
        if isinstance(item, pytest.Function) and "run_case" in item.fixturenames:
            ranks = item.callspec.params["ranks"]
            group = f"{item.module.__name__}.{item.originalname}[{ranks}]"
            item.add_marker(pytest.mark.xdist_group(group))


def pytest_report_header() -> str:
    return "grid: every combination" if grid.full() else f"grid: pairs, GRID_SEED={grid.seed()}"


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("GRID_SEED", str(random.randrange(10**6)))  # workers inherit it
    # Signals that our own start ignores (a background job's SIGINT) would be ignored by every
    # process a test starts, and some tests are about them.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    # The tests may run inside a job, whose variables must not reach their ranks.
    for name in [n for n in os.environ if harness._is_ours(n)]:
        del os.environ[name]
    # A tuning table that was measured on this machine would change the paths that tests see. So the
    # cache starts empty, and CI keeps `farandole run` from measuring.
    os.environ["XDG_CACHE_HOME"] = f"/tmp/farandole-tests-{os.getpid()}"
    os.environ["CI"] = "true"
    del config
