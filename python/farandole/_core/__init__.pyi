"""The native core. Types only: the module is built from csrc/bindings."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypedDict, final

from typing_extensions import TypeVar

from farandole.typing import HandleNumber

from . import schedule as schedule
from . import tuning as tuning

__version__: str
dtypes: tuple[str, ...]
reduce_ops: tuple[str, ...]
error_names: list[str]

_F = TypeVar("_F", bound=Callable[..., Any])
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True, default=Any)

class _Setting(TypedDict):
    name: str
    type: str
    value: str
    default: str
    doc: str

def in_child() -> bool: ...
def reductions_begun() -> int: ...
def bytes_begun_by_hand() -> int: ...
def tell_launcher(word: str) -> None: ...
def quick_call(kind: str, world: object) -> Callable[[_F], _F]: ...
def quick_submit(bump_version: Callable[[Any], object]) -> Callable[[_F], _F]: ...
def quick_wait(slow: _F) -> _F: ...
def guarded(method: _F, explain: Callable[..., str | None]) -> _F: ...
def instruction_sets() -> list[str]: ...
def settings() -> list[_Setting]: ...
def cuda_driver_version() -> int: ...
def cuda_devices() -> list[dict[str, Any]]: ...
def kernel_compiler() -> int: ...
def look_for_nccl_by(find: Callable[[], tuple[bytes, bytes]]) -> None: ...
def nccl_library(setting: bytes, wheel: bytes) -> tuple[int, bytes]: ...
def unread_variables() -> list[str]: ...
def prepare_world(rank: int, size: int) -> None: ...
def open_world(
    rank: int,
    peers: Sequence[Peer],
    memory: HostMemory | None,
    job: str,
    start_timeout: float | None = None,
    tuning: str = "",
    listeners: Sequence[int] | None = None,
    mpi: MpiPort | None = None,
    look: Callable[[], None] | None = None,
) -> Group: ...
def make_doorbell() -> int: ...
def own_process() -> int: ...
def look_for_libcrypto_in(module: str) -> None: ...

class KeyPair(metaclass=_Native):
    """For a secret of ranks that were given none."""

    def __init__(self) -> None: ...
    def public_key(self) -> bytes: ...
    def shared_with(self, other: bytes) -> bytes: ...

def errno_error(number: int, call: str) -> Error: ...
def abandon_mpi(why: str) -> None: ...
def end_mpi_at_exit(binding: MpiBinding, joined: bool) -> None: ...
def is_mpi_abandoned_by_another() -> bool: ...
def tcp_address(socket: int) -> bytes: ...
def wire_format() -> list[tuple[str, str]]: ...
def agreed_settings() -> str: ...

# ---- memory ----

class _Native(type):
    """The metaclass of native classes."""

class HostMemory(metaclass=_Native):
    """The memory that all ranks of a host map."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...  # never called
    @staticmethod
    def make(ranks: int, secret: bytes | None = None) -> HostMemory: ...
    @staticmethod
    def of(descriptor: int) -> HostMemory: ...
    def fileno(self) -> int: ...

class Peer(metaclass=_Native):
    """A rank, as the others know it."""

    def __init__(
        self,
        rank: int,
        host: str,
        pid: int,
        addresses: bytes = b"",
        cpus: Sequence[int] = (),
        doorbell: int = -1,
        process: int = -1,
    ) -> None: ...

class MpiBinding(metaclass=_Native):
    """An MPI, as mpi4py knows it."""

    def __init__(
        self,
        *,
        module: str,
        handle_bytes: int,
        status_bytes: int,
        byte: int,
        comm_self: int,
        comm_world: int,
        errors_return: int,
        in_place: int,
        dtypes: Mapping[str, int],
        ops: Mapping[str, int],
    ) -> None: ...

class MpiPort(metaclass=_Native):
    """Links to the ranks of a communicator."""

    def __init__(
        self,
        binding: MpiBinding,
        communicator: int,
        rank: int,
        size: int,
        world: int,
        secret: bytes,
        threads: str,
    ) -> None: ...

class Buffer(metaclass=_Native):
    """Host memory by address, alive as long as `owner`."""

    def __init__(self, pointer: int, count: int, dtype: str, owner: object = None) -> None: ...

class DeviceBuffer(metaclass=_Native):
    """A device's memory by address, alive as long as `owner`."""

    def __init__(
        self,
        pointer: int,
        count: int,
        dtype: str,
        device: int,
        current_stream: Callable[[], int],
        owner: object = None,
    ) -> None: ...

class SharedMemory(metaclass=_Native):
    """Bytes that every rank of the host maps."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...  # never called
    @property
    def pointer(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...
        def __release_buffer__(self, buffer: memoryview, /) -> None: ...

# ---- weights ----

def checksums(arrays: Sequence[Any]) -> list[int]: ...
def weights_error(
    names: Sequence[str],
    rows: Sequence[tuple[int, Sequence[int]]],
    step: int,
    equal_before: int,
    line: str,
) -> Mismatch | None: ...

# ---- groups ----

class Handle(Generic[_R_co], metaclass=_Native):
    """An operation in flight."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...  # never called
    def wait(self, timeout: float | None = None) -> _R_co: ...
    def done(self) -> bool: ...

class Source(metaclass=_Native):
    """The sender of the message that start_from_any received."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...  # never called
    @property
    def rank(self) -> int: ...

class Group(metaclass=_Native):
    """A communicator."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...  # never called
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def last_path(self) -> str: ...
    @property
    def tuning(self) -> str: ...
    @property
    def by_address(self) -> tuple[bool, str]: ...
    def run(
        self,
        kind: str,
        input: object,
        output: object,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        name: str | None = None,
        algorithm: str | None = None,
        level: str | None = None,
        timeout: float | None = None,
        counts: Sequence[int] = [],
    ) -> None: ...
    def start(
        self,
        kind: str,
        input: object,
        output: object,
        result: _R,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        name: str | None = None,
        algorithm: str | None = None,
        level: str | None = None,
        timeout: float | None = None,
        counts: Sequence[int] = [],
    ) -> Handle[_R]: ...
    def run_between(
        self,
        kind: str,
        array: object,
        peer: int,
        tag: int = 0,
        name: str | None = None,
        timeout: float | None = None,
    ) -> None: ...
    def start_between(
        self,
        kind: str,
        array: object,
        peer: int,
        tag: int,
        result: _R,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Handle[_R]: ...
    def start_from_any(
        self, array: object, tag: int, name: str | None = None, timeout: float | None = None
    ) -> Handle: ...
    def start_together(
        self,
        calls: Sequence[tuple[str, object, object, object, str, float, int, Sequence[int]]],
        name: str,
        timeout: float | None = None,
    ) -> list[Handle]: ...
    def run_grouped(
        self,
        kind: str,
        inputs: Sequence[object],
        outputs: Sequence[object],
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        name: str | None = None,
        algorithm: str | None = None,
        level: str | None = None,
        timeout: float | None = None,
    ) -> None: ...
    def start_grouped(
        self,
        kind: str,
        inputs: Sequence[object],
        outputs: Sequence[object],
        result: _R,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        name: str | None = None,
        algorithm: str | None = None,
        level: str | None = None,
        timeout: float | None = None,
    ) -> Handle[_R]: ...
    def barrier(self, name: str | None = None, timeout: float | None = None) -> None: ...
    def split(self, color: int, key: int = 0, timeout: float = 300.0) -> Group | None: ...
    def form(self, ranks: Sequence[int], token: int, timeout: float = 300.0) -> Group: ...
    def turn(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def report_exception(self, what: str, place: str) -> None: ...
    def show_exception(self, what: str, place: str) -> None: ...
    def show_exit_code_at_end(self, blamed: int) -> None: ...
    def secret(self) -> bytes: ...
    def check(self) -> None: ...
    def allocate(self, bytes: int) -> SharedMemory: ...
    def describe(self) -> str: ...
    def counters(self) -> dict[str, int]: ...
    def start_timeline(self, directory: str, number: int) -> None: ...
    def stop_timeline(self) -> None: ...
    def leave(self) -> None: ...

# ---- operations by name ----

class StagedResult(metaclass=_Native):
    """A result on its way to a device."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...  # never called
    def deliver(self, array: object) -> None: ...

class Names(metaclass=_Native):
    """The operations by name of a world."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...  # never called
    def submit(
        self,
        kind: str,
        name: str | None,
        tensors: Sequence[tuple[object, object, Sequence[int]]],
        set: int = 0,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        splits: Sequence[int] = [],
        result: object = None,
        finish: Callable[[Any, Any], object] | None = None,
    ) -> HandleNumber[Any]: ...
    def join(self) -> int: ...
    def serve_as_proxy(
        self, handle: int, reducers: Sequence[Reducer], updates: Sequence[ShardedUpdate]
    ) -> list[int]: ...
    def add_set(self, group: Group | None, ranks: Sequence[int]) -> int: ...
    def remove_set(self, set: int) -> None: ...
    def describe(self) -> str: ...

def names_of(world: Group) -> Names: ...
def plugin_table() -> int: ...
def wait_by_number(handle: int) -> Any: ...
def done_by_number(handle: int) -> bool: ...

# ---- the watch ----

class Watchpost(metaclass=_Native):
    """Where a rank shows what its threads are doing."""

    def __init__(self, world: Group) -> None: ...
    def wait(self) -> bool: ...
    def show(
        self, blocked: bool, daemons: bool, looked: int, still_since: int, place: str, step: str
    ) -> None: ...
    def end(self) -> None: ...

def blocked_threads() -> dict[int, int]: ...

# ---- the counters that each rank shows ----

def status_page(world: Group) -> bytes: ...

# ---- tracing ----

def drop_trace_file() -> None: ...

trace_events_per_thread: int

def recover_trace_part(events_file: str, living: bool) -> bool: ...

class TraceFollower(metaclass=_Native):
    def __init__(self, events_file: str) -> None: ...
    @property
    def host(self) -> str: ...
    def more(self) -> bytes: ...

class trace_span(metaclass=_Native):
    """A span of the program in the trace (FARANDOLE_TRACE)."""

    def __init__(self, name: str) -> None: ...
    def __enter__(self) -> trace_span: ...
    def __exit__(self, *exc: object) -> None: ...

class BucketStep(metaclass=_Native):
    """What training steps by buckets share."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...  # never called
    @property
    def places(self) -> list[tuple[int, int]]: ...  # bucket, bytes from its begin
    @property
    def buckets(self) -> list[tuple[str, int, list[tuple[int, int, int]]]]: ...
    def memory(self, bucket: int, /) -> SharedMemory: ...  # of gradients
    @property
    def step_open(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def abandon(self) -> None: ...
    def drain(self, timeout: float | None = None) -> None: ...
    def watch_weights(self, names: Sequence[str], period: float, line: str) -> None: ...
    @property
    def weights_due(self) -> bool: ...
    def show_weights(self, checksums: Sequence[int]) -> None: ...

class Reducer(BucketStep):
    """Reduces a training step's gradients in buckets during backward."""

    def __init__(
        self,
        group: Group,
        parameters: Sequence[tuple[str, int, str] | tuple[str, int, str, int]],
        op: str = "mean",
        prescale: float = 1.0,
        postscale: float = 1.0,
        bucket_bytes: int = ...,  # required
        first_bucket_bytes: int = ...,  # required
        in_place_bytes: int = ...,  # never
        overlap: bool = True,
        label: str = "gradients",
        sparse_as_dense: bool = False,
    ) -> None: ...
    @property
    def has_better_plan(self) -> bool: ...
    def take_better_plan(self) -> None: ...
    def describe(self) -> str: ...
    def mark_ready(self, parameter: int, gradient: int, sparse_dims: int = 0) -> None: ...
    def lend(self, parameter: int, gradient: int, owner: object, sparse_dims: int = 0) -> None: ...
    def in_place(self, parameter: int) -> bool: ...
    def launch_rest(self) -> None: ...
    def show_settings(self, settings: int) -> None: ...
    @property
    def settings_differ(self) -> bool: ...
    def note_update(self) -> None: ...
    def count_updates_anew(self) -> None: ...
    def used(self, parameter: int) -> bool: ...
    def sparse_dims(self, parameter: int) -> int: ...
    @property
    def left_out(self) -> dict[int, int]: ...  # sparse dimensions of gradients, by parameter
    @property
    def key(self) -> int: ...

class DeviceGradients(metaclass=_Native):
    """Has a device's gradients reduced: where they lie, or in a reducer's buckets."""

    def __init__(self, reducer: Reducer, device: int, carried: Sequence[bool]) -> None: ...
    def bring(
        self, parameter: int, gradient: int, stream: int, owner: object, sparse_dims: int = 0
    ) -> None: ...
    def take_back(self, parameters: Sequence[int], stream: int) -> None: ...

class DeviceShards(metaclass=_Native):
    """A sharded update's parameters on a device: updated there, or brought to its buckets and back.
    ``carried``: by parameter, whether it lies there."""

    def __init__(self, update: ShardedUpdate, device: int, carried: Sequence[bool]) -> None: ...
    def bring(self, parameter: int, gradient: int, stream: int, owner: object) -> None: ...
    def bring_value(self, parameter: int, value: int, stream: int) -> None: ...
    def take_back(self, values: Sequence[tuple[int, int]], stream: int) -> None: ...

class HyperParameters(metaclass=_Native):
    """An optimizer's settings for one group of parameters."""

    def __init__(
        self,
        *,
        rate: float,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        beta1: float = 0.0,
        beta2: float = 0.0,
        epsilon: float = 0.0,
        nesterov: bool = False,
        decoupled: bool = False,
        maximize: bool = False,
    ) -> None: ...

class ShardedUpdate(BucketStep):
    """An optimizer's step where every rank updates 1/n of each bucket."""

    steps: list[int]
    def __init__(
        self,
        group: Group,
        parameters: list[tuple[str, int, str]],
        optimizer: str,
        slots: int,
        op: str = "mean",
        prescale: float = 1.0,
        postscale: float = 1.0,
        bucket_bytes: int = ...,  # required
        first_bucket_bytes: int = ...,  # required
        label: str = "gradients",
    ) -> None: ...
    @property
    def norm(self) -> float: ...
    @property
    def slots(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    def take(self, parameter: int, gradient: int) -> None: ...
    def begin(
        self,
        task: str,
        present: bytes,
        groups: list[HyperParameters],
        group_of: list[int],
        factor: float = 1.0,
    ) -> None: ...
    def gather_state(self, bucket: int, slot: int, whole: int) -> None: ...
    def set_state(self, bucket: int, slot: int, whole: int) -> None: ...
    def reset_state(self, parameters: list[int]) -> None: ...
    def values(self, bucket: int, /) -> SharedMemory: ...

# ---- errors (docs/errors.md) ----

@final
class _FirstLine(metaclass=_Native):
    def __init__(self, *args: object, **kwargs: object) -> None: ...  # never called
    def __get__(self, error: Error | None, owner: type[Error], /) -> str: ...

class Error(RuntimeError):
    verdict: _FirstLine  # a str
    evidence: str
    advice: str
    rank: int | None
    peer: int | None
    pid: int | None
    signal: int | None
    host: str
    operation: str
    tensor: str
    sequence: int
    lane: int | None
    step: int | None
    bytes_done: int
    bytes_total: int
    field: str
    values: Mapping[str, list[int]]

class InvalidArgument(Error, ValueError): ...
class NotInitialized(Error, ValueError): ...
class PeerLost(Error): ...
class PeerHung(Error): ...
class Stalled(Error): ...
class Deadlock(Error): ...
class Mismatch(Error): ...
class RemoteError(Error): ...
class EarlyExit(Error): ...
class RendezvousError(Error): ...
class VersionMismatch(Error): ...
class AuthError(Error): ...
class LinkError(Error): ...
class ResourceError(Error): ...
class NumericsError(Error): ...
class ForkedEngine(Error): ...
class MembershipChanged(Error): ...
class Aborted(Error): ...
class InternalError(Error): ...
class DeviceError(Error): ...
