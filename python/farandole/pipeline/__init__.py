"""A model cut into stages over ranks, whatever the framework: what farandole.torch.Pipeline and its
siblings share.

    _schedules   the order of work of each rank, as a value; and its proof
    _partition   which layers are a stage's
    _places      which rank has which stage of which replica; how ranks agree on a pipeline
    _shares      which samples are a micro-batch's
    _wire        messages between neighbours
    _runner      one step: a schedule, run over messages
    _work        what every framework's work in a step has
    _report      what steps took, and for how long ranks were idle
"""

from __future__ import annotations
