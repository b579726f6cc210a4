"""A Ray cluster: connecting to it, what it can place, and whether its head is alive."""

from __future__ import annotations

import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

from normscope.errors import NormscopeError, NormscopeWarning

REACH = 5.0  # seconds for a connection to the head
LOST = 3  # attempts in a row that fail before the head counts as dead
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Placement:
    """How many workers a cluster can place, and the GPUs of each."""

    workers: int
    gpus: float


@dataclass
class Cluster:
    """A connected cluster."""

    ray: Any
    head: str | None  # host:port of its head; None if unknown
    failures: int = 0

    def check_head(self) -> None:
        """Raise if the head could not be reached several times in a row. Ray itself would end this process."""
        if self.head is None:
            return
        self.failures = 0 if _is_reachable(self.head) else self.failures + 1
        if self.failures >= LOST:
            raise NormscopeError(
                f"The head of the Ray cluster at {self.head} does not answer any more. Finished shards are kept: start "
                "the cluster and run the same command again to resume."
            )


def import_ray() -> Any:
    """The module ray."""
    try:
        import ray
    except ImportError as error:
        raise NormscopeError("The engine 'ray' needs Ray: pip install 'normscope[ray]'.") from error
    return ray


@contextmanager
def connected_cluster(address: str | None) -> Iterator[Cluster]:
    """The cluster at an address, a new one on this machine, or the one that this process is connected to. A connection
    made here is closed at the end."""
    ray = import_ray()
    if ray.is_initialized():
        yield Cluster(ray, _head_of(ray))
        return
    handlers = _signal_handlers()
    try:
        _connect(ray, address)
        _restore_signal_handlers(handlers)  # Ray ends a process at SIGTERM
        yield Cluster(ray, _head_of(ray))
    finally:
        ray.shutdown()
        _restore_signal_handlers(handlers)


def place_workers(nodes: Sequence[Any], workers: int, threads: int) -> Placement:
    """As many workers as the machines of a cluster can hold, with a warning if these are fewer than asked for; raise if
    there is no room for any. `nodes` are those of `ray.nodes()`. GPUs are divided among the workers."""
    resources = [node["Resources"] for node in nodes if node.get("Alive", node.get("alive"))]
    devices = sum(int(one.get("GPU", 0)) for one in resources)
    gpus = 0.0 if not devices else 1.0 if workers <= devices else 1 / ceil(workers / devices)
    room = 0
    for one in resources:
        fits = int(one.get("CPU", 0) // threads)
        room += min(fits, int(one.get("GPU", 0)) * round(1 / gpus)) if gpus else fits
    if not room:
        most = max((int(one.get("CPU", 0)) for one in resources), default=0)
        raise NormscopeError(
            f"The Ray cluster has no room for a worker with threads={threads}: its largest machine has "
            f"{most} processors{' and it has too few GPUs' if gpus and most >= threads else ''}. Use fewer threads."
        )
    if room < workers:
        warnings.warn(
            f"The Ray cluster has room for {room} of {workers} workers with threads={threads}; {room} are started.",
            NormscopeWarning,
            stacklevel=2,
        )
    return Placement(min(room, workers), gpus)


def _connect(ray: Any, address: str | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    else:
        target = address.removeprefix("ray://")
        host, _, port = target.rpartition(":")
        if address not in ("auto", "local"):
            if not host or not port.isdigit():
                raise NormscopeError(f"address={address!r} is not an address such as 10.0.0.1:6379, or auto.")
            if not _is_reachable(target):
                raise NormscopeError(
                    f"No Ray cluster answers at {address}. Start its head with `ray start --head`, and check the "
                    "address and the network."
                )
        options["address"] = address
        if host.strip("[]") in LOOPBACK and target == address:
            options["_node_ip_address"] = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        ray.init(**options)
    except Exception as error:  # Ray raises many types
        reason = " ".join(str(error).split())[:300]
        doing = "start Ray" if address is None else f"connect to the Ray cluster at {address}"
        raise NormscopeError(f"Cannot {doing}: {reason}") from error


def _head_of(ray: Any) -> str | None:
    try:
        address = str(ray.get_runtime_context().gcs_address)
    except Exception:  # a client connection has none
        return None
    return address if ":" in address else None


def _is_reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACH):
            return True
    except (OSError, ValueError):
        return False


def _signal_handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


def _restore_signal_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:
            signal.signal(number, handler)
