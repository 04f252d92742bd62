"""farandole.keras.Model, on TensorFlow in full, on PyTorch and JAX in what is theirs."""

from __future__ import annotations

import importlib.util
from typing import Any

import keras_model_cases
import pytest
from rank_cases import _registered, make_tests

# Elsewhere the rest would be the same once more.
COMMON = {"arrays_with_weights_and_held_out_data", "single_batches"}
MASKS = {"masks_outputs_and_reductions_are_those_of_the_whole_batch", "several_ways_to_compile"}
LOADERS = {"loaders_of_torch"}


def tests_of(backend: str, without: set[str]) -> Any:
    for name in ("keras", backend):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
    return make_tests(
        __name__,
        f"keras on {backend}",
        cases_of=[keras_model_cases.__name__],
        without=sorted(without),
    )


ALL = {case.__name__ for case, _ in _registered[keras_model_cases.__name__]}
test_on_tensorflow = tests_of("tensorflow", LOADERS)
test_on_torch = tests_of("torch", ALL - COMMON - LOADERS)
test_on_jax = tests_of("jax", ALL - COMMON - MASKS)
