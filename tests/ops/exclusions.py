"""Cases that are known not to pass, each with its reason. One that passes fails the suite: it must leave this list."""

from __future__ import annotations

TRAINING = "training mode is refused by name"

REFERENCE = {
    "test_training_dropout": TRAINING,
    "test_training_dropout_default": TRAINING,
    "test_training_dropout_default_mask": TRAINING,
    "test_training_dropout_mask": TRAINING,
    "test_batchnorm_example_training_mode": TRAINING,
    "test_batchnorm_epsilon_training_mode": TRAINING,
}

KERNELS: dict[str, str] = {}
