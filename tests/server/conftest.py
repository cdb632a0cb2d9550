"""Fixtures: a live server on the fake engine, one that calls tools as its script says, and the reference tokenizer."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from server.text.model_tokenizer import Tokenizer
from tests.server.live_server import REFERENCE, Running, fake_command, make_deployment, running_server
from tests.server.scripted_model import HERMES, Script, make_model, scripted_server


@pytest.fixture
async def live() -> AsyncIterator[Running]:
    async with running_server(make_deployment(), fake_command()) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_live() -> AsyncIterator[Running]:
    """One server for a file whose tests leave nothing behind: they need `pytest.mark.asyncio(loop_scope="module")`."""
    async with running_server(make_deployment(), fake_command()) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_hermes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Running, Script]]:
    folder = tmp_path_factory.mktemp("hermes")
    async with scripted_server(folder, make_model(folder / "model", HERMES)) as served:
        yield served


@pytest.fixture
async def hermes(tmp_path: Path) -> AsyncIterator[tuple[Running, Script]]:
    async with scripted_server(tmp_path, make_model(tmp_path / "model", HERMES)) as served:
        yield served


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(REFERENCE, REFERENCE)
