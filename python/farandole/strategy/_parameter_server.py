"""ParameterServerStrategy: variables on servers, closures on workers, one program on all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from farandole import _world
from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.parameter_server import Server
from farandole.parameter_server._joining import join_without_variables, pair_of
from farandole.parameter_server._shards import SPLIT_ABOVE
from farandole.strategy import _checkpoint, _data
from farandole.strategy._checks import check_resolver
from farandole.strategy._cluster import join_with_servers
from farandole.strategy._extended import OneOfManyExtended
from farandole.strategy._scheduling import Scheduling
from farandole.strategy._served import ServedVariable, Store, Sums, check
from farandole.strategy._strategies import OneOfMany, device_of, teach_keras
from farandole.strategy._variables import refuse_symbolic

_OPTIONS = ("initial_value", "trainable", "validate_shape", "name", "dtype", "constraint", "shape",
            "synchronization", "aggregation", "distribute_strategy")  # fmt: skip

_ADVICE = "start all again, and restore what tf.train.Checkpoint has written"


class Extended(OneOfManyExtended):
    """See TensorFlow's ``StrategyExtended``. There is one replica: a step is that of one worker."""

    variables_on_servers = True  # _keras.py and _checkpoint.py ask for it

    def __init__(self, strategy: Any, device: str, store: Store) -> None:
        super().__init__(strategy, device)
        self.store = store
        self.scheduling: Scheduling | None = None  # as soon as there is the strategy
        self.coordinator: Any = None  # the one that there is

    def _create_variable(self, next_creator: Any, **options: Any) -> Any:
        del next_creator
        options.pop("colocate_with", None)
        refuse_symbolic(options)
        with tf.init_scope(), tf.device(self._device):
            variable = ServedVariable(**{n: options[n] for n in _OPTIONS if n in options})
        check(variable)
        self.store.created(variable)
        return variable

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        _data.check_options(options)
        return dataset

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        _data.check_options(options)
        return _data.made_by(dataset_fn, tf.distribute.InputContext())


class ParameterServerStrategy(OneOfMany):
    """Asynchronous training as with ``tf.distribute.ParameterServerStrategy``: variables live on
    servers, and a :class:`~farandole.strategy.ClusterCoordinator` gives steps to workers, which do
    not wait for one another.

    All ranks run the same program, and make the strategy. Rank 0 is the chief, the last ``servers``
    ranks are servers, and those between are workers: ``farandole run -np 4 -- python train.py`` has
    two workers. A server serves in here until all others have ended, and then leaves the program as
    by ``sys.exit(0)``. There is one strategy in a job.

    Variables of ``scope()`` are whole to the program, and cut by rows on servers. Keras' ``fit`` is
    that of ``farandole.keras.ParameterServer``, which needs no strategy.

    Args:
        cluster_resolver: of ``tf.distribute.cluster_resolver``; default: what the environment says,
            which is a launcher, or ``TF_CONFIG`` with the tasks ``chief``, ``worker`` and ``ps``.
        variable_partitioner: of ``tf.distribute.experimental.partitioners``: into how many parts a
            variable is cut, at most as many as there are servers. Default: variables of more than
            256 KiB go to all servers, and others stay whole.
        servers: how many ranks are servers; default: as many as the cluster has ``ps``, or 1.

    Raises:
        InvalidArgument: too few ranks, wrong arguments, or ranks differ in them.
        RendezvousError: ranks are missing, or disagree about who there is.
        SystemExit: on a server, when all others have ended.
    """

    _made_in = -1  # the epoch of the world

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Any = None,
        *,
        servers: int | None = None,
    ) -> None:
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise InvalidArgument(
                f"variable_partitioner is {shown(variable_partitioner)}; it is one of "
                "tf.distribute.experimental.partitioners"
            )
        if servers is not None and not (isinstance(servers, int) and servers > 0):
            raise InvalidArgument(f"servers is {shown(servers)}; it is a number from 1")
        check_resolver(cluster_resolver)
        count = join_with_servers(cluster_resolver, servers)
        self._check_first(count)
        node = join_without_variables(Sums(), count, _told(variable_partitioner), _ADVICE)
        if isinstance(node, Server):
            node.serve()
            raise SystemExit(0)
        workers = _world.size() - count
        ranks = range(1, workers) if node.index == 0 else [0]
        pairs = {each: pair_of(*sorted((each, node.index))) for each in ranks}
        store = Store(node, _Parts(variable_partitioner, count))
        super().__init__(Extended(self, device_of("devices", None), store))
        self.extended.scheduling = Scheduling(self, store, node, pairs)
        self._resolver = cluster_resolver
        _checkpoint.learn()
        teach_keras()

    @property
    def cluster_resolver(self) -> Any:
        """The resolver with which the strategy was made."""
        return self._resolver

    @classmethod
    def _check_first(cls, servers: int) -> None:
        if cls._made_in == _world.epoch():
            raise InvalidArgument(
                "there is a ParameterServerStrategy already, which its servers serve until the "
                "program ends\n  advice: make one, and use its scope for all models"
            )
        if _world.size() < servers + 2:
            raise InvalidArgument(
                f"a ParameterServerStrategy with servers={servers} in a world of {_world.size()}; "
                "it needs a chief, a worker and the servers\n"
                f"  advice: farandole run -np {servers + 2} or more"
            )
        cls._made_in = _world.epoch()


class _Parts:
    """Into how many parts servers cut a variable."""

    def __init__(self, partitioner: Any, servers: int) -> None:
        self._partitioner, self._servers = partitioner, servers

    def __call__(self, variable: Any) -> int:
        if not variable.shape.rank:
            return 1
        if self._partitioner is None:
            size = variable.shape.num_elements() * variable.dtype.size
            rows = variable.shape[0]
            return self._servers if size > SPLIT_ABOVE and rows >= self._servers else 1
        parts = list(self._partitioner(shape=variable.shape, dtype=variable.dtype))
        if any(each != 1 for each in parts[1:]) or not parts or parts[0] < 1:
            raise InvalidArgument(
                f"variable_partitioner cuts variable '{variable.name}' of shape {variable.shape} "
                f"into {parts}; servers have rows, so only the first may be above 1"
            )
        return int(parts[0])


def _told(partitioner: Any) -> dict[str, Any]:
    """The partitioner's kind and settings, which ranks compare."""
    if partitioner is None:
        return {"variable_partitioner": None}
    plain = {k: v for k, v in vars(partitioner).items() if isinstance(v, int | float | str)}
    name = getattr(partitioner, "__qualname__", type(partitioner).__name__)
    return {"variable_partitioner": (name, sorted(plain.items()))}
