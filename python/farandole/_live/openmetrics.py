"""The counters of ranks as OpenMetrics text (https://openmetrics.io, version 1.0.0)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from farandole._live.pages import Status

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class _Metric(NamedTuple):
    name: str
    kind: str  # counter, whose samples end in _total, or gauge
    unit: str
    help: str
    value: Callable[[Status], float]


METRICS = (
    _Metric("operations", "counter", "", "Collectives that have ended.", lambda s: s.operations),
    _Metric("input_bytes", "counter", "bytes", "Input of collectives that have begun.",
            lambda s: s.bytes),
    _Metric("steps", "counter", "", "Training steps whose gradients are reduced.",
            lambda s: s.steps),
    _Metric("waited_for_ranks_seconds", "counter", "seconds",
            "Time until other ranks had begun a collective.", lambda s: s.all_waits_for_ranks),
    _Metric("waited_for_data_seconds", "counter", "seconds",
            "Time without data of ranks that had begun.", lambda s: s.waited_for_data),
    _Metric("processor_seconds", "counter", "seconds", "Processor time of the rank's process.",
            lambda s: s.processor),
    _Metric("waits_seconds", "gauge", "seconds", "How long the present wait has lasted; 0: none.",
            lambda s: s.present_wait),
    _Metric("step_age_seconds", "gauge", "seconds", "Time since the last step ended; 0: none has.",
            lambda s: max(0.0, s.seen - s.stepped) if s.stepped else 0.0),
    _Metric("failed", "gauge", "", "1 once the rank's group has failed.",
            lambda s: float(bool(s.verdict))),
    _Metric("stopped", "gauge", "", "1 while the rank's process is stopped.",
            lambda s: float(s.state == "stopped")),
    _Metric("joined_timestamp_seconds", "gauge", "seconds", "When the rank joined its world.",
            lambda s: s.joined),
)  # fmt: skip


def text_of(ranks: Sequence[Status]) -> str:
    lines = []
    for metric in METRICS:
        name = f"farandole_{metric.name}"
        lines.append(f"# TYPE {name} {metric.kind}")
        if metric.unit:
            lines.append(f"# UNIT {name} {metric.unit}")
        lines.append(f"# HELP {name} {metric.help}")
        suffix = "_total" if metric.kind == "counter" else ""
        for status in ranks:
            labels = f'rank="{status.rank}",host="{_escaped(status.host)}"'
            lines.append(f"{name}{suffix}{{{labels}}} {metric.value(status)!r}")
    return "\n".join([*lines, "# EOF", ""])


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
