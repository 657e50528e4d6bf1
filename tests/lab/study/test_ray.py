"""Tests of the ray executor with a real Ray: retries, clusters that are joined or started, and invalid addresses."""

import http.server
import importlib.util
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from executor_work import (
    Noted,
    Stubborn,
    all_ended,
    anything,
    either,
    scale,
    slow_after_the_first,
    unpicklable_in_the_driver,
)

from intertwine.errors import InputError
from intertwine.lab.study.executors import executor
from intertwine.lab.study.executors.ray_cluster import RayCluster, load_ray, ray_session

# Not importorskip: Ray reads its log settings when it is first imported, and the executor sets them.
real_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'intertwine[cluster]'"
)
# Ray leaves some resources to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def with_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a token, as on a cluster."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


@real_ray
def test_one_of_two_workers_killed_mid_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shared = {"folder": tmp_path, "note": Noted(tmp_path / "readers")}
    tasks = ["kill once", "exit", "raise", *map(str, range(20))]
    outcomes = RayCluster(2).run(tasks, either, shared)
    found, killed = {}, None
    for outcome in outcomes:
        found[outcome.task] = outcome
        if killed is None and len(found) >= 8 and outcome.result is not None:
            killed = outcome.result[1]
            os.kill(killed, signal.SIGKILL)
    assert killed is not None
    assert set(found) == set(tasks)
    assert found["kill once"].result[0] == "kill once, then well"
    assert found["kill once"].attempts == 2
    assert (found["exit"].attempts, found["exit"].result) == (3, None)
    assert "The worker died 3 times during this task (The worker died unexpectedly" in found["exit"].error
    assert found["raise"].attempts == 1
    assert found["raise"].error.splitlines()[-1] == "KeyError: 'raise'"
    assert all(found[str(number)].result[0] == str(number) for number in range(20))
    readers = (tmp_path / "readers").read_text().split()
    assert len(readers) == len(set(readers)), "every worker reads the shared data once"
    pids = {outcome.result[1] for outcome in found.values() if outcome.result}
    assert {str(pid) for pid in pids} <= set(readers)
    assert not load_ray().is_initialized()
    assert all_ended(pids, within=5)
    assert capfd.readouterr() == ("", ""), "no log lines of Ray on the terminal"


@real_ray
def test_closing_early_ends_the_workers_and_threads_are_held() -> None:
    outcomes = RayCluster(1, threads=3).run(range(6), slow_after_the_first, {"data": torch.ones(1)})
    first = next(outcomes).result
    assert first is not None
    assert (first["OMP_NUM_THREADS"], first["torch"]) == ("3", 3)
    start = time.monotonic()
    outcomes.close()  # type: ignore[attr-defined]
    assert time.monotonic() - start < 10
    assert all_ended({first["pid"]}, within=5)


CLUSTER = """\
import logging, ray, sys
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
print(ray.get_runtime_context().gcs_address, flush=True)
for line in sys.stdin:
    print(len(ray.nodes()), flush=True)
"""


@pytest.fixture
def cluster() -> Iterator[subprocess.Popen[str]]:
    """Another process with its own Ray: it prints its address, then the number of nodes for each line of input."""
    root = Path(__file__).parents[3]
    paths = os.pathsep.join(map(str, (root / "tests/support", root / "src")))
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": paths}
    other = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield other
    load_ray().shutdown()  # first, because Ray kills a process whose cluster ends
    other.communicate(timeout=30)


@real_ray
def test_a_cluster_is_joined_and_left_running(cluster: subprocess.Popen[str]) -> None:
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    address = cluster.stdout.readline().strip()
    ray = load_ray()
    joined = executor("ray", workers=2, address=address)
    outcomes = joined.run(range(6), scale, {"factor": 2})
    found = [next(outcomes)]
    with pytest.raises(
        InputError, match=r"is already connected to a Ray cluster, at .*Leave the address out to use that one"
    ):
        joined.run([1], scale, {"factor": 2})
    with pytest.raises(InputError, match="gpus is 1, but the Ray cluster offers 0"):
        list(RayCluster(gpus=1).run([1], scale, {"factor": 2}))
    with pytest.raises(InputError, match="threads is 3, but no machine of the Ray cluster offers more than 2"):
        list(RayCluster(threads=3).run([1], scale, {"factor": 2}))
    assert [outcome.result for outcome in RayCluster().run([7], scale, {"factor": 3})] == [21]
    assert ray.is_initialized(), "an earlier connection stays open"
    with pytest.raises(InputError, match="must be picklable to reach the workers"):
        list(RayCluster().run([7], scale, {"factor": threading.Lock()}))
    with pytest.raises(
        InputError, match=r"Ray's workers cannot unpickle the work(.|\n)*made for another process(.|\n)*needs"
    ):
        list(RayCluster().run([7], scale, {"factor": Stubborn(os.getpid())}))
    refused = [
        *RayCluster().run([threading.Lock()], anything, {}),
        *RayCluster().run([1], unpicklable_in_the_driver, {}),
    ]
    assert "cannot pickle '_thread.lock' object" in (refused[0].error or "")
    assert "made for another process" in (refused[1].error or "")
    found += outcomes
    assert {outcome.result for outcome in found} == {0, 2, 4, 6, 8, 10}
    assert not ray.is_initialized(), "a connection made by the run is closed"
    cluster.stdin.write("still there?\n")
    cluster.stdin.flush()
    assert cluster.stdout.readline() == "1\n"


# -- Invalid addresses -------------------------------------------------------------------------------------------------


@real_ray
@pytest.mark.parametrize("address", ["6379", "ray://somewhere:10001", "head:", ":6379", "http://a/b:80"])
def test_a_malformed_address(address: str) -> None:
    with pytest.raises(InputError, match=r"address must be host:port, such as"):
        executor("ray", address=address)


@real_ray
@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-machine.invalid"])
def test_an_address_without_a_server(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(
        InputError, match=rf"No Ray cluster can be reached at {host}:{port} \(.*`ray start --head` prints"
    ):
        executor("ray", address=f"{host}:{port}")
    assert time.monotonic() - start < 10


class Silent(http.server.BaseHTTPRequestHandler):
    """A web server, like Ray's dashboard."""

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@real_ray
@pytest.mark.parametrize("handler", [Silent, None], ids=["a web server", "a silent server"])
def test_an_address_of_another_server(handler: Any) -> None:
    start = time.monotonic()
    with socketserver.TCPServer(("127.0.0.1", 0), handler or Silent) as server:
        if handler:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(InputError, match=r"The server at 127.0.0.1:\d+ is not a Ray cluster"):
            executor("ray", address=f"127.0.0.1:{server.server_address[1]}")
        if handler:
            server.shutdown()
    assert time.monotonic() - start < 10


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"needs Ray, which is not installed.*pip install 'intertwine\[cluster\]'"):
        executor("ray")


@pytest.mark.parametrize(
    ("options", "capacity"),
    [
        ({"workers": None}, (1, 0, 24)),  # twelve fit; as many wait in Ray
        ({"workers": 12}, (1, 0, 24)),
        ({"workers": 3}, (1, 0, 3)),  # Ray would run more than three at once
        ({"workers": None, "threads": 3}, (3, 0, 6)),  # one task on the machine of four CPUs, two on that of eight
        ({"workers": None, "gpus": 2}, (1, 1, 2)),
        ({"workers": 3, "gpus": 2}, (1, 0.5, 3)),  # two on one GPU, one on the other
        ({"workers": 6, "gpus": 2}, (1, 0.3333, 6)),
    ],
)
def test_the_capacity_of_a_cluster(options: dict[str, Any], capacity: tuple[float, ...]) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0}},
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": False, "Resources": {"CPU": 99.0, "GPU": 9.0}},
    ]
    ray = SimpleNamespace(is_initialized=lambda: True, nodes=lambda: nodes)
    with ray_session(ray, options["workers"], options.get("gpus", 0), options.get("threads"), None) as found:
        assert (found.threads, found.gpu_share, found.in_flight) == capacity
