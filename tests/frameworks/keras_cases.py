"""Cases of farandole.keras for every backend: test_keras_{torch,tensorflow,jax}.py run these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras_callback_cases
import keras_copy_cases
import keras_fit_cases
import keras_refusal_cases
import keras_step_cases
from rank_cases import make_tests, needs

CASES = (
    keras_fit_cases, keras_step_cases, keras_refusal_cases, keras_copy_cases, keras_callback_cases,
)  # fmt: skip


def make_backend_tests(backend: str, without: Sequence[str] = ()) -> Any:
    """The tests of one backend; Keras stays unimported in pytest's own process."""
    needs("keras", backend, f"farandole.{backend}")
    cases = [module.__name__ for module in CASES]
    return make_tests(__name__, f"keras on {backend}", cases_of=cases, without=without)
