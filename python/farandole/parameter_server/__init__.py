"""The asynchronous parameter server: ``import farandole.parameter_server as ps``.

Variables live on server ranks; workers pull them and push gradients, and do not wait for one
another.

    fd.init()
    node = ps.join({"w": w}, ps.SGD(0.1), servers=1)
    if node.is_server:
        node.serve()
    else:
        with node:
            for step in node.steps(1000):
                weights = node.pull()
                node.push({"w": gradient(weights["w"], step)})
"""

from __future__ import annotations

from farandole.parameter_server._joining import join
from farandole.parameter_server._losses import ServerLost
from farandole.parameter_server._rows import Rows
from farandole.parameter_server._rules import SGD, Adagrad, Rule
from farandole.parameter_server._server import Report, Server
from farandole.parameter_server._snapshots import Snapshots
from farandole.parameter_server._worker import Worker

__all__ = [
    "SGD",
    "Adagrad",
    "Report",
    "Rows",
    "Rule",
    "Server",
    "ServerLost",
    "Snapshots",
    "Worker",
    "join",
]
