"""Models by name: from a hub on loopback into a cache folder, resumed, gated, without a network; and their list."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from server.commands.named_models import describe_models, open_deployments, plan_models
from server.deployment import model_name
from server.hub.hub_models import fetch_model, list_cached
from server.hub.hub_name import HubError, HubName, choose_files, find_gguf, quant_of, read_name
from tests.server.hub_server import SHA, TOKEN, HubServer
from tests.server.live_server import LAPTOP, REFERENCE, ROOT
from transfer.machine import load_machine

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 8192,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 5, "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip
GGUF = {f"model-{quant}.gguf": quant.encode() * 9 for quant in ("Q4_K_M", "Q8_0", "F16")}


def tiny_checkpoint() -> dict[str, bytes]:
    """Return the files of a model with the reference's tokenizer, and of others that nobody needs."""
    shapes = {"embed_tokens": (8192, 32), "norm": (32,)}
    layer = {
        "input_layernorm": (32,), "post_attention_layernorm": (32,), "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64),
    }  # fmt: skip
    shapes |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    tensors = {f"model.{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    files = {name: (REFERENCE / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    unread = {"pytorch_model.bin": b"x" * 100, "README.md": b"tiny", "onnx/model.onnx": b"y" * 100}
    return {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": save(tensors)} | files | unread


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    server = HubServer({"someone/tiny": tiny_checkpoint(), "someone/quants": GGUF, "someone/mine": tiny_checkpoint()})
    server.gated.add("someone/mine")
    yield server
    server.close()


@pytest.fixture
def cache(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the library at the hub and at a cache folder of this test."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template[template.index("/{repo_id}") :])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path


def test_a_name_is_read_and_what_is_none_is_told(subtests: pytest.Subtests) -> None:
    for text, name in (
        ("hf:a/b", HubName("a/b", None, None)),
        ("hf:a-1/b.c_d@v1:Q4_K_M", HubName("a-1/b.c_d", "v1", "Q4_K_M")),
        ("hf:a/b:sub/x.gguf", HubName("a/b", None, "sub/x.gguf")),
    ):
        assert read_name(text) == name
        assert str(name) == text
    for text in ("hf:", "hf:a", "hf:a/b/c", "hf:a/b:", "hf:a/ b", "hf:https://x/y", "hf:../../etc:x"):
        with subtests.test(text=text), pytest.raises(HubError, match="wanted hf:OWNER/NAME"):
            read_name(text)


def test_the_files_that_a_name_means_are_chosen_or_the_choice_is_told() -> None:
    name = HubName("a/b", None, None)
    of_folder, opened = choose_files(name, tiny_checkpoint())
    assert opened == ""
    assert of_folder == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert choose_files(name, GGUF) == (["model-Q4_K_M.gguf"], "model-Q4_K_M.gguf")
    for choice in ("q8_0", "Q8_0", "model-Q8_0.gguf", "model-Q8_0"):
        assert choose_files(HubName("a/b", None, choice), GGUF)[1] == "model-Q8_0.gguf"
    with pytest.raises(HubError, match=r"hf:a/b:Q5_K: none of its files .* F16, Q4_K_M, Q8_0 behind a colon"):
        choose_files(HubName("a/b", None, "Q5_K"), GGUF)
    with pytest.raises(HubError, match="several files match; wanted one of F16, Q8_0 behind"):
        choose_files(name, ["m-F16.gguf", "m-Q8_0.gguf"])
    with pytest.raises(HubError, match=r"neither config\.json"):
        choose_files(name, ["README.md", "pytorch_model.bin", "config.json"])
    parts = [f"Q8_0/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    several = [*parts, "mmproj-F16.gguf", "m-Q4_K_M.gguf"]
    assert choose_files(HubName("a/b", None, "Q8_0"), several) == (parts, parts[0])
    assert find_gguf(several) == [parts[0], "m-Q4_K_M.gguf"]
    assert [quant_of(file) for file in (*several, "x.gguf", "a.IQ2_XXS.gguf")] == [
        "Q8_0", "Q8_0", "F16", "Q4_K_M", None, "IQ2_XXS"
    ]  # fmt: skip


def test_a_folder_is_fetched_once_and_served_from_the_cache_without_a_network(hub: HubServer, cache: Path) -> None:
    [deployment] = open_deployments(Path("hf:someone/tiny"), is_offline=False)
    assert deployment.model.path == cache / "models--someone--tiny" / "snapshots" / SHA
    assert model_name(deployment) == "someone/tiny"
    fetched = {path.name for path in deployment.model.path.iterdir()}
    assert fetched == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    before = hub.num_requests
    assert open_deployments(Path("hf:someone/tiny"), is_offline=True) == (deployment,)
    assert hub.num_requests == before
    [listed] = list_cached(cache)
    assert (listed.name, listed.path) == ("hf:someone/tiny", deployment.model.path)
    found = plan_models([listed], load_machine(LAPTOP))
    assert found[0].context_tokens == 4096
    told = describe_models(found, load_machine(LAPTOP))["models"][0]
    assert (told["fits"], told["size_bytes"]) == (True, listed.size_bytes)


def test_a_gguf_file_alone_is_fetched_and_listed_by_its_quant(cache: Path) -> None:
    path = fetch_model(read_name("hf:someone/quants:q8_0"), cache=cache)
    assert path.read_bytes() == GGUF["model-Q8_0.gguf"]
    assert [other.name for other in path.parent.iterdir()] == ["model-Q8_0.gguf"]
    [listed] = list_cached(cache)
    assert (listed.name, listed.size_bytes) == ("hf:someone/quants:Q8_0", len(GGUF["model-Q8_0.gguf"]))
    [found] = plan_models([listed], load_machine(LAPTOP))
    assert found.context_tokens is None
    assert "GGUF" in found.why_not, "what is broken is listed with the reason"


def test_a_download_that_ended_early_goes_on_where_it_was(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
    weights = hub.files["someone/tiny"]["model.safetensors"]
    hub.cut_bytes["model.safetensors"] = len(weights) // 2
    hub.ranges.clear()
    path = fetch_model(read_name(f"hf:someone/tiny@{SHA}"), cache=cache)
    assert (path / "model.safetensors").read_bytes() == weights
    begins = [int(one.partition("bytes=")[2].partition("-")[0]) for one in hub.ranges]
    assert any(0 < begin <= len(weights) // 2 for begin in begins)


def test_what_is_not_there_or_not_shown_is_told_in_a_line(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, told in (
        ("hf:someone/nothing", "has no such model"),
        ("hf:someone/tiny@v9", "has no revision 'v9'"),
        ("hf:someone/mine", "gated; accept its terms at"),
        ("hf:someone/quants:Q2_K", "wanted one of"),
    ):
        with pytest.raises(HubError, match=told) as refused:
            fetch_model(read_name(name), cache=cache)
        assert str(refused.value).startswith(f"{name}: ")
        assert "\n" not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch_model(read_name("hf:someone/mine"), cache=cache).is_dir()


def test_without_a_network_what_was_fetched_is_served_and_all_else_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = read_name("hf:someone/tiny")
    with pytest.raises(HubError, match="--offline or HF_HUB_OFFLINE keeps it from the network; fetch it once"):
        fetch_model(name, is_offline=True, cache=cache)
    path = fetch_model(name, cache=cache)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetch_model(name, cache=cache) == path
    with pytest.raises(HubError, match=r"http://127.0.0.1:9 cannot be reached .* is there a network\?"):
        fetch_model(read_name("hf:someone/quants:Q8_0"), cache=cache)


def test_the_command_line_plans_a_model_by_name_and_lists_it(hub: HubServer, tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    code = (
        "import sys; from server.commands.tandem import app\n"
        f"for words in (['plan', 'hf:someone/tiny', '--machine', {str(LAPTOP)!r}],\n"
        f"              ['models', '--json', '--machine', {str(LAPTOP)!r}]):\n"
        "    app(words, standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout[done.stdout.rindex('{\n  "machine"') :])
    assert [one["name"] for one in listed["models"]] == ["hf:someone/tiny"]
