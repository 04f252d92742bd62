"""farandole info --why for arrays on CUDA devices: which way, and why."""

from __future__ import annotations

import json

import pytest

from farandole import cli


def choice(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert cli.main(["info", "--json", "--why", *arguments]) == 0
    facts = json.loads(capfd.readouterr().out)
    return {"choice": facts["choice"], **{c["name"]: c["why"] for c in facts["candidates"]}}


def test_by_size_and_by_who_shares_a_device(capfd: pytest.CaptureFixture[str]) -> None:
    assert choice(capfd, "1K", "--memory", "device")["choice"] == "spin"
    small = choice(capfd, "1K", "--memory", "shared-device")
    assert small["choice"] == "staged"
    assert "their kernels may not run at once" in small["spin"]
    assert "their kernels may not run at once" in small["lanes"]
    assert choice(capfd, "1M", "--memory", "device")["choice"] == "lanes"
    large = choice(capfd, "64M", "--memory", "device")
    assert large["choice"] == "step"
    assert "takes 262144 bytes at most here" in large["spin"]
    for collective in ("reduce", "gather", "scatter"):
        rooted = choice(capfd, "64M", "--memory", "device", "--collective", collective)
        assert rooted["choice"] == "step", collective


def test_copies_that_overlap(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    took = []
    for piece in ("4M", "1G"):
        monkeypatch.setenv("FARANDOLE_STAGED_PIECE_BYTES", piece)
        assert cli.main(["info", "--json", "--why", "64M", "--memory", "device"]) == 0
        rows = json.loads(capfd.readouterr().out)["candidates"]
        took.append(next(row["seconds"] for row in rows if row["name"] == "staged"))
    assert took[0] < 0.7 * took[1]


def test_what_is_forced(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FARANDOLE_DEVICE_PATH", "spin")
    assert choice(capfd, "1K", "--memory", "shared-device")["choice"] == "spin"
    monkeypatch.setenv("FARANDOLE_DEVICE_PATH", "lanes")
    assert choice(capfd, "1K", "--memory", "shared-device")["choice"] == "lanes"
    gathered = choice(capfd, "64M", "--memory", "device", "--collective", "all_gather")
    assert gathered["choice"] == "step"
    assert gathered["lanes"] == "takes 4194304 bytes at most here"
    monkeypatch.setenv("FARANDOLE_DEVICE_PATH", "spin")
    assert cli.main(["info", "--why", "64M", "--memory", "device", "--ranks", "4"]) == 0
    shown = capfd.readouterr().out
    assert "4 ranks of this host with a device each: step" in shown
    assert "none measured here" in shown
    assert shown.endswith("FARANDOLE_DEVICE_PATH=spin chooses that one where it can run\n")
    assert cli.main(["info", "--why", "64M", "--memory", "device", "--collective", "dance"]) == 2


def test_nccl_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARANDOLE_NCCL", "/nowhere.so")
    fast = choice(capfd, "64M", "--memory", "device", "--level", "fast")
    assert fast["choice"] == "step"
    assert fast["nccl"] == "there is no NCCL: /nowhere.so cannot be opened"
    shared = choice(capfd, "64M", "--memory", "shared-device", "--level", "fast")
    assert shared["nccl"] == "NCCL takes one rank on a device, and these share one"
