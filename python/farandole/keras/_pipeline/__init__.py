"""The parts of farandole.keras.Pipeline, besides farandole.pipeline.

cutting     a model's graph in stages, each a model
apart       losses and metrics that a micro-batch cannot know
computing   what a stage computes of a micro-batch, whatever the backend
gradients   forward and backward, as each backend has them
tensors     what is sent between stages
work        a step on one rank
stepping    how steps are made ready and run
results     losses and metrics of all ranks; outputs; weights
fitting     epochs, batches and callbacks
"""

from __future__ import annotations
