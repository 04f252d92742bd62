"""The values behind an elastic job: who is in the next world, and where workers may be started."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from farandole._launch.elastic import worlds
from farandole._launch.elastic.discovery import Discovery, hosts_in
from farandole._launch.elastic.roster import Roster
from farandole._launch.elastic.slots import Cooldown, Slots
from farandole._launch.job import LaunchError
from farandole._launch.polling import wait
from farandole._launch.ranks import Rendezvous
from harness import LIMIT, wait_until

MANY = 99


def roster(hosts: Sequence[str], *, first: int = 2, least: int = 1) -> Roster:
    """Workers 0, 1, … on these hosts."""
    made = Roster(first, least)
    for number, host in enumerate(hosts):
        made.add(number, host)
    return made


def seek(made: Roster, *numbers: int, has_state: bool = False, now: float = 0.0) -> None:
    for number in numbers:
        worker = made.get(number)
        assert worker is not None
        made.seek(worker, 100 + number, worker.world, has_state, now)


def end(made: Roster, number: int) -> bool:
    worker = made.get(number)
    assert worker is not None
    return made.remove(worker)


def form(made: Roster, most: int = MANY) -> list[int]:
    assert made.may_form(most)
    return [worker.number for worker in made.form(most)]


def test_the_first_world_waits_for_all_and_others_for_the_least() -> None:
    made = roster("aaa", first=3, least=2)
    seek(made, 0, 1)
    assert not made.may_form(MANY)
    seek(made, 2)
    assert form(made) == [0, 1, 2]
    assert end(made, 1)
    seek(made, 0)
    assert [worker.number for worker in made.awaited] == [2]
    assert not made.may_form(MANY)
    seek(made, 2)
    assert form(made) == [0, 2]


def test_with_fewer_than_the_least_there_is_none() -> None:
    made = roster("aa", least=2)
    seek(made, 0, 1)
    form(made)
    end(made, 0)
    seek(made, 1)
    assert not made.may_form(MANY)
    made.add(2, "a")
    seek(made, 2)
    assert form(made) == [1, 2]


def test_once_a_worker_has_ended_well_one_is_enough() -> None:
    made = roster("aa", least=2)
    seek(made, 0, 1)
    form(made)
    end(made, 0)
    made.ended_well = True
    seek(made, 1)
    assert form(made) == [1]


def test_who_has_done_is_not_waited_for() -> None:
    made = roster("aaa", first=3, least=3)
    seek(made, 0, 1, 2)
    form(made)
    done = made.get(1)
    assert done is not None
    done.is_done = True
    end(made, 2)
    seek(made, 0, has_state=True)
    assert form(made) == [0]


def test_newcomers_do_not_train_anew_what_has_come_to_its_end() -> None:
    made = roster("aaa", first=2, least=1)
    seek(made, 0, 1)
    form(made)
    for number in (0, 1):
        done = made.get(number)
        assert done is not None
        done.is_done = True
    seek(made, 2)
    assert not made.may_form(3)
    end(made, 0)
    seek(made, 1, has_state=True)  # a command that calls elastic.run once more
    assert form(made) == [1, 2]


def test_who_has_failed_is_not_waited_for_and_ends_nothing() -> None:
    made = roster("aaa", first=3, least=2)
    seek(made, 0, 1, 2)
    form(made)
    failed = made.get(1)
    assert failed is not None
    failed.has_failed = True
    assert not made.finished
    seek(made, 0, 2, has_state=True)
    assert form(made) == [0, 2]
    other = made.get(2)
    assert other is not None
    other.has_failed = True
    seek(made, 0, has_state=True)
    assert not made.may_form(3)


def test_who_has_the_state_is_rank_0_and_hosts_stay_together() -> None:
    made = roster("abab", first=4)
    seek(made, 0, 1, 2, 3)
    assert form(made) == [0, 2, 1, 3]
    end(made, 0)
    seek(made, 2)
    seek(made, 1, 3, has_state=True)
    assert form(made) == [1, 3, 2]
    assert [worker.rank for worker in made.members] == [0, 2, 1]


def test_no_more_than_the_most_and_those_with_the_state_first() -> None:
    made = roster("aaaa", first=3)
    seek(made, 1, 2, 3)
    assert form(made, 2) == [1, 2]
    seek(made, 1, 2, has_state=True)
    seek(made, 0)
    assert form(made, 3) == [1, 2, 0]


def test_who_has_not_heard_of_its_place_is_told_again() -> None:
    made = roster("aa")
    seek(made, 0, 1)
    form(made)
    worker = made.get(0)
    assert worker is not None
    assert not made.seek(worker, 100, 0, False, 1.0)
    assert not worker.seeks
    assert made.seek(worker, 100, 1, True, 1.0)
    assert worker.seeks


def test_a_command_that_starts_its_program_again_is_a_newcomer() -> None:
    made = roster("aa")
    seek(made, 0, 1)
    form(made)
    worker = made.get(0)
    assert worker is not None
    assert made.seek(worker, 999, 0, False, 1.0)
    assert [each.number for each in made.newcomers] == [0]
    seek(made, 1, has_state=True)
    assert form(made) == [1, 0]


def test_a_host_is_left_when_others_have_the_state() -> None:
    made = roster("a", first=1)
    seek(made, 0)
    form(made)
    made.add(1, "b")
    made.leave_hosts(["a"])
    assert not made.leaving  # nobody would be left
    seek(made, 1)
    assert [worker.number for worker in made.leaving] == [0]
    seek(made, 0, has_state=True)
    assert form(made) == [0, 1]  # it hands over
    seek(made, 0, 1, has_state=True)
    assert form(made) == [1]


def test_slots_rest_twice_as_long_after_each_loss() -> None:
    slots = Slots(Cooldown(1.0, 3.0))
    slots.set({"a": 2})
    slots.take("a", 0, 0.0)
    slots.take("a", 1, 0.0)
    assert slots.free(0.0) == []
    slots.lose(1, 10.0)
    # It lived longer than the longest rest: the first loss.
    assert (slots.free(10.9), slots.free(11.0)) == ([], ["a"])
    for worker, now, rest in ((2, 11.0, 2.0), (3, 13.0, 3.0), (4, 16.0, 3.0)):
        slots.take("a", worker, now)
        slots.lose(worker, now)
        assert slots.due(now) == now + rest
    slots.take("a", 5, 19.0)
    slots.leave(5)
    assert slots.free(19.0) == ["a"]


def test_slots_of_a_host_that_goes_stay_while_a_worker_lives() -> None:
    slots = Slots(Cooldown(1.0, 3.0))
    slots.set({"a": 2, "b": 1})
    slots.take("a", 0, 0.0)
    slots.set({"b": 2})
    assert slots.free(0.0) == ["b", "b"]
    assert len(slots) == 3
    slots.lose(0, 0.0)
    slots.set({"b": 2})
    assert len(slots) == 2
    slots.set({"a": 1, "b": 2})
    assert sorted(slots.free(9.0)) == ["a", "b", "b"]


def test_places_are_those_of_the_environment() -> None:
    made = roster("aab", first=3)
    seek(made, 0, 1, 2)
    made.form(MANY)
    told = worlds.places(
        made.members,
        4,
        Rendezvous("10.0.0.1", 4711, "unused"),
        {"FARANDOLE_TRACE": "t", "HOROVOD_TIMELINE": "x/y.json"},
        pretended=True,
    )
    words = [json.loads(said) for _, said in told]
    assert [w["world"] for w in words] == [4, 4, 4]
    environments = [w["environment"] for w in words]
    assert [e["RANK"] for e in environments] == ["0", "1", "2"]
    assert [e["LOCAL_RANK"] for e in environments] == ["0", "1", "0"]
    assert [e["LOCAL_WORLD_SIZE"] for e in environments] == ["2", "2", "1"]
    for environment in environments:
        assert environment["MASTER_ADDR"] == "10.0.0.1"
        assert environment["MASTER_PORT"] == "4711"
        assert environment["FARANDOLE_RESTART_COUNT"] == "4"
        assert environment["FARANDOLE_SPLIT_HOSTS"] == "2,1"
        assert environment["FARANDOLE_TRACE"] == "t/world-4"
        assert environment["HOROVOD_TIMELINE"] == "x/y.world-4.json"
        assert "FARANDOLE_RUN_ID" not in environment


def test_what_a_discovery_script_says() -> None:
    lines = ["a:2", "", "b  # the new one", "[fd00::1]:3", "a:1"]
    assert hosts_in(lines, 4) == {"a": 3, "b": 4, "[fd00::1]": 3}
    for wrong in ("a:x", "a:0", "-oProxyCommand=x", "a b"):
        with pytest.raises(LaunchError, match=r"said '"):
            hosts_in([wrong], 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exit 3", "ended with code 3"),
        ("echo 'a;b'", "is no name of a host"),
        ("sleep 100", "did not end within 0.3 s"),
    ],
)
def test_a_discovery_script_that_fails_is_told(tmp_path: Path, text: str, says: str) -> None:
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o700)
    discovery = Discovery(str(script), 1, 0.3 if "sleep" in text else LIMIT)
    deadline = time.monotonic() + LIMIT
    while not discovery.trouble and time.monotonic() < deadline:
        ready = wait(discovery.descriptors(), discovery.due())
        assert discovery.turn(ready, time.monotonic()) is None
    assert says in discovery.trouble
    discovery.close()


def test_what_a_discovery_script_has_started_ends_with_it(tmp_path: Path) -> None:
    script, pid = tmp_path / "script", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\nsleep 1000 & echo $! > {pid}.new; mv {pid}.new {pid}; wait\n")
    script.chmod(0o700)
    discovery = Discovery(str(script), 1, LIMIT)
    discovery.turn(set(), time.monotonic())
    wait_until(pid.exists, "the script to begin")
    discovery.close()
    stat = Path(f"/proc/{pid.read_text().strip()}/stat")
    wait_until(lambda: not stat.exists() or ") Z " in stat.read_text(), "its child to end")
