"""farandole.keras on TensorFlow."""

from __future__ import annotations

from keras_cases import make_backend_tests

test_on_ranks = make_backend_tests("tensorflow")
