"""farandole.keras on PyTorch."""

from __future__ import annotations

from keras_cases import make_backend_tests

test_on_ranks = make_backend_tests(
    "torch",
    without=[  # torch.compile takes a minute
        "asking_for_xla_equals_one_process",
        "asking_for_xla_without_our_callbacks_works",
    ],
)
