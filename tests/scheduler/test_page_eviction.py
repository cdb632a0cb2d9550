"""Which cached page goes first, and what a block's hash tells apart."""

from pathlib import Path

import msgspec
import numpy as np

from gpu.config import GpuConfig, ModelConfig
from gpu.profiles import Profile
from scheduler.cache.page_pool import PagePool
from scheduler.cache.prefix_cache import PrefixCache
from scheduler.cache.window_pool import Windows
from scheduler.engine.load_engine import model_key
from scheduler.sequences.sequence import Sequence
from tests.scheduler.engines import make_request, prompt_of

HASHES = [b"first", b"second", b"third"]


def make_pool() -> tuple[PagePool, list[int]]:
    """Three pages, held and published."""
    pool = PagePool(0, 3, prefix_cache=True)
    pages = pool.allocate(3)
    pool.publish(HASHES, pages, 0, 3)
    return pool, pages


def found(pool: PagePool) -> list[int]:
    """Pages of the known front."""
    return list(pool.prefix_pages(HASHES, pool.count_known(HASHES, 0, len(HASHES))).page_ids)


def test_the_page_that_was_used_longest_ago_is_evicted_first() -> None:
    pool, pages = make_pool()
    for page in pages:
        pool.release([page])
    pool.hold(pages[:1])
    pool.release(pages[:1])
    pool.allocate(2)
    assert found(pool) == pages[:1]


def test_a_prefix_is_evicted_from_its_end() -> None:
    pool, pages = make_pool()
    pool.release(pages)
    pool.allocate(1)
    assert found(pool) == pages[:2]


def test_a_page_of_two_holders_stays_until_both_have_let_go() -> None:
    pool, pages = make_pool()
    pool.hold(pages[:1])
    pool.release(pages)
    assert (pool.num_held, pool.num_available) == (1, 2)
    pool.release(pages[:1])
    assert (pool.num_held, pool.num_available) == (0, 3)


def test_what_is_retracted_is_not_found_and_its_page_is_blank() -> None:
    pool, pages = make_pool()
    pool.release(pages)
    pool.retract(b"second")
    assert found(pool) == pages[:1]
    assert (pool.num_idle, pool.num_available) == (1, 3), "nor what is behind it"


def hashes(model: bytes, kv_key: str, salt: str = "") -> list[bytes]:
    cache, profile = (
        PrefixCache(PagePool(0, 4, True), Windows(0, 0, 16, True), 16, True, model),
        Profile("a", kv_key, ()),
    )
    prompt = np.array(prompt_of(40), np.int32)
    listed = cache.hash_prompt(prompt, profile, salt, lambda: None)
    request = msgspec.structs.replace(make_request("a", prompt_of(40)), cache_salt=salt)
    assert listed == cache.known_hashes(Sequence(request, profile, prompt, []))
    return listed


def test_a_blocks_hash_names_the_model_the_making_of_its_kv_and_the_salt() -> None:
    one = hashes(b"model", "exact")
    assert len(one) == 2
    assert one == hashes(b"model", "exact")
    assert not set(one) & set(hashes(b"other", "exact"))
    assert not set(one) & set(hashes(b"model", "other"))
    assert not set(one) & set(hashes(b"model", "exact", salt="a"))


def test_a_models_key_names_its_weights_and_their_precision() -> None:
    settings = [
        (ModelConfig(path=Path("a")), GpuConfig(dtype="bfloat16")),
        (ModelConfig(path=Path("a")), GpuConfig(dtype="float32")),
        (ModelConfig(path=Path("b")), GpuConfig(dtype="float32")),
        (ModelConfig(random_weights="tiny", tokenizer=Path("a")), GpuConfig(dtype="float32")),
    ]
    assert len({model_key(None, model, gpu, "one", "") for model, gpu in settings}) == len(settings)
    plain, found = model_key(None, *settings[0], "one", ""), "0" * 32
    assert (
        len({plain, model_key(None, *settings[0], "another", ""), model_key(None, *settings[0], "one", "humming")}) == 3
    )
    assert model_key(found, *settings[1], "one", "") == model_key(found, *settings[2], "one", ""), "wherever it lies"
