"""farandole.keras.Model, on TensorFlow in full, on PyTorch and JAX in what is theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras_model_cases
from rank_cases import _registered, make_tests, needs

import grid

# Elsewhere the rest would be the same once more.
COMMON = {
    "a_step_of_ones_own_has_the_gradients_of_the_whole_batch",
    "a_training_step_of_ones_own",
    "a_loss_that_a_layer_adds_is_told",
    "a_loss_with_its_own_divisor_that_a_step_calls_is_told",
    "arrays_with_weights_and_held_out_data",
    "losses_of_one_number_are_those_of_the_whole_batch",
    "losses_that_leave_samples_out_are_those_of_the_whole_batch",
    "losses_that_look_at_other_samples_are_those_of_the_whole_batch",
    "losses_that_reach_beyond_their_samples_train_as_in_one_process",
    "metrics_whose_result_is_their_state_are_of_all_ranks",
    "orders_of_a_dataset_are_those_of_keras_own_fit",
    "single_batches",
    "steps_of_arrays_are_those_of_keras",
    "sums_that_layers_add_are_those_of_the_whole_batch",
}
MASKS = {"masks_outputs_and_reductions_are_those_of_the_whole_batch"}
ADVERSARIES = {"two_optimizers_in_a_step_of_ones_own"}
ON_TORCH = {
    "edges_of_autograd_are_as_without_a_model",
    "loaders_of_torch",
    "passes_on_torch_of_an_optimizer_that_one_rank_had_none_of_are_a_mismatch",
    "steps_on_torch_ask_for_gradients_as_in_one_process",
}


def cases_on(backend: str, without: set[str], only_sizes: Sequence[int]) -> Any:
    needs("keras", backend)
    return make_tests(
        __name__,
        f"keras on {backend}",
        cases_of=[keras_model_cases.__name__],
        without=sorted(without),
        only_sizes=only_sizes,
    )


ALL = {case.__name__ for case, _ in _registered[keras_model_cases.__name__]}
FULL = grid.full()
test_on_tensorflow = cases_on("tensorflow", ON_TORCH, () if FULL else (2, 3))
test_on_torch = cases_on("torch", ALL - COMMON - ADVERSARIES - ON_TORCH, (2, 3) if FULL else (3,))
test_on_jax = cases_on("jax", ALL - COMMON - MASKS, (2, 3) if FULL else (3,))
