"""`farandole run --min-np`: ranks die and join, and the result is the same as without faults."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_program import serial
from test_launcher import running

from harness import launch, wait_until

PROGRAM = Path(__file__).with_name("elastic_program.py")
QUICK = ("--blacklist-cooldown-range", "0.1", "1", "--no-prefix")


def job(
    ranks: int, *options: str, program: tuple[str, ...] = (), code: int | None = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *program]
    return launch(ranks, command, *QUICK, *options, code=code, **env)


def results(done: subprocess.CompletedProcess[str]) -> list[tuple[int, int]]:
    """Steps and value of each worker that came to the end."""
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(int(line[1]), int(line[2])) for line in lines if line[:1] == ["done"]]


def assert_serial(done: subprocess.CompletedProcess[str], ranks: int, steps: int) -> None:
    found = results(done)
    assert len(found) == ranks, done.stdout + done.stderr
    assert found == [(found[0][0], serial(found[0][0]))] * ranks, done.stdout + done.stderr
    assert found[0][0] >= steps


def worlds(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The workers of each world, as the launcher prints them."""
    lines = [line.removeprefix("farandole: world ") for line in done.stderr.splitlines()]
    return [line.partition(": ")[2] for line in lines if line[:1].isdigit()]


WHERE = ["step", "sync", "open"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_is_lost_and_the_result_is_that_of_no_fault(where: str, who: int) -> None:
    done = job(3, "--min-np=2", program=("8", f"{where}:{who}:1"))
    left = ["0", "1", "2"]
    left.remove(str(who))
    first, second, *_ = worlds(done)
    assert first == "workers 0, 1, 2"
    # A new worker may have come before the others have met.
    assert second in (f"workers {', '.join(left)}", f"workers {', '.join([*left, '3'])}")
    found = results(done)
    assert 2 <= len(found) <= 3
    assert set(found) == {(8, serial(8))}, done.stdout
    assert f"worker {who} (pid" in done.stderr
    assert "was killed by SIGKILL; the job goes on with 2 workers" in done.stderr


@pytest.mark.parametrize("where", WHERE)
def test_a_second_one_is_lost_while_the_others_recover(where: str) -> None:
    done = job(4, "--min-np=2", program=("8", "step:1:1", f"{where}:0:2"))
    first, second, third, *_ = worlds(done)
    assert first == "workers 0, 1, 2, 3"
    # New workers may have come before the others have met.
    assert second in ("workers 0, 2, 3", "workers 0, 2, 3, 4")
    assert third in ("workers 2, 3", "workers 2, 3, 4", "workers 2, 3, 4, 5")
    assert set(results(done)) == {(8, serial(8))}, done.stdout


def test_another_worker_takes_its_place_and_gets_the_state() -> None:
    done = job(3, "--min-np=2", program=("8", "3", "step:0:1"))
    assert_serial(done, 3, 8)
    assert worlds(done)[:3] == ["workers 0, 1, 2", "workers 1, 2", "workers 1, 2, 3"]


def test_with_too_few_the_others_wait_for_another() -> None:
    done = job(3, "--min-np=3", program=("8", "step:1:1"))
    assert worlds(done) == ["workers 0, 1, 2", "workers 0, 2, 3"]
    assert_serial(done, 3, 8)
    assert "the others wait until there are 3 again" in done.stderr


@pytest.mark.parametrize("where", ["meet", "open", "step"])
@pytest.mark.parametrize("who", [0, 3])
def test_of_several_hosts_ranks_are_lost_twice(where: str, who: int) -> None:
    faults = ("step:1:1", f"{where}:{who}:2")
    hosts = ("-H", "a:2,b:2", "--launcher=local")
    done = job(4, "--min-np=2", *hosts, program=("8", "4", *faults))
    assert_serial(done, 4, 8)
    assert worlds(done)[:2] == ["workers 0, 1, 2, 3", "workers 0, 2, 3"]
    third = worlds(done)[2].removeprefix("workers ").split(", ")
    assert {"0", "2", "3"} - set(third) == {str(who)}


def test_a_host_is_lost_and_comes_back() -> None:
    hosts = ("-H", "a:2,b:2", "--launcher=local")
    done = job(4, "--min-np=2", *hosts, program=("8", "4", "agent:2:1"))
    assert_serial(done, 4, 8)
    assert worlds(done)[0] == "workers 0, 1, 2, 3"
    assert worlds(done)[1].startswith("workers 0, 1")
    assert "workers 2, 3 were lost with it; the job goes on with 2 workers" in done.stderr


def test_where_all_hosts_are_lost_the_job_ends() -> None:
    hosts = ("-H", "a:1,b:1", "--launcher=local")
    done = job(2, "--min-np=1", *hosts, program=("8", "2", "agent:0:1", "agent:1:1"), code=1)
    lost = [line for line in done.stderr.splitlines() if "its agent is gone" in line]
    assert sorted(line.split()[2] for line in lost) == ["a:", "b:"], "each is told of once"


def test_too_few_workers_are_waited_for_and_then_it_ends() -> None:
    rests = ("--blacklist-cooldown-range", "100", "100")
    done = job(2, "--min-np=2", "--elastic-timeout=9", *rests, program=("8", "step:1:1"), code=75)
    assert not results(done)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "farandole: the job is given up: fewer than 2 workers for 9 s (--elastic-timeout); last, "
        "worker 1 (pid "
    ), done.stderr
    assert last.endswith(") was killed by SIGKILL")


def test_the_number_of_worlds_is_limited() -> None:
    faults = ("step:1:1", "step:2:2")
    done = job(3, "--min-np=1", "--reset-limit=1", program=("8", *faults), code=137)
    assert not results(done)
    assert "the job is given up: 1 world after the first one ended early" in done.stderr
    done = job(3, "--min-np=1", "--reset-limit=9", program=("8", *faults))
    assert set(results(done)) == {(8, serial(8))}


def test_where_all_are_lost_the_job_ends() -> None:
    done = job(2, "--min-np=1", program=("8", "step:0:1", "step:1:1"), code=137)
    assert "was killed by SIGKILL" in done.stderr.splitlines()[-1]


def test_a_program_that_fails_everywhere_ends_with_its_error() -> None:
    command = [sys.executable, "-c", "import farandole as fd; fd.init(); 1 / 0"]
    done = launch(2, command, "--min-np=1", *QUICK, code=1)
    assert "ZeroDivisionError: division by zero" in done.stderr.splitlines()[-1]
    assert "but first" not in done.stderr, "the other one failed before"


def test_a_program_that_is_not_elastic_ends_with_the_first_rank_that_is_lost() -> None:
    script = """if True:
        import os, farandole as fd, numpy as np
        fd.init()
        for step in range(9):
            if fd.rank() == step == 1: os.kill(os.getpid(), 9)
            fd.all_reduce(np.ones(1))
    """
    done = launch(
        3, [sys.executable, "-c", script], "--min-np=2", *QUICK, "--reset-limit=0", code=None
    )
    assert done.returncode in (1, 137)  # the others may have ended before they were waited for
    assert "PeerLost: rank 1" in done.stderr


def test_workers_beyond_np_join() -> None:
    done = job(1, "--min-np=1", "--max-np=3", program=("8", "3"))
    assert_serial(done, 3, 8)


def test_later_workers_have_files_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    done = job(2, "--min-np=1", f"--output-dir={folder}", program=("8", "2", "step:1:1"))
    assert_serial(done, 2, 8)
    said = [(folder / f"rank-{worker}.out").read_text().splitlines()[-1] for worker in (0, 2)]
    assert said[0] == said[1] == f"done {results(done)[0][0]} {results(done)[0][1]}"


def test_each_world_has_traces_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    job(2, "--min-np=1", program=("8", "2", "step:1:1"), FARANDOLE_TRACE=str(folder))
    for world, ranks in ((1, 2), (2, 1), (3, 2)):
        about = json.loads((folder / f"world-{world}" / "trace.json").read_text())["otherData"]
        assert (about["ranks"], about["missing_ranks"]) == (ranks, [])
    file = tmp_path / "timeline.json"
    job(2, "--min-np=1", program=("8", "2", "step:1:1"), FARANDOLE_TIMELINE=str(file))
    names = {f"timeline.world-{world}.json" for world in (1, 2, 3)}
    assert {path.name for path in tmp_path.iterdir()} == {*names, "traces"}


def test_the_launcher_alone_says_who_is_who() -> None:
    script = "import farandole as fd; fd.init(rank=0, size=1)"
    done = launch(1, [sys.executable, "-c", script], "--min-np=1", *QUICK, code=1)
    assert "InvalidArgument: init(rank=…) in an elastic job" in done.stderr


def test_who_has_come_to_the_end_is_not_waited_for(tmp_path: Path) -> None:
    """Rank 1 dies as its function returns: rank 0 has returned, and rank 2 is still inside."""
    script = f"""if True:
        import os, time, farandole as fd, numpy as np
        from farandole import _elastic, _world
        from farandole.common._worlds import Framework
        from farandole.common.elastic import ObjectState, run_fn
        there = {str(tmp_path / "there")!r}
        fd.init()
        def train(state):
            worker = os.environ["FARANDOLE_WORKER"]
            fd.barrier()
            if worker == "1": time.sleep(0.5); os.kill(os.getpid(), 9)
            if worker == "2" and _elastic.world() == 1: fd.all_reduce(np.ones(1))
        run_fn(train, Framework(_world.init))(ObjectState(step=0))
        if fd.size() == 1: open(there, "w").close()
        while not os.path.exists(there): time.sleep(0.01)
    """
    rests = ("--blacklist-cooldown-range", "100", "100")
    done = launch(3, [sys.executable, "-c", script], *QUICK, "--min-np=2", *rests)
    assert worlds(done) == ["workers 0, 1, 2", "worker 2"]
    assert "farandole: worker 0 came to the end of training before the others\n" in done.stderr


def test_a_rank_that_fails_is_not_waited_for_and_is_no_end_of_training() -> None:
    """Its process takes a while to end, so two ranks meet again only when a new worker has come."""
    script = """if True:
        import atexit, time, farandole as fd
        from farandole import _elastic, _world
        from farandole.common._worlds import Framework
        from farandole.common.elastic import ObjectState, run_fn
        fd.init()
        def train(state):
            fd.barrier()
            if fd.rank() == 1 and _elastic.world() == 1:
                atexit.register(time.sleep, 1)
                raise ValueError("of one rank")
            fd.barrier()
        run_fn(train, Framework(_world.init))(ObjectState(step=0))
    """
    done = launch(2, [sys.executable, "-c", script], *QUICK, "--min-np=2")
    assert worlds(done) == ["workers 0, 1", "workers 0, 2"]
    done = launch(3, [sys.executable, "-c", script], *QUICK, "--min-np=2")
    assert worlds(done)[:2] == ["workers 0, 1, 2", "workers 0, 2"]
    assert done.stderr.endswith("with code 1; the job has come to its end without it\n")


@pytest.mark.parametrize("who", [0, 1])
def test_who_fails_after_training_fails_the_job(who: int) -> None:
    """It need not be the last rank to end."""
    script = f"""if True:
        import os, time, farandole as fd
        from farandole import _world
        from farandole.common._worlds import Framework
        from farandole.common.elastic import ObjectState, run_fn
        fd.init()
        run_fn(lambda state: fd.barrier(), Framework(_world.init))(ObjectState(step=0))
        fd.shutdown()
        worker = int(os.environ["FARANDOLE_WORKER"])
        time.sleep(worker / 2)
        if worker == {who}: raise SystemExit(3)
    """
    done = launch(2, [sys.executable, "-c", script], *QUICK, "--min-np=1", code=3)
    assert f"worker {who} (pid " in done.stderr.splitlines()[-1]


def test_who_is_still_on_the_way_is_not_waited_for_at_the_end() -> None:
    script = f"""if True:
        import os, runpy, sys, time
        if os.environ["FARANDOLE_WORKER"] == "2": time.sleep(1000)
        sys.argv = ["{PROGRAM}", "30", "step:1:1"]
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
    command = [sys.executable, "-c", script]
    done = launch(2, command, *QUICK, "--min-np=1", "--patience=0.2")
    assert results(done) == [(30, serial(30))]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("farandole: worker 2 (pid ")
    assert last.endswith(" was killed by SIGTERM; the job has come to its end without it")


def test_a_program_that_never_asks_for_a_place_ends() -> None:
    script = "import os, time; time.sleep(2 * int(os.environ['FARANDOLE_WORKER']))"
    done = launch(2, [sys.executable, "-c", script], *QUICK, "--min-np=1")
    assert "before it had a place: no other one is started" in done.stderr
    assert "worker 2" not in done.stderr


@pytest.mark.parametrize(("least", "code"), [(1, 0), (2, 75)])
def test_a_worker_that_ends_without_a_place_is_not_waited_for(least: int, code: int) -> None:
    script = """if True:
        import os, farandole as fd
        if os.environ["FARANDOLE_WORKER"] == "1": raise SystemExit(0)
        fd.init()
        print("alone" if fd.size() == 1 else "with others")
    """
    done = launch(2, [sys.executable, "-c", script], *QUICK, f"--min-np={least}", code=code)
    assert done.stdout == ("" if code else "alone\n")
    assert "exited with code 0 before it had a place: no other one is started" in done.stderr


def test_a_command_may_start_its_program_again() -> None:
    again = f"{sys.executable} {PROGRAM} 8 3 step:1:1 || {sys.executable} {PROGRAM} 8 3"
    done = launch(3, ["bash", "-c", again], *QUICK, "--min-np=1")
    assert_serial(done, 3, 8)
    assert worlds(done)[0] == "workers 0, 1, 2"
    assert sorted(worlds(done)[-1].removeprefix("workers ")) == sorted("0, 2, 1")


def test_what_a_worker_starts_is_no_worker() -> None:
    script = """if True:
        import subprocess, sys, farandole as fd
        fd.init()
        program = "import farandole as fd; fd.init()"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        print(done.stderr)
    """
    done = launch(1, [sys.executable, "-c", script], "--min-np=1", *QUICK)
    assert "a worker of an elastic job is one process" in done.stdout


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """The file of hosts that the discovery script beside it prints."""
    listed, script = tmp_path / "hosts", tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o700)
    return listed


def test_hosts_come_and_go(hosts: Path) -> None:
    hosts.write_text("a:2\n")
    options = ("--min-np=1", f"--host-discovery-script={hosts.parent}/discover", "--launcher=local")
    with running(2, [sys.executable, str(PROGRAM), "100000"], *options, *QUICK) as work:
        assert work.process.stdout is not None
        seen = work.read_until("world 1: rank 0 of 2 at 0")
        hosts.write_text("a:2\nb\n")
        while not any(line.startswith("world 2: rank 2 of 3") for line in seen):
            seen.append(work.process.stdout.readline())
        hosts.write_text("b:1\n")
        while not any(line.startswith("world 3: rank 0 of 1") for line in seen):  # worker 2
            seen.append(work.process.stdout.readline())
        work.process.send_signal(signal.SIGTERM)
        code, _, err = work.end()
        assert code == 143, err
        wait_until(lambda: not work.living(), "all processes of the job to end")


def test_a_job_that_waits_for_hosts_is_ended_by_ctrl_c(hosts: Path) -> None:
    hosts.write_text("one:x\n")
    options = ("--min-np=1", f"--host-discovery-script={hosts.parent}/discover", "--launcher=local")
    with running(2, ["true"], *options, *QUICK) as work:
        assert work.process.stderr is not None
        assert "'one:x', which" in work.process.stderr.readline()
        work.process.send_signal(signal.SIGINT)
        code, _, err = work.end()
        assert (code, err) == (130, "farandole: the job was ended by SIGINT\n")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--min-np=3",), "--min-np 3, -np 2, --max-np 2: each is at most the next"),
        (("--max-np=1",), "--min-np 2, -np 2, --max-np 1: each is at most the next"),
        (("--min-np=x",), "--min-np takes a number from 1 to 4194304, not 'x'"),
        (("--min-np=1", "--elastic-timeout=-1"), "--elastic-timeout takes a number of seconds"),
        (("--min-np=1", "--blacklist-cooldown-range", "9", "1"), "the first is at most the second"),
        (
            ("--min-np=1", "--slots-per-host=2"),
            "--slots-per-host goes with --host-discovery-script",
        ),
        (("--host-discovery-script=nowhere",), "--host-discovery-script: nowhere is not there"),
        (("--min-np=1", "--max-np=4", "-H", "a:3"), "--max-np is 4, but the hosts have 3 slots"),
    ],
)
def test_what_makes_no_sense_is_refused(options: tuple[str, ...], says: str) -> None:
    assert says in launch(2, ["true"], *options, code=2).stderr


def test_what_does_nothing_is_told() -> None:
    done = launch(1, ["true"], "--reset-limit=3")
    assert "--reset-limit not used: the number of ranks is fixed without --min-np" in done.stderr
