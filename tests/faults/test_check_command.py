"""`farandole check` and `farandole run --preflight`, on pretended hosts."""

from __future__ import annotations

import json
import subprocess
import sys

from harness import LIMIT, launch

HOSTS = ("-H", "a:1,b:1,c:1", "--launcher=local")


def check(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "farandole", "check", *words],
        capture_output=True, text=True, check=False, timeout=2 * LIMIT,
    )  # fmt: skip


def test_hosts_and_links_are_measured() -> None:
    done = check(*HOSTS, "--json")
    found = json.loads(done.stdout)
    assert [host["name"] for host in found["hosts"]] == ["a", "b", "c"]
    assert [(link["first"], link["second"]) for link in found["links"]] == [(0, 1), (0, 2), (1, 2)]
    for host in found["hosts"]:
        assert host["wrong"] == 0
        assert host["memory"] > 1e8
        assert abs(host["clock"]) < 1  # all are this machine
    for link in found["links"]:
        assert 0 < link["latency"] < 1
        assert min(link["there"], link["back"]) > 1e6
    assert done.returncode == int(bool(found["complaints"]))


def test_a_job_does_not_run_where_a_host_cannot_be_checked() -> None:
    ran = [sys.executable, "-c", "print('ran')"]
    done = launch(2, ran, "--preflight", "-H", "a:1,no-such-host.invalid:1", code=None)
    assert done.returncode != 0
    assert "ran" not in done.stdout
    assert "farandole run: the hosts could not be checked" in done.stderr


def test_a_preflight_and_a_check_need_hosts() -> None:
    done = launch(2, ["true"], "--preflight", code=2)
    assert "--preflight checks the links between hosts: name two or more" in done.stderr
    assert "name the hosts" in check().stderr
    assert "takes two hosts or more" in check("-H", "a", "--launcher=local").stderr
