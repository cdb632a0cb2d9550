"""A model over two GPUs, with its sums inside captured graphs, says in float32 what one GPU says. Sums through peers'
memory are NCCL's.

Ranks compare their tokens themselves, and one that drew another ends this process.
"""

import os
import subprocess
import sys
from itertools import permutations

import pytest
import torch

from gpu.config import GpuConfig, ModelConfig
from scheduler.engine.rank_processes import visible_devices
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import Delta, EngineRequest
from tests.gpu.reference_model import FOLDER
from tests.scheduler.engines import drain
from tests.scheduler.real_model import ask_variously, check_told, load, small_host
from transfer.host_config import HostConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


SUMS = """
import logging, os, sys, torch
from gpu.batching.capture import capture
from gpu.peer_sums import PeerSums, use_peer_sums, what_is_wrong
from gpu.ranks import ProcessRanks, open_store
logging.basicConfig(level=logging.INFO)
rank, count, port = map(int, sys.argv[1:])
store = open_store(rank, count, port)
print(store.port, flush=True)
ranks = ProcessRanks(rank, count, torch.device("cuda"), store)
use_peer_sums(ranks)  # whatever it chooses
peers = PeerSums(ranks.device)
ranks.small = None
assert what_is_wrong(ranks, peers, ranks.device) is None
torch.manual_seed(rank)
for dtype in (torch.bfloat16, torch.float32):
    for rows, columns in ((1, 64), (1, 4096), (7, 5120), (16, 5120), (32, 8192)):
        shape = (24, rows, columns)  # sums behind each other, in the same place
        own = torch.empty(shape, dtype=dtype, device="cuda")
        graph, _ = capture(lambda: [peers.add_up(one) for one in own], None)
        for _ in range(20):
            given = torch.randn(shape, device="cuda").to(dtype)
            own.copy_(given)
            graph.replay()
            wanted, magnitude = ranks.add_up(given.double()), ranks.add_up(given.double().abs())
            assert ((own - wanted).abs() <= count * torch.finfo(dtype).eps * magnitude).all(), (dtype, shape)
            bits = ranks.join(own.view(torch.int32).view(1, -1)).view(count, -1)
            assert (bits == bits[0]).all(), (dtype, shape)
        del graph
ranks.close(lambda: None)
assert not torch.distributed.is_initialized()
os._exit(0)  # the end of an interpreter is another matter, and the engines' below
"""


def test_sums_through_peers_memory_are_those_of_nccl_and_of_the_same_bits_on_each() -> None:
    count = min(4, torch.cuda.device_count())
    if not all(torch.cuda.can_device_access_peer(one, other) for one, other in permutations(range(count), 2)):
        pytest.skip("devices cannot access each other's memory")
    visible = visible_devices(count)
    environments = [os.environ | ({"CUDA_VISIBLE_DEVICES": visible[rank]} if rank else {}) for rank in range(count)]
    port, processes = "0", []
    for rank, environment in enumerate(environments):
        command = [sys.executable, "-c", SUMS, str(rank), str(count), port]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        if rank == 0:
            assert processes[0].stdout is not None
            port = processes[0].stdout.readline().strip()
    try:
        for process in processes:
            process.communicate(timeout=100)
        assert [process.returncode for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()


def ask(number: int) -> EngineRequest:
    """Return one of four: in pages without and with logprobs, and in host memory likewise."""
    return ask_variously(number, (20, 300, 480, 333), ("exact", "exact", "offloaded", "offloaded"), 40)


def told_by(devices: int, host: HostConfig | None) -> dict[str, list[Delta]]:
    engine = load(EngineConfig(
        model=ModelConfig(path=FOLDER),
        gpu=GpuConfig(device="cuda", dtype="float32", kv_cache_gib=0.2 / devices, devices=devices,
                      graph_batch_sizes=(1, 2, 4, 8), prefill_graph_sizes=(128,)),
        host=host,
        scheduler=SchedulerConfig(max_running=8, max_context_tokens=1200),
    ))  # fmt: skip
    try:
        assert engine._runner.decode_steps._captured
        engine.submit([ask(number) for number in range(8) if host is not None or number % 4 < 2])
        return drain(engine)
    finally:
        engine.shutdown()
        assert not torch.distributed.is_initialized(), (
            "or no other engine could be split, and this process would not end"
        )


@pytest.mark.parametrize("has_host", [False, True], ids=["pages alone", "host memory"])
def test_texts_of_two_gpus_are_those_of_one(has_host: bool) -> None:
    host = small_host().model_copy(update={"memory_limit_gib": 0.5}) if has_host else None
    alone, told = told_by(1, host), told_by(2, host)
    in_pages = {name for name in told if int(name) % 4 < 2}
    check_told({name: told[name] for name in in_pages}, {name: alone[name] for name in in_pages}, ask)
    in_host_memory = told.keys() - in_pages  # whose rows are bf16: a sum's last bit may round one to the other side
    check_told(
        {name: told[name] for name in in_host_memory}, {name: alone[name] for name in in_host_memory}, ask, within=2e-2
    )
