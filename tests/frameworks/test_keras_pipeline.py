"""farandole.keras.Pipeline, on TensorFlow in full, on PyTorch and JAX in what is theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras_pipeline_cases
from rank_cases import make_tests, needs

import grid

ALONE = {"examples_in_docstrings", "what_is_wrong_is_named_on_every_rank"}
TF_DATA = {"batches_of_tf_data_and_weights_of_classes"}
OTHERS = {
    "a_rank_keeps_its_own_layers_alone",
    "outputs_reductions_and_callbacks_are_as_in_one_process",
    "single_batches_and_weights",
}


def cases_on(backend: str, only_sizes: Sequence[int], without: Sequence[str] = ()) -> Any:
    needs("keras", backend)
    cases = [keras_pipeline_cases.__name__]
    return make_tests(
        __name__,
        f"keras on {backend}",
        cases_of=cases,
        only_sizes=only_sizes,
        without=without,
    )


FULL = grid.full()
NOT_AGAIN = sorted(ALONE | TF_DATA | (set() if FULL else OTHERS))
CHAIN = [] if FULL else ["a_chain_learns_as_in_one_process"]  # replicas have the same
test_on_tensorflow = cases_on("tensorflow", (), CHAIN)
test_on_torch = cases_on("torch", () if FULL else (2,), NOT_AGAIN)
SLOW = [] if FULL else ["a_stage_that_raises_is_named"]  # without a program
test_on_jax = cases_on("jax", () if FULL else (2,), [*NOT_AGAIN, *SLOW])
