"""The learning rate of a global batch: numbers and its picture."""

from __future__ import annotations

import doctest
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole as fd
from farandole import learning_rate
from farandole._draw.curve import HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw_curve
from farandole._draw.scene import BLUE, Line
from farandole.learning_rate import LearningRate, ramp, scaled


def test_rates_grow_with_the_batch_or_its_root() -> None:
    assert scaled(0.1, 4) == pytest.approx(0.4)
    assert scaled(0.1, 4, "sqrt") == pytest.approx(0.2)
    assert scaled(0.1, 4, "none") == 0.1
    assert LearningRate(0.1, batch_size=1024, base_batch_size=256).peak == pytest.approx(0.4)
    assert LearningRate(0.1, batch_size=1024).peak == 0.1


def test_warmup_is_a_line_per_step_from_the_base_to_the_full_rate() -> None:
    rate = LearningRate(0.1, batch_size=80, base_batch_size=10, warmup_steps=7)
    assert [rate(step) for step in range(10)] == pytest.approx(
        [0.1 + 0.7 * step / 7 for step in range(7)] + [0.8] * 3
    )
    colder = LearningRate(0.1, batch_size=8, warmup_steps=4, warmup_from=0)
    assert [colder(step) for step in range(5)] == pytest.approx([0, 0.025, 0.05, 0.075, 0.1])
    assert ramp(0.25, 2, 4) == 2.5


def test_decay_ends_at_the_last_step_and_stays() -> None:
    options: dict[str, Any] = {
        "batch_size": 8, "warmup_steps": 2, "total_steps": 10, "end": 0.1, "warmup_from": 0.0,
    }  # fmt: skip
    line = LearningRate(0.9, decay="linear", **options)
    assert [line(s) for s in (0, 1, 2, 6, 10, 99)] == pytest.approx([0, 0.45, 0.9, 0.5, 0.1, 0.1])
    cosine = LearningRate(0.9, decay="cosine", **options)
    expected = [0.1 + 0.8 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
    assert [cosine(s) for s in range(2, 11)] == pytest.approx(expected)
    assert isinstance(cosine(3), float)
    steps = np.arange(12)
    assert cosine(steps).tolist() == pytest.approx([cosine(s) for s in range(12)])
    assert LearningRate(**cosine.config())(5) == cosine(5)
    assert "total_steps=10" in repr(cosine)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base": 0}, "base is 0"),
        ({"base": "x"}, "base is 'x'"),
        ({"base": math.inf}, "base is inf"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"base_batch_size": 2.5}, "base_batch_size is 2.5"),
        ({"scaling": "cubic"}, "scaling is 'cubic'"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"warmup_steps": True}, "warmup_steps is True"),
        ({"warmup_from": -0.1}, "warmup_from is -0.1"),
        ({"decay": "steps"}, "decay is 'steps'"),
        ({"decay": "linear"}, "total_steps is None; to decay"),
        ({"decay": "cosine", "total_steps": 5, "warmup_steps": 5}, "more than warmup_steps, 5"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(fd.InvalidArgument, match=words):
        LearningRate(**({"base": 0.1, "batch_size": 8} | options))


def test_examples_in_docstrings() -> None:
    results = doctest.testmod(learning_rate)
    assert results.failed == 0
    assert results.attempted == 3


def test_one_call_draws_it(tmp_path: Path) -> None:
    rate = LearningRate(0.1, batch_size=32, base_batch_size=8, warmup_steps=50)
    for name in ("rate.svg", "rate.png"):
        rate.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    text = (tmp_path / "rate.svg").read_text()
    ET.fromstring(text)
    assert "batch 32: 0.4 (linear from 0.1 at 8), warmup of 50 steps" in text
    with pytest.raises(fd.InvalidArgument, match=r"ends in \.svg or \.png"):
        rate.plot(tmp_path / "rate.gif")
    with pytest.raises(fd.InvalidArgument, match="steps is 0"):
        rate.plot(tmp_path / "rate.svg", steps=0)


def test_the_curve_goes_through_the_points() -> None:
    scene = draw_curve([(0, 0.0), (5, 2.0), (10, 1.0)], "it", "step", "words")
    curve = [m for m in scene.marks if isinstance(m, Line) and m.colour == BLUE]
    bottom, middle = HEIGHT - 48, LEFT + (WIDTH - LEFT - RIGHT) / 2
    assert [(m.x, m.y) for m in curve] == [(LEFT, bottom), (middle, TOP)]
    assert (curve[-1].x2, curve[-1].y2) == (WIDTH - RIGHT, TOP + (bottom - TOP) / 2)
