"""The parameter server: the same result as serial training, nobody waits without need, and who dies
takes nobody along."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole as fd
import harness
from farandole import parameter_server as ps
from farandole.parameter_server._clocks import Clocks
from farandole.parameter_server._shards import described, place, plan, rows_of
from farandole.parameter_server._tickets import ALL_DONE, NONE_NOW, OTHER_TOTAL, Tickets
from harness import World

Spawn = Callable[..., World]


def start() -> dict[str, np.ndarray]:
    """Three variables; 'table' is split over two servers."""
    rng = np.random.default_rng(5)
    return {
        "table": rng.normal(size=(40, 3)),
        "b": rng.normal(size=7).astype(np.float32),
        "scale": np.array(1.5),
    }


def gradient(step: int) -> dict[str, np.ndarray]:
    """A gradient of whole numbers, so that sums are exact in any order."""
    rng = np.random.default_rng(step)
    return {
        "table": rng.integers(-8, 8, (40, 3)).astype(float),
        "b": rng.integers(-8, 8, 7).astype(np.float32),
        "scale": np.array(float(step % 5)),
    }


def close(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-5, err_msg=name)


# ---- the same result as serial training ----


def every_gradient_once(servers: int, steps: int) -> Any:
    fd.init()
    # Only rank 0's values count.
    variables = {name: value + fd.rank() for name, value in start().items()}
    node = ps.join(variables, ps.SGD(0.25), servers=servers, split_above=500)
    if isinstance(node, ps.Server):
        return node.serve()
    with node:
        mine = []
        for step in node.steps(steps):
            weights = node.pull()
            assert {n: (w.shape, w.dtype) for n, w in weights.items()} == {
                n: (w.shape, w.dtype) for n, w in variables.items()
            }
            node.push(gradient(step))
            mine.append(step)
        return mine, node.pull()  # all steps are done when steps() ends


@pytest.mark.parametrize(
    ("size", "servers", "hosts"), [(2, 1, ""), (4, 1, ""), (4, 2, ""), (4, 2, "1,2,1")]
)
def test_sgd_applies_every_gradient_once(spawn: Spawn, size: int, servers: int, hosts: str) -> None:
    steps = 24
    world = spawn(size, env=harness.split(hosts) if hosts else None)
    *workers, last = world.run(every_gradient_once, servers, steps)[: size - servers + 1]
    assert sorted(step for mine, _ in workers for step in mine) == list(range(steps))
    right = start()
    for step in range(steps):
        right = {n: (w - 0.25 * gradient(step)[n]).astype(w.dtype) for n, w in right.items()}
    for _, weights in workers:
        close(weights, right)
    assert last.updates == steps
    assert sum(last.pushes) == steps
    assert last.lost == []


def second_server_is_late(max_staleness: int | None) -> Any:
    apply = ps.Server._push

    def later(server: Any, *given: Any) -> None:
        time.sleep(0.1 * server.index)
        apply(server, *given)

    ps.Server._push = later  # type: ignore[method-assign]
    fd.init()
    node = ps.join(start(), ps.SGD(0.25), servers=2, split_above=500, max_staleness=max_staleness)
    if isinstance(node, ps.Server):
        return node.serve()
    with node:
        for step in node.steps(4):
            node.push(gradient(step))
        return node.pull()


@pytest.mark.parametrize("max_staleness", [None, 0, 3])
def test_steps_end_when_every_server_has_applied_them(
    spawn: Spawn, max_staleness: int | None
) -> None:
    first, second, *_ = spawn(4).run(second_server_is_late, max_staleness)
    close(first, second)
    if max_staleness != 0:  # each gradient by itself, not the mean of a round
        moved = {name: sum(gradient(step)[name] for step in range(4)) for name in start()}
        close(first, {name: value - 0.25 * moved[name] for name, value in start().items()})


def in_rounds(servers: int, steps: int) -> Any:
    """Momentum, so that the order and the mean matter; the last round has fewer workers."""
    fd.init()
    node = ps.join(
        start(), ps.SGD(0.1, momentum=0.9), servers=servers, max_staleness=0, split_above=500
    )
    if isinstance(node, ps.Server):
        return node.serve()
    with node:
        for step in range(steps - (node.index == 2)):
            weights = node.pull()
            if node.index == 1:
                time.sleep(0.01)
            node.push({n: w * 0.1 + gradient(step * 3 + node.index)[n] for n, w in weights.items()})
        node.rest()
        return weights


@pytest.mark.parametrize("servers", [1, 2])
def test_no_staleness_is_synchronous_training(spawn: Spawn, servers: int) -> None:
    steps = 6
    values = spawn(3 + servers).run(in_rounds, servers, steps)
    weights = start()
    speed = {n: np.zeros_like(w) for n, w in weights.items()}
    for step in range(steps):
        before = weights
        who = range(3) if step < steps - 1 else range(2)
        for name in weights:
            mean = np.mean([before[name] * 0.1 + gradient(step * 3 + w)[name] for w in who], axis=0)
            speed[name] = 0.9 * speed[name] - 0.1 * mean
        weights = {n: (w + speed[n]).astype(w.dtype) for n, w in weights.items()}
    close(values[0], before)
    close(values[1], before)
    assert values[3].updates == steps
    assert values[3].max_staleness == 0


def in_parts() -> Any:
    """The servers serve twice, and do something else in between; one worker dies meanwhile."""
    fd.init()
    node = ps.join(start(), ps.SGD(0.25))
    if isinstance(node, ps.Server):
        reports = [node.serve()]
        harness.tell("served")
        harness.listen()
        return [*reports, node.serve()]
    with node:
        for part in range(2):
            for step in node.steps(5):
                node.pull()
                node.push(gradient(5 * part + step))
            weights = node.pull()
            if part == 0:
                node.pause()
                if node.index == 1:
                    harness.tell("paused")
                    signal.pause()
        return weights


def test_servers_serve_again_after_a_pause(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(in_parts)
    assert world.hear(1) == "paused"
    assert world.hear(2) == "served"
    world.signal(1, signal.SIGKILL)
    world.say(2, "go on")
    first, server = world.outcomes([0, 2])
    right = start()
    for step in range(10):
        right = {n: (w - 0.25 * gradient(step)[n]).astype(w.dtype) for n, w in right.items()}
    close(first.value, right)
    assert [(report.updates, report.lost) for report in server.value] == [(5, []), (10, [1])]


# ---- rows ----


def with_rows(sync: bool) -> Any:
    fd.init()
    node = ps.join(
        start(), ps.Adagrad(0.5), servers=2, split_above=500, max_staleness=0 if sync else None
    )
    if isinstance(node, ps.Server):
        return node.serve()
    with node:
        # Unordered, with a row twice, and on both servers.
        rows = ps.Rows([39, 3, 20, 3], np.arange(12.0).reshape(4, 3))
        got = node.pull(rows={"table": [21, 0, 39, 21]})
        node.push({"table": rows})
        after = node.pull()
        return got, after


@pytest.mark.parametrize("sync", [False, True])
def test_rows_move_as_rows(spawn: Spawn, sync: bool) -> None:
    (got, after), *_ = spawn(3).run(with_rows, sync)
    before = start()
    assert (got["table"] == before["table"][[21, 0, 39, 21]]).all()
    assert (got["b"] == before["b"]).all()
    right = before["table"].copy()
    for row, value in [(39, [0, 1, 2.0]), (20, [6, 7, 8.0]), (3, [12, 14, 16.0])]:
        g = np.array(value)
        right[row] -= 0.5 * g / (np.sqrt(0.1 + g * g) + 1e-7)
    close(after, {**before, "table": right})


def transposed() -> Any:
    fd.init()
    table = start()["table"].T
    node = ps.join({"table": table}, ps.SGD(0.25), servers=2, split_above=100)
    if isinstance(node, ps.Server):
        return node.serve()
    with node:
        node.push({"table": gradient(1)["table"].T})
        node.flush()
        return node.pull()


def test_arrays_may_lie_by_columns(spawn: Spawn) -> None:
    right = (start()["table"] - 0.25 * gradient(1)["table"]).T
    close(spawn(3).run(transposed)[0], {"table": right})


# ---- values past the rule ----


def sets_values() -> Any:
    fd.init()
    node = ps.join(start(), ps.SGD(0.25), servers=2, split_above=500)
    if isinstance(node, ps.Server):
        return node.serve()
    with node:
        table = np.full((40, 3), 7.0)
        with pytest.raises(fd.InvalidArgument, match="assign: value of 'b' is float64 of shape"):
            node.assign({"table": table, "b": np.zeros(7)})
        with pytest.raises(fd.InvalidArgument, match="rows of 'table', which is not among only="):
            node.pull(rows={"table": [1]}, only=["b"])
        node.assign({"table": table, "scale": np.array(2.0)})
        node.push({"table": ps.Rows([0, 39], np.ones((2, 3)))})
        node.flush()
        some = node.pull(rows={"table": [39, 1]}, only=["scale", "table"])
        return some, node.pull(only=["b"]), node.pull(only=[])


def test_values_are_set_and_some_are_pulled(spawn: Spawn) -> None:
    some, rest, none = spawn(3).run(sets_values)[0]
    close(some, {"table": np.array([[6.75] * 3, [7.0] * 3]), "scale": np.array(2.0)})
    close(rest, {"b": start()["b"]})
    assert none == {}


# ---- who waits for whom ----


def one_is_slow(max_staleness: int | None, steps: int) -> Any:
    """The slow one pushes once, when the test says so."""
    fd.init()
    node = ps.join({"w": np.zeros(4)}, ps.SGD(1.0), max_staleness=max_staleness)
    if isinstance(node, ps.Server):
        return node.serve()
    with node:
        if node.index == 1:
            node.pull()
            harness.tell("pulled")
            harness.listen()
            node.push({"w": np.ones(4)})
            return None
        harness.listen()
        for step in range(steps):
            node.pull()
            node.push({"w": np.ones(4)})
            harness.tell(step)
        return node.pull()["w"]


def test_workers_do_not_wait_for_a_slow_one(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(one_is_slow, None, 20)
    assert world.hear(1) == "pulled"
    world.say(0, "begin")
    assert [world.hear(0) for _ in range(20)] == list(range(20))
    world.say(1, "go on")
    first, _, server = world.outcomes()
    assert first.value is not None
    assert server.value.max_staleness == 20  # the slow one's gradient


def test_a_bound_is_kept(spawn: Spawn) -> None:
    """With a bound of 2 a worker does 3 steps while another one does its first."""
    world = spawn(3)
    world.start(one_is_slow, 2, 6)
    assert world.hear(1) == "pulled"
    world.say(0, "begin")
    assert [world.hear(0) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TimeoutError):
        world.hear(0, timeout=0.3)
    world.say(1, "go on")  # and closes, after which nobody waits for it
    assert [world.hear(0) for _ in range(3)] == [3, 4, 5]
    _, _, server = world.outcomes()
    assert server.value.max_ahead == 2


# ---- deaths ----


def one_is_killed(servers: int, max_staleness: int | None) -> Any:
    fd.init()
    node = ps.join(
        start(), ps.SGD(0.25), servers=servers, max_staleness=max_staleness, split_above=500
    )
    if isinstance(node, ps.Server):
        return node.serve()
    with node:
        for step in node.steps(30):
            node.pull()
            if node.index == 1:
                harness.tell("holds a step")
                signal.pause()
            node.push(gradient(step))
        return node.pull()


@pytest.mark.parametrize(
    ("servers", "max_staleness", "hosts"),
    [(1, None, None), (2, None, None), (1, 0, None), (1, 1, None), (1, None, "0:0:1:1")],
)
def test_a_worker_may_die(
    spawn: Spawn, servers: int, max_staleness: int | None, hosts: str | None
) -> None:
    """Its step is done by another one: no gradient is missing."""
    world = spawn(3 + servers, env=harness.split(hosts) if hosts else None)
    world.start(one_is_killed, servers, max_staleness)
    assert world.hear(1) == "holds a step"
    world.signal(1, signal.SIGKILL)
    first, third, *of_servers = world.outcomes([0, 2, 3, 4][: 2 + servers])
    assert first.error is None, first.trace
    for outcome in of_servers:
        assert outcome.error is None, outcome.trace
        assert outcome.value.lost == [1]
        assert sum(outcome.value.pushes) == 30
    assert "rank 1" in world.output(3)
    assert "2 of 3 workers go on" in world.output(3)
    if max_staleness is None:
        right = start()
        for step in range(30):
            right = {n: (w - 0.25 * gradient(step)[n]).astype(w.dtype) for n, w in right.items()}
        close(first.value, right)
        close(third.value, right)


def one_raises_and_goes_on() -> Any:
    fd.init()
    node = ps.join(start(), ps.SGD(0.25))
    if isinstance(node, ps.Server):
        report = node.serve()
        fd.barrier()
        return report
    try:
        with node:
            if node.index == 1:
                raise ValueError("bad sample\nin a file")
            for step in node.steps(12):
                node.push(gradient(step))
    except ValueError:
        with pytest.raises(fd.InvalidArgument, match="worker 1 has been closed"):
            node.pull()
    fd.barrier()
    return None


def test_a_worker_that_raises_is_left_out_though_its_program_goes_on(spawn: Spawn) -> None:
    world = spawn(3)
    report = world.run(one_raises_and_goes_on)[2]
    assert report.lost == [1]
    assert report.pushes == [12, 0]
    assert "worker 1 has raised ValueError: bad sample; 1 of 2 workers go on" in world.output(2)


def trains(folder: str, steps: int, stop_at: int) -> Any:
    fd.init()
    node = ps.join(
        start(), ps.SGD(0.1, momentum=0.5), snapshots=ps.Snapshots(folder, every=5, keep=1)
    )
    if isinstance(node, ps.Server):
        return node.serve()
    with node:
        mine = []
        for step in node.steps(steps):
            node.pull()
            node.push(gradient(step))
            mine.append(step)
            if len(mine) == stop_at:
                files = node.save()
                node.pull()
                harness.tell(str(files[0]))
                harness.listen()
        return mine, node.pull()


def test_a_lost_server_is_named_with_its_last_snapshot(spawn: Spawn, tmp_path: Path) -> None:
    """And a new world goes on from it, as if nothing had been."""
    world = spawn(2)
    world.start(trains, str(tmp_path), 20, 12)
    file = world.hear(0)
    assert Path(file) == tmp_path / "server-0-of-1.version-12.npz"
    world.signal(1, signal.SIGKILL)
    world.say(0, "go on")
    outcome = world.outcome(0)
    assert outcome.error == "ServerLost", outcome.trace
    assert "PeerLost" in outcome.bases
    assert outcome.rank == 1
    assert outcome.signal == signal.SIGKILL
    assert "server 0 (rank 1) is lost" in outcome.verdict
    assert file in outcome.text
    assert os.listdir(tmp_path) == [Path(file).name]  # keep=1  # noqa: PTH208

    (mine, weights), report = spawn(2).run(trains, str(tmp_path), 20, -1)
    assert mine == list(range(12, 20))
    assert report.updates == 20
    right, speed = start(), {n: np.zeros_like(w) for n, w in start().items()}
    for step in range(20):
        speed = {n: 0.5 * s - 0.1 * gradient(step)[n] for n, s in speed.items()}
        right = {n: (w + speed[n]).astype(w.dtype) for n, w in right.items()}
    close(weights, right)


class Broken(ps.SGD):
    def apply(self, variables: Any, gradients: Any, version: int) -> None:
        if version == 3:
            raise ValueError("the rule is broken")
        super().apply(variables, gradients, version)


def with_a_broken_rule() -> Any:
    fd.init()
    node = ps.join(start(), Broken(0.1))
    if isinstance(node, ps.Server):
        return node.serve()
    for step in range(10):
        node.pull()
        node.push(gradient(step))
    return None


def test_a_server_that_fails_says_why(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(with_a_broken_rule)
    *workers, server = world.outcomes()
    assert server.error == "ValueError"
    for worker in workers:
        assert worker.error == "ServerLost", worker.trace
        assert "the rule is broken" in worker.verdict
        assert "no snapshots were asked for" in worker.advice


# ---- gradients that are not finite ----


def worker_1_pushes_nan(mode: str) -> Any:
    os.environ["FARANDOLE_NUMERICS"] = mode
    fd.init()
    node = ps.join(start(), ps.SGD(0.25), servers=2, split_above=500)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if isinstance(node, ps.Server):
            node.serve()
        else:
            with node:
                good = gradient(0)
                table = ps.Rows([3, 30], np.array([[1.0] * 3, [np.nan if node.index else 1.0] * 3]))
                node.push(good)
                fails = mode == "error" and node.index == 1
                for _ in range(1 if fails else 2):
                    with pytest.raises(fd.NumericsError) if fails else nullcontext():
                        node.push({**good, "table": table})
    texts = [str(w.message).partition("\n")[0] for w in caught]
    return fd.nonfinite_steps(), texts


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_a_push_of_nan_is_named_with_its_worker(spawn: Spawn, mode: str) -> None:
    told = [(0, []), *[(2, ["farandole: rank 1 has a gradient that is NaN: 'table'"])] * 3]
    none: Any = (0, [])
    assert spawn(4).run(worker_1_pushes_nan, mode) == (
        told if mode == "warn" else [none, (1, []), none, none]
    )


# ---- wrong arguments ----


def refusals() -> None:
    fd.init()
    w = {"w": np.zeros((4, 2)), "n": np.zeros(3, np.float32)}

    def refused(match: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with pytest.raises(fd.InvalidArgument, match=match):
            call(*args, **kwargs)

    refused("variables are", ps.join, {}, ps.SGD())
    refused("servers is 0", ps.join, w, ps.SGD(), servers=0)
    refused("no rank is left", ps.join, w, ps.SGD(), servers=2)
    refused("max_staleness is -1", ps.join, w, ps.SGD(), max_staleness=-1)
    refused("dtype complex128", ps.join, {"w": np.zeros(2, complex)}, ps.SGD())
    differing = {"w": np.zeros((4, 2 + fd.rank())), "n": w["n"]}
    refused("ranks 0 and 1 differ in the variables.*'w'", ps.join, differing, ps.SGD())
    refused("ranks 0 and 1 differ in an option.*staleness", ps.join, w, ps.SGD(),
            max_staleness=fd.rank())  # fmt: skip
    node = ps.join(w, ps.SGD())
    if isinstance(node, ps.Server):
        node.serve()
        return
    with node:
        refused("there is no variable 'x'; there are 'w', 'n'", node.push, {"x": np.zeros(2)})
        refused(r"'w' is float64 of shape \(4,\)", node.push, {"w": np.zeros(4)})
        refused("'n' is float64", node.push, {"n": np.zeros(3)})
        refused("'n' is >f4", node.push, {"n": np.ones(3, ">f4")})
        refused("'n' is >f4", node.push, {"n": ps.Rows([1], np.ones(1, ">f4"))})
        refused("has row 4; the variable has 4", node.push, {"w": ps.Rows([4], np.zeros((1, 2)))})
        refused("rows of 'w' from 1 to 9; it has 4", node.pull, rows={"w": [1, 9]})
        refused("total is -1", node.steps, -1)
        refused("no snapshots", node.save)
    refused("has been closed", node.pull)


def test_wrong_arguments_are_refused(spawn: Spawn) -> None:
    spawn(2).run(refusals)


def resumes(folder: str, width: int, servers: int) -> None:
    fd.init()
    node = ps.join({"w": np.zeros(width)}, ps.SGD(), servers=servers,
                   snapshots=ps.Snapshots(folder))  # fmt: skip
    if isinstance(node, ps.Server):
        node.serve()
    else:
        node.close()


def test_snapshots_that_do_not_fit_are_refused(spawn: Spawn, tmp_path: Path) -> None:
    folder = str(tmp_path)
    spawn(3).run(resumes, folder, 4, 1)
    world = spawn(3)
    world.start(resumes, folder, 5, 1)
    for outcome, match in zip(world.outcomes(), ["its own error", "its own error", "'w' is"],
                              strict=True):  # fmt: skip
        assert outcome.error == "InvalidArgument", outcome.trace
        assert match in outcome.text
    world = spawn(3)
    world.start(resumes, folder, 4, 2)
    assert all(outcome.error == "InvalidArgument" for outcome in world.outcomes())
    (tmp_path / "server-0-of-1.version-9.npz").write_bytes(b"half a file")
    world = spawn(3)
    world.start(resumes, folder, 4, 1)
    assert "version-9.npz cannot be read" in world.outcomes()[2].text


# ---- values ----


@pytest.mark.parametrize("rule", [ps.SGD(0.5), ps.SGD(1, momentum=0.5), ps.Adagrad(1)])
def test_rules_refuse_whole_numbers_that_would_not_move(rule: Any) -> None:
    variables = {"n": np.ones(3, np.int64)}
    for given in (np.ones(3, np.int64), ps.Rows([1], np.ones(1, np.int64))):
        with pytest.raises(fd.InvalidArgument, match=r"gradient of 'n' is int64, which .* cannot"):
            rule.apply(variables, {"n": given}, 0)
    ps.SGD(2).apply(variables, {"n": np.ones(3, np.int64)}, 0)
    assert variables["n"].tolist() == [-1, -1, -1]


def test_shards_are_by_size() -> None:
    variables = described({
        "large": np.zeros((7, 100)), "few rows": np.zeros((1, 1000)), "b": np.zeros(90),
        "none": np.zeros((0, 3)), "one": np.array(1.0),
    })  # fmt: skip
    shards = plan(variables, 2, 1000)
    assert [(s.server, s.begin, s.end) for s in shards if s.variable == 0] == [(0, 0, 3), (1, 3, 7)]
    for at, variable in enumerate(variables):
        cover = [row for s in shards if s.variable == at for row in range(s.begin, s.end)]
        assert cover == list(range(rows_of(variable)))
    where = {variables[s.variable].name: s.server for s in shards if s.variable > 0}
    assert where["few rows"] != where["b"]


def test_parts_go_to_different_servers_where_the_fewest_bytes_are() -> None:
    variables = described({"a": np.zeros((6, 2)), "b": np.zeros((4, 2)), "c": np.zeros(1)})
    load = [0, 0, 40]
    shards = place(variables, [2, 3, 1], load)
    assert [tuple(each) for each in shards] == [
        (0, 0, 0, 3), (0, 1, 3, 6), (1, 0, 0, 1), (1, 1, 1, 2), (1, 2, 2, 4), (2, 0, 0, 1),
    ]  # fmt: skip
    assert load == [72, 64, 72]


def test_clocks() -> None:
    clocks = Clocks(3, 1)
    clocks.tick(0)
    assert clocks.may_go_on(0)
    clocks.tick(0)
    assert not clocks.may_go_on(0)
    clocks.tick(1)
    clocks.rest(2)
    assert clocks.may_go_on(0)
    clocks.wake(2)  # goes on where the slowest is
    assert clocks.clock == [2, 1, 1]
    clocks.leave(1)
    clocks.leave(2)
    assert clocks.may_go_on(0)
    assert clocks.has_left(1)
    assert not clocks.has_left(0)


def test_tickets() -> None:
    tickets = Tickets()
    assert [tickets.take(w, 0, 3) for w in (0, 1)] == [0, 1]
    assert tickets.take(2, 0, 4) == OTHER_TOTAL
    tickets.lose(1)
    assert tickets.state() == {"run": 0, "total": 3, "next": 2, "again": [0, 1]}
    assert tickets.take(2, 0, 3) == 1
    assert tickets.take(2, 0, 3) == 2
    assert tickets.take(2, 0, 3) == NONE_NOW
    tickets.finish(0)
    assert tickets.take(2, 0, 3) == ALL_DONE
    assert tickets.take(2, 1, 5) == 0
    assert tickets.take(0, 0, 3) == ALL_DONE


def test_a_restart_may_want_more_steps() -> None:
    before, after = Tickets(), Tickets()
    assert [before.take(0, 0, 2) for _ in range(3)] == [0, 1, ALL_DONE]
    after.restore(before.state())
    assert [after.take(0, 0, 4) for _ in range(3)] == [2, 3, ALL_DONE]
    assert after.take(1, 0, 2) == OTHER_TOTAL


# ---- under the launcher ----

# The steps are the workers' together: on a busy machine the others could do all before worker 1
# starts. They hold their first until it has one.
SCRIPT = """
import os, pathlib, signal, sys, time
import numpy as np
import farandole as fd
from farandole import parameter_server as ps

fd.init()
worker_1_has_one = pathlib.Path(sys.argv[2])
node = ps.join({"w": np.zeros(3)}, ps.SGD(1.0))
if node.is_server:
    print("updates", node.serve().updates)
else:
    with node:
        for step in node.steps(20):
            if node.index == 1:
                worker_1_has_one.touch()
            while not worker_1_has_one.exists() and sys.argv[1] != "all raise":
                time.sleep(0.01)
            node.pull()
            if node.index == 1 and sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if node.index == 1 and sys.argv[1] == "raise" or sys.argv[1] == "all raise":
                raise ValueError("bad sample")
            node.push({"w": np.ones(3)})
    if node.index == 1 and sys.argv[1] == "late":
        sys.exit(3)
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("kill", 0, "was killed by SIGKILL; the others go on without it"),
        ("raise", 0, "exited with code 1; the others go on without it"),
        ("late", 3, "rank 1"),
        ("all raise", 1, "ValueError: bad sample"),
    ],
)
def test_the_launcher_lets_the_others_go_on(how: str, code: int, said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, how, str(tmp_path / "started")]
    done = harness.launch(4, command, code=None)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    if how != "all raise":
        assert "updates 20" in done.stdout
