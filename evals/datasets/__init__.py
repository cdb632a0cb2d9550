"""Read published benchmarks from local JSONL files: LongBench, LongBench v2, InfiniteBench and GSM8K.

`read(name, path, num_samples)` returns samples; a name is `family/dataset`, such as `longbench/hotpotqa`. Nothing is
downloaded. Fields are as published, but the instructions around them are worded for this project: compare methods with
them, not with published tables. `shorten` cuts the middle out of a prompt that is longer than the model's context, as
LongBench does.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from evals.datasets import gsm8k, infinitebench, longbench, longbench_v2
from evals.samples import Sample

Reader = Callable[[Path], Iterator[Sample]]

DATASETS: dict[str, Reader] = {
    **{f"longbench/{name}": longbench.reader(name) for name in longbench.DATASETS},
    "longbench_v2": longbench_v2.read,
    **{f"infinitebench/{name}": infinitebench.reader(name) for name in infinitebench.DATASETS},
    "gsm8k": gsm8k.read,
}


def read(name: str, path: Path, num_samples: int | None) -> list[Sample]:
    """Return the first num_samples samples of a file (None: all). Ids that come twice are numbered.

    Raises KeyError for an unknown name, ValueError for rows without the format's fields.
    """
    if name not in DATASETS:
        raise KeyError(f"dataset {name!r}: unknown; have {', '.join(DATASETS)}")
    samples = list(islice(DATASETS[name](path), num_samples))
    if not samples:
        raise ValueError(f"{path}: holds no rows; wanted one object on each line")
    seen: set[str] = set()
    for number, sample in enumerate(samples):
        if sample.sample_id in seen:
            samples[number] = replace(sample, sample_id=f"{sample.sample_id}#{number}")
        seen.add(samples[number].sample_id)
    return samples


def read_own(name: str, path: Path, num_samples: int, seed: int) -> list[Sample]:
    """Return num_samples samples for a seed. Each next seed gets the next samples of the file.

    After the file's end it begins again, so seeds have no samples in common while the file has enough.
    """
    with path.open(encoding="utf-8") as file:
        num_rows = sum(bool(line.strip()) for line in file)
    begin = seed % max(1, num_rows // num_samples) * num_samples
    return read(name, path, begin + num_samples)[begin:]


def shorten(sample: Sample, tokenizer: Any, limit_tokens: int) -> Sample:
    """Return the sample with its tokens counted, and with its prompt's middle cut out if it exceeds the limit.

    The limit is on prompt and answer together. tokenizer: a Hugging Face tokenizer. Raises ValueError if the limit
    leaves no room for a prompt.
    """
    room = limit_tokens - sample.max_new_tokens
    if room < 2:
        raise ValueError(f"{sample.task}: limit {limit_tokens} leaves {room} tokens beside {sample.max_new_tokens}")
    ids = tokenizer(sample.prompt, verbose=False, add_special_tokens=False)["input_ids"]
    if len(ids) <= room:
        return replace(sample, length_tokens=len(ids))
    half = room // 2
    kept = [tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:])]
    return replace(sample, prompt="".join(kept), length_tokens=2 * half, meta={**sample.meta, "shortened": len(ids)})
