"""A model over two GPUs, with NCCL inside captured graphs, says in float32 what one GPU says.

Ranks compare their tokens themselves, and one that drew another ends this process.
"""

import pytest
import torch

from gpu.config import GpuConfig, ModelConfig
from gpu.ranks import is_joined
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


def ask(number: int) -> EngineRequest:
    return ask_variously(number, (20, 300, 480, 33), ("exact", "offloaded"), 40)


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
        engine.submit([ask(number) for number in range(0, 8, 1 if host is not None else 2)])
        return drain(engine)
    finally:
        engine.shutdown()
        assert not is_joined(), "or no other engine could be split, and this process would not end"


@pytest.mark.parametrize("has_host", [False, True], ids=["pages alone", "host memory"])
def test_texts_of_two_gpus_are_those_of_one(has_host: bool) -> None:
    host = small_host().model_copy(update={"memory_limit_gib": 0.5}) if has_host else None
    alone, told = told_by(1, host), told_by(2, host)
    check_told(told, alone, ask)
