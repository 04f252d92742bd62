"""horovodrun's options: what each becomes here, or why it does nothing. One row each.

`farandole run` takes those that do something, `farandole-horovodrun` takes all. Those with a `key`
may also stand in the YAML file of ``--config-file``, which wins over options before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from farandole.cli import CommandError

# Seconds after which nobody is warned any more.
NEVER = "1e9"

_LEVELS = {
    "TRACE": "debug",
    "DEBUG": "debug",
    "INFO": "info",
    "WARNING": "warning",
    "ERROR": "error",
    "FATAL": "error",
}


def _megabytes(text: str) -> str:
    return str(int(_at_least_zero(text) * (1 << 20)))


def _at_least_zero(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError
    return value


def _count(text: str) -> str:
    if not text.isdecimal():
        raise ValueError
    return str(int(text))


def _seconds(text: str) -> str:
    return f"{_at_least_zero(text):g}"


def _first(text: str) -> str:
    first = text.partition(",")[0]
    if not first:
        raise ValueError
    return first


def _level(text: str) -> str:
    return _LEVELS[text.upper()]


class Flag(NamedTuple):
    """One option, with what it sets or why it is ignored or refused."""

    names: str  # separated by spaces
    takes: str = ""  # what its value is called; "": it takes none
    sets: str = ""  # the settings that it becomes, separated by spaces
    value: Callable[[str], str] | str = str  # of those settings; raises ValueError or KeyError
    help: str = ""
    ignored: str = ""
    refused: str = ""
    key: str = ""  # in the file of --config-file; "=true" at its end: where the value is that

    @property
    def name(self) -> str:
        return self.names.split()[-1]


# The values of an option, where not every text will do.
_VALUES = {
    "SECONDS": "a number of seconds",
    "MB": "a number of MB",
    "N": "a whole number",
    "LEVEL": "one of " + ", ".join(_LEVELS),
    "LIST": "the names of interfaces",
}

_NO_CYCLES = "an operation starts when all ranks have it, there are no cycles"
_CHOSEN = "algorithms are chosen by size"
_UNTUNED = "nothing is tuned at run time"
_NO_MPI = "MPI is not used"
_OWN = "farandole has transports of its own"

FLAGS = [
    # Options that do something: `farandole run` has these, too.
    Flag("--start-timeout", "SECONDS", "FARANDOLE_START_TIMEOUT", _seconds,
         "how long init() waits for all ranks (default: 300)"),
    Flag("--fusion-threshold-mb", "MB", "FARANDOLE_BUCKET_BYTES FARANDOLE_FUSION_BYTES", _megabytes,
         "how much is reduced together; 0: every tensor by itself",
         key="params.fusion_threshold_mb"),
    Flag("--cache-capacity", "N", "FARANDOLE_NAME_CACHE", _count,
         "how many names of operations are remembered (default: 16384; 0: one)",
         key="params.cache_capacity"),
    Flag("--timeline-filename", "FILE", "FARANDOLE_TIMELINE", str,
         "write a Chrome trace of all ranks", key="timeline.filename"),
    Flag("--stall-check-warning-time-seconds", "SECONDS", "FARANDOLE_WARN_AFTER", _seconds,
         "when a waiting operation names the ranks it waits for (default: 10)",
         key="stall_check.warning_time_seconds"),
    Flag("--stall-check-shutdown-time-seconds", "SECONDS", "FARANDOLE_TIMEOUT", _seconds,
         "when it fails; 0: never (default: 1800)", key="stall_check.shutdown_time_seconds"),
    Flag("--no-stall-check", "", "FARANDOLE_WARN_AFTER", NEVER, "never warn of waiting operations",
         key="stall_check.enabled=false"),
    Flag("--log-level", "LEVEL", "FARANDOLE_LOG", _level,
         "TRACE, DEBUG, INFO, WARNING (default), ERROR or FATAL", key="logging.level"),
    Flag("--verbose", "", "FARANDOLE_LOG", "info", "the same as --log-level INFO",
         key="verbose=true"),
    Flag("--network-interface --network-interfaces --iface", "LIST", "FARANDOLE_IFACE", _first,
         "the one at which ranks of several hosts reach each other: the first of the list"),
    # Options that do nothing here.
    Flag("--stall-check", ignored="operations are watched anyway", key="stall_check.enabled=true"),
    Flag("--disable-cache", ignored="nothing about hosts is cached"),
    Flag("--gloo", ignored=_OWN, key="controller=gloo"),
    Flag("--mpi", ignored=_OWN, key="controller=mpi"),
    Flag("--mpi-args", "ARGS", ignored=_NO_MPI),
    Flag("--tcp", ignored=_NO_MPI),
    Flag("--binding-args", "ARGS", ignored="processes are not bound to cores"),
    Flag("--mpi-threads-disable", ignored=_NO_MPI, key="library_options.mpi_threads_disable=true"),
    Flag("--no-mpi-threads-disable", ignored=_NO_MPI,
         key="library_options.mpi_threads_disable=false"),
    Flag("--num-nccl-streams", "N", ignored="NCCL is not used yet",
         key="library_options.num_nccl_streams"),
    Flag("--thread-affinity", "CORES", ignored="no thread is bound to a core",
         key="library_options.thread_affinity"),
    Flag("--gloo-timeout-seconds", "SECONDS", ignored="Gloo is not used; see --start-timeout",
         key="library_options.gloo_timeout_seconds"),
    Flag("--cycle-time-ms", "MS", ignored=_NO_CYCLES, key="params.cycle_time_ms"),
    Flag("--timeline-mark-cycles", ignored=_NO_CYCLES, key="timeline.mark_cycles=true"),
    Flag("--no-timeline-mark-cycles", ignored=_NO_CYCLES, key="timeline.mark_cycles=false"),
    Flag("--hierarchical-allreduce", ignored=_CHOSEN, key="params.hierarchical_allreduce=true"),
    Flag("--no-hierarchical-allreduce", ignored=_CHOSEN, key="params.hierarchical_allreduce=false"),
    Flag("--hierarchical-allgather", ignored=_CHOSEN, key="params.hierarchical_allgather=true"),
    Flag("--no-hierarchical-allgather", ignored=_CHOSEN, key="params.hierarchical_allgather=false"),
    Flag("--torus-allreduce", ignored=_CHOSEN, key="params.torus_allreduce=true"),
    Flag("--no-torus-allreduce", ignored=_CHOSEN, key="params.torus_allreduce=false"),
    Flag("--autotune", ignored=_UNTUNED, key="autotune.enabled=true"),
    Flag("--no-autotune", ignored=_UNTUNED, key="autotune.enabled=false"),
    Flag("--autotune-log-file", "FILE", ignored=_UNTUNED, key="autotune.log_file"),
    Flag("--autotune-warmup-samples", "N", ignored=_UNTUNED, key="autotune.warmup_samples"),
    Flag("--autotune-steps-per-sample", "N", ignored=_UNTUNED, key="autotune.steps_per_sample"),
    Flag("--autotune-bayes-opt-max-samples", "N", ignored=_UNTUNED,
         key="autotune.bayes_opt_max_samples"),
    Flag("--autotune-gaussian-process-noise", "X", ignored=_UNTUNED,
         key="autotune.gaussian_process_noise"),
    Flag("--log-with-timestamp", ignored="lines carry no time", key="logging.hide_timestamp=false"),
    Flag("--log-without-timestamp", ignored="lines carry no time",
         key="logging.hide_timestamp=true"),
    Flag("-prefix-timestamp --prefix-output-with-timestamp",
         ignored="lines carry their rank and no time"),
    # Options that ask for something that is not there.
    Flag("--jsrun", refused="ranks are started by ssh; name the hosts with -H"),
]  # fmt: skip

_BY_KEY = {flag.key: flag for flag in FLAGS if flag.key}


def add_flags(parser: argparse._ActionsContainer, flags: Sequence[Flag]) -> None:
    """Adds rows, which leave what they found in `settings_of` and `ignored_of`."""
    for flag in flags:
        words = flag.takes.split()
        parser.add_argument(
            *flag.names.split(),
            action=_Apply,
            flag=flag,
            nargs=len(words),
            metavar=tuple(words) or None,
            help=flag.help or argparse.SUPPRESS,
        )
    parser.add_argument(
        "--config-file",
        metavar="YAML",
        action=_ReadFile,
        help="horovodrun's settings in a file; needs PyYAML. Options after it win over it",
    )


def settings_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The environment that the options ask for."""
    return dict(getattr(arguments, "environment", {}))


def ignored_of(arguments: argparse.Namespace) -> list[str]:
    """'--gloo (why)' for each option that does nothing."""
    return list(getattr(arguments, "ignored", {}).values())


def _note(found: argparse.Namespace, kind: str, name: str, value: str) -> None:
    notes = getattr(found, kind, None)
    if notes is None:
        notes = {}
        setattr(found, kind, notes)
    notes[name] = value


def _apply(flag: Flag, found: argparse.Namespace, shown: str, text: str) -> None:
    if flag.refused:
        raise CommandError(f"{shown} is not supported: {flag.refused}")
    if flag.ignored:
        _note(found, "ignored", flag.name, f"{shown} ({flag.ignored})")
        return
    try:
        value = flag.value if isinstance(flag.value, str) else flag.value(text)
    except (ValueError, KeyError):
        raise CommandError(f"{shown} takes {_VALUES[flag.takes]}, not '{text}'") from None
    for setting in flag.sets.split():
        _note(found, "environment", setting, value)


class _Apply(argparse.Action):
    def __init__(self, *arguments: Any, flag: Flag, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse's signature
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        _apply(self._flag, namespace, option_string or self._flag.name, " ".join(values))


class _ReadFile(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        path = Path(values)
        for key, value in _entries(_load(path)):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            flag = _BY_KEY.get(key) or _BY_KEY.get(f"{key}={text}")
            if flag is None and f"{key}=true" in _BY_KEY and text == "false":
                continue  # off is what it is without
            if flag is None:
                raise CommandError(f"--config-file: {path}: '{key}: {text}' is not known")
            _apply(flag, namespace, f"'{key}' in {path}", text)


def _load(path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise CommandError("--config-file needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise CommandError(f"--config-file: {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise CommandError(f"--config-file: {path} is not YAML: {why}") from error


def _entries(whole: Any, above: str = "") -> list[tuple[str, Any]]:
    """('section.key', value) of every entry, in order."""
    if whole is None:
        return []
    if not isinstance(whole, dict):
        return [(above.rstrip("."), whole)]
    rows = []
    for key, value in whole.items():
        rows += _entries(value, f"{above}{key}.")
    return rows
