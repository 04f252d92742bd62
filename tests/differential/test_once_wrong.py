"""Programs that farandole once trained wrongly, without a word, as the tester found them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import programs
from fronts import FRONTS
from search import Runner

ONCE_WRONG = [
    # A program replaces what p.grad refers to; the optimizer then read an old gradient for ever.
    "front=torch.hook touch=data",
    "front=torch.hook touch=set",
    "front=torch.hook touch=cast",
    "front=torch.hook weights=share_memory zero=zeros",
    "front=torch.hook weights=half_and_back zero=zeros",
    "front=torch.hook weights=share_memory optimizer=closure",
    "front=torch.global touch=data",
    "front=torch.global touch=set",
    "front=torch.global weights=share_memory zero=zeros",
    "front=torch.global weights=half_and_back zero=zeros",
    # A program clears gradients where it holds them, in one flat tensor or in a list. The optimizer
    # got others, to which autograd added for ever.
    "front=torch.hook zero=flat",
    "front=torch.hook zero=flat options=in_place model=channels_last",
    "front=torch.hook zero=kept options=small",
    "front=torch.hook zero=flat options=sharded",
    "front=torch.global zero=flat",
    "front=torch.global zero=flat options=logical",
    # Refused: a program that has left a step out clears gradients by itself.
    "front=torch.hook zero=kept precision=scaler accumulate=cut",
    "front=torch.hook zero=kept loss=sum accumulate=no_sync",
    # Gradients were looked at that are not reduced yet: a window that ends early.
    "front=torch.hook touch=clip accumulate=cut",
    "front=torch.hook precision=scaler accumulate=cut",
    # Elements of one rank were added to others of another.
    "front=torch.hook model=mixed_layout",
    "front=torch.hook model=mixed_layout optimizer=adam_fused",
    "front=torch.hook model=conv weights=other_layout optimizer=adam_fused",
    "front=torch.hook model=nothing_to_train weights=unfreeze touch=clip",
    # Norms rounded by the order in which a rank has its elements.
    "front=torch.hook model=mixed_layout touch=clip optimizer=momentum",
    # A subclass of BatchNorm lost its forward and its parameter.
    "front=torch.hook model=batch_norm",
    "front=torch.global model=batch_norm",
    # Refused: a rank without samples of a batch computes on one that statistics would count.
    "front=torch.global model=batch_norm parts=short",
    # Parameters that changed after the optimizer was wrapped were refused.
    "front=torch.hook weights=double accumulate=cut options=small",
    "front=torch.hook weights=double touch=cast zero=zeros",  # gradients of another dtype
    "front=torch.global model=frozen weights=unfreeze options=groups",
    # Complex parameters were refused.
    "front=torch.hook model=odd accumulate=cut loss=sum",
    "front=torch.global model=odd options=groups",
    "front=jax.distributed model=turned",
    # The first batch of a class that is not built before it met each rank's own weights.
    "front=keras.horovod_tensorflow model=own_step",
    "front=keras.horovod_tensorflow model=gan",
    # A metric's result was this rank's variable.
    "front=strategy.fit metrics=own_state",
    # A replica without samples waited for a gradient that the others' tapes had not, and what its
    # sample of zeros gave was in the gradients of sums.
    "front=strategy.loop model=batch_norm batches=one",
    "front=strategy.loop model=batch_norm batches=one run=eager",
    # A loss for each sample was refused.
    "front=keras.model_tensorflow loss=none model=own_step",
    "front=strategy.fit loss=none batches=uneven",
    # Gradients that rank 0 had added up were given to all, where a second fit() began.
    "front=keras.horovod_torch optimizer=accumulate midway=evaluate",
    "front=keras.model_torch optimizer=accumulate midway=set_weights",
    # A sum over samples that the program divides by itself was taken for their mean.
    "front=strategy.fit model=own_sum batches=uneven",
    # Numbers that a step returns were not weighed by samples.
    "front=keras.model_tensorflow model=own_step batches=one metrics=true_positives",
    "front=keras.model_jax model=own_step batches=one metrics=precision",
    # Metrics that are no sums over samples were summed.
    "front=keras.model_torch metrics=dice callbacks=plateau batches=one",
    "front=keras.model_jax metrics=largest model=own_step batches=uneven",
    "front=strategy.fit metrics=largest callbacks=stopping batches=one",
    # A callback that looks at batches saw those of its rank.
    "front=keras.model_torch callbacks=batches batches=uneven metrics=dice",
    "front=strategy.fit model=own_sum callbacks=batches batches=uneven",
    # Accumulated gradients were summed over ranks twice.
    "front=strategy.fit optimizer=accumulate",
    # Steps, logged losses and evaluate() were as many times too large as there are ranks.
    "front=strategy.fit loss=sum",
    "front=strategy.fit loss=one_number",
    "front=strategy.fit loss=class_of_one_number run=eager",
    # One replica left out a step that the others took, and waited.
    "front=strategy.loop optimizer=loss_scale",
    # Metrics whose result is their state were each rank's own, and learning rates came apart.
    "front=keras.model_torch metrics=true_positives callbacks=plateau",
    "front=keras.model_torch metrics=sum callbacks=plateau",
    "front=keras.model_torch metrics=own_state callbacks=stopping",
    # A second optimizer reduced nothing, or was refused.
    "front=keras.model_tensorflow model=gan",
    "front=keras.model_torch model=gan",
    "front=strategy.fit model=gan",
    # Of three ways to write the loss of a step two were wrong.
    "front=strategy.fit model=own_average",
    "front=strategy.fit model=own_average batches=uneven",
    "front=strategy.fit model=own_mean",
    # Of two optimizers that accumulate, the first reduced nothing.
    "front=keras.model_torch model=gan optimizer=accumulate",
    # A rank without samples of a batch did not count it.
    "front=keras.model_torch model=counting batches=one",
    "front=keras.model_jax model=counting batches=one options=logical",
    # Each rank's loss was divided by what it left of the rank's own part.
    "front=keras.model_torch loss=ignoring batches=uneven",
    "front=strategy.fit loss=ignoring",
    # Each rank added the sum over its own samples.
    "front=keras.model_torch model=add_losses batches=one",
    # A part without samples held back a state that follows from weights; each part normalized them.
    "front=keras.model_torch model=spectral options=logical batches=one",
    # One rank refused to read averages, and the other waited.
    "front=strategy.fit callbacks=swap_ema optimizer=ema strategy=CentralStorageStrategy",
    # Weights that a program moved between steps were refused, or stale.
    "front=torch.hook options=sharded weights=half_and_back",
    "front=torch.global options=sharded weights=share_memory",
    "front=torch.hook options=sharded weights=other_layout model=conv",
    # A sharded update kept the param_groups and the state that an optimizer had when it was made.
    "front=torch.hook options=sharded weights=turn_groups optimizer=groups",
    "front=torch.hook options=sharded weights=leave_out",
    "front=torch.global options=sharded weights=reset_state optimizer=adam",
    "front=torch.global options=sharded weights=reset_state optimizer=momentum",
    # An epoch of a number of steps took them from several passes over arrays.
    "front=keras.model_torch data=steps batches=uneven",
    "front=strategy.fit data=steps",
    # A hook was lost where a parameter had another dtype for a while.
    "front=torch.global options=logical weights=half_and_back",
    "front=torch.global options=logical weights=double",
    # What no rank used in the second batch of a step was reduced once more.
    "front=torch.global options=logical model=experts accumulate=two",
    # Statistics were the plain mean of parts, of which some had fewer samples or none.
    "front=torch.global options=logical model=instance_norm parts=uneven",
    "front=torch.global options=logical model=spectral_norm parts=short",
]


@pytest.mark.xdist_group("programs that were once wrong")
@pytest.mark.parametrize("line", ONCE_WRONG, ids=lambda line: line.replace(" ", ","))
def test_it_is_right(runner: Runner, line: str) -> None:
    runner.check(programs.read(line, FRONTS), 3 if "parts=short" in line else 2)
