"""The faults of report.py. Numbers are those of docs/reliability.md's rows."""

from __future__ import annotations

from typing import NamedTuple

TWO = "two"


class Row(NamedTuple):
    number: str
    done: str
    how: str  # a key of report_program.FAULTS, or what begin() knows
    culprit: int = 1
    hosts: str = ""  # TWO: 2 ranks on each of two
    environment: tuple[tuple[str, str], ...] = ()
    needs_a_cable: bool = False


_LONG = (("FARANDOLE_TIMEOUT", "60"),)

ROWS = [
    Row("1", "a rank is killed (SIGKILL) while it reduces", "SIGKILL"),
    Row("1", "a rank crashes (SIGSEGV)", "SIGSEGV"),
    Row("2", "a rank is stopped (SIGSTOP) until the deadline of 5 s", "stop"),
    Row("2", "a rank is stopped for 3 s", "short stop", environment=_LONG),
    Row("3", "a rank hangs in its own program until the deadline of 5 s", "stuck"),
    Row("4", "a rank raises an exception", "raise"),
    Row("4", "a rank calls `sys.exit(7)`", "sys.exit(7)"),
    Row("4", "a rank calls `os._exit(0)`", "os._exit(0)"),
    Row("5", "a rank reduces an array of another size", "count"),
    Row("8", "a rank comes to its end early", "sys.exit(0)"),
    Row("10", "a rank has another setting", "setting"),
    Row("11", "a rank ends before `init()`", "absent"),
    Row("20", "a rank is killed while its forked child lives", "child"),
    Row("21", "a rank gets SIGINT", "SIGINT"),
    Row("1", "a rank is killed (SIGKILL) while it reduces", "SIGKILL", 3, TWO),
    Row("1", "rank 0 is killed", "SIGKILL", 0, TWO),
    Row("2", "a rank is stopped until the deadline of 5 s", "stop", 3, TWO),
    Row("2", "rank 0 is stopped until the deadline of 5 s", "stop", 0, TWO),
    Row("2", "a rank is stopped for 3 s", "short stop", 3, TWO, _LONG),
    Row("4", "a rank raises an exception", "raise", 3, TWO),
    Row("4", "a rank calls `os._exit(0)`", "os._exit(0)", 3, TWO),
    Row("8", "a rank comes to its end early", "sys.exit(0)", 3, TWO),
    Row("10", "a rank has another setting", "setting", 3, TWO),
    Row("23", "a rank runs out of descriptors", "descriptors", 3, TWO),
    Row("15", "the cable between the hosts is cut", "cable", 3, TWO, _LONG, True),
]

AGENTS, ELASTIC = "tests/unit/test_agents.py", "tests/faults/test_elastic_jobs.py"
SERVER = "tests/ranks/test_parameter_server.py"

# Faults with tests of their own, or the reason why there is none.
ELSEWHERE: list[tuple[str, str, list[str]]] = [
    ("16", "the network falls into parts", ["tests/faults/test_partitions.py"]),
    ("34", "messages that no rank sends", ["tests/cpp/test_malformed.cpp", "tests/fuzz/run.py"]),
    ("35", "hosts whose names mean something to a shell",
     [f"{AGENTS}::test_a_host_is_a_name_and_nothing_else"]),
    ("36", "a shell that prints, a host that cannot be used",
     [f"{AGENTS}::test_an_agent_is_heard_behind_what_shells_print",
      "tests/faults/test_launcher_hosts.py::test_a_host_that_cannot_be_used_is_named"]),
    ("37", "a core dump that takes seconds. Not tested: that takes gigabytes, and a machine that "
     "writes core files", []),
    ("39", "hosts whose clocks differ",
     ["tests/unit/test_trace_clocks.py::test_a_merged_trace_is_by_rank_0s_clock"]),
    ("40", "a device is lost, a call of its driver or of NCCL fails",
     ["tests/cuda/test_device_faults.py", "tests/cuda/test_nccl_faults.py"]),
    ("41", "an elastic job loses ranks",
     [f"{ELASTIC}::test_a_rank_is_lost_and_the_result_is_that_of_no_fault",
      f"{ELASTIC}::test_of_several_hosts_ranks_are_lost_twice"]),
    ("42", "a host of an elastic job comes back",
     [f"{ELASTIC}::test_a_host_is_lost_and_comes_back", f"{ELASTIC}::test_hosts_come_and_go"]),
    ("43", "rank 0 of an elastic job is lost",
     [f"{ELASTIC}::test_a_rank_is_lost_and_the_result_is_that_of_no_fault"]),
    ("44", "a second rank is lost while the others recover",
     [f"{ELASTIC}::test_a_second_one_is_lost_while_the_others_recover"]),
    ("45", "a worker or a server of a parameter server is lost",
     [f"{SERVER}::test_a_worker_may_die",
      f"{SERVER}::test_a_lost_server_is_named_with_its_last_snapshot"]),
]  # fmt: skip
