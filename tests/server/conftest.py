"""Fixtures: a live server on the fake engine, one that calls tools as its script says, and the reference tokenizer.

Tests of a file share one server, and one event loop.
"""

from collections.abc import AsyncIterator

import pytest

from server.text.model_tokenizer import Tokenizer
from tests.server.live_server import REFERENCE, Running, fake_command, make_deployment, running_server
from tests.server.scripted_model import HERMES, Script, make_model, scripted_server


@pytest.fixture(scope="module")
async def live() -> AsyncIterator[Running]:
    async with running_server(make_deployment(), fake_command()) as running:
        yield running


@pytest.fixture
async def own_live() -> AsyncIterator[Running]:
    """A server for a test that ends its engine, changes its parts or counts from nothing."""
    async with running_server(make_deployment(), fake_command()) as running:
        yield running


@pytest.fixture(scope="module")
async def shared_hermes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Running, Script]]:
    folder = tmp_path_factory.mktemp("hermes")
    async with scripted_server(folder, make_model(folder / "model", HERMES)) as served:
        yield served


@pytest.fixture
def hermes(shared_hermes: tuple[Running, Script]) -> tuple[Running, Script]:
    """Its script is empty at the begin of each test."""
    shared_hermes[1].path.write_text("")
    return shared_hermes


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(REFERENCE, REFERENCE)
