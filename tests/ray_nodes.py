"""A Ray cluster whose nodes are all on this machine: each with a raylet and an object store of its
own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cluster_of(*cpus: int) -> Iterator[Any]:
    """A cluster with a node for each of the numbers of CPUs, the head first."""
    from ray.cluster_utils import Cluster

    before = signal.getsignal(signal.SIGTERM)  # every node that is added takes it for itself
    head = {"num_cpus": cpus[0], "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for more in cpus[1:]:
            cluster.add_node(num_cpus=more)
        signal.signal(signal.SIGTERM, before)
        yield cluster
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, before)
