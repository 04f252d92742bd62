"""Refuses losses and metrics of a whole batch, of which a micro-batch knows a part alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import keras

from farandole.data._tree import leaves
from farandole.keras._global.losses import noting_mask
from farandole.keras._global.samples_apart import (
    FUNCTION,
    LOSS,
    MASKED,
    METRIC,
    keeps_samples_apart,
    needs_whole_batch,
)
from farandole.keras._global.steps import LEFT_OPEN
from farandole.keras._global.whole_metrics import all_of, is_own, needs_others


def refuse_own_metrics(metrics: Any) -> None:
    """Raises InvalidArgument for a metric, or a class of one, whose update_state() is to see the
    whole batch."""
    for each in all_of(leaves(metrics)):
        metric = each if isinstance(each, type) else type(each)
        if issubclass(metric, keras.metrics.Metric) and is_own(metric):
            raise needs_whole_batch(METRIC, metric.__name__, None)


def check_at_first_use(module: Any) -> None:
    """Makes losses and metric functions of a built stage raise at their first use where they need
    the whole batch."""
    refuse_own_metrics(module.metrics)  # by what Keras has made of names and configs
    compiled = module._compile_loss
    if compiled is not None:
        compiled._flat_losses = [
            each._replace(loss=_checked_loss(each.loss)) for each in compiled._flat_losses
        ]
    for metric in all_of(module.metrics):
        if isinstance(metric, keras.metrics.MeanMetricWrapper):
            metric.update_state = _checked_update(metric)


def _checked_loss(loss: Any) -> Callable[..., Any]:
    is_checked = False

    def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        nonlocal is_checked
        if not is_checked and not keeps_samples_apart(loss, y_true, y_pred):
            raise needs_whole_batch(LOSS, getattr(loss, "name", loss), None)
        is_checked = True
        with noting_mask(loss) as masks:
            value = loss(y_true, y_pred, sample_weight)
        if loss.reduction not in ("sum", *LEFT_OPEN) and any(m is not None for m in masks):
            raise needs_whole_batch(MASKED, getattr(loss, "name", loss), None)
        return value

    return call


def _checked_update(metric: Any) -> Callable[..., Any]:
    own = type(metric).update_state.__get__(metric)

    @wraps(own)
    def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        vars(metric).pop("update_state", None)  # the program may use it elsewhere, too
        if needs_others(metric, y_true, y_pred):
            raise needs_whole_batch(FUNCTION, metric.name, None)
        return own(y_true, y_pred, sample_weight)

    return update_state
