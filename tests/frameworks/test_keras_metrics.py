"""Metrics and callbacks of the user's own in farandole.keras.Model, on every backend."""

from __future__ import annotations

import importlib.util

import keras_decision_cases
import keras_metric_cases
from rank_cases import make_tests, needs

needs("keras")


def cases_on(backend: str) -> object:
    if importlib.util.find_spec(backend) is None:
        return None
    cases = [keras_metric_cases.__name__, keras_decision_cases.__name__]
    return make_tests(__name__, f"keras on {backend}", cases_of=cases)


test_on_tensorflow = cases_on("tensorflow")
test_on_torch = cases_on("torch")
test_on_jax = cases_on("jax")
