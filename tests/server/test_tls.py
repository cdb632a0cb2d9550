"""HTTPS: the configured certificate, clients that must show theirs, and files that are none."""

import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from server.deployment import ConfigError, load_deployment
from server.http.app import http_config
from tests.server.live_server import fake_command, make_app, make_deployment, running_server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a certificate of 127.0.0.1 that has signed itself."""
    folder = tmp_path_factory.mktemp("tls")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=tandem"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run([*make.split(), *names], cwd=folder, check=True, capture_output=True)
    (folder / "both.pem").write_text((folder / "key.pem").read_text() + (folder / "certificate.pem").read_text())
    (folder / "none.pem").write_text("no certificate")
    return folder


def trusting(files: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files / "certificate.pem"))


async def test_a_server_with_a_certificate_speaks_https_alone(files):
    deployment = make_deployment(tls_certificate=files / "certificate.pem", tls_key=files / "key.pem")
    async with running_server(deployment, fake_command(), wait=False) as live:
        url = live.url.replace("http://", "https://")
        async with httpx.AsyncClient(base_url=url, verify=trusting(files)) as client:
            live.http = client
            await live.until_ready()
            body = {"prompt": "one two", "temperature": 0, "stream": True}
            answer = await client.post("/v1/completions", json=body)
            assert answer.text.endswith("data: [DONE]\n\n")
            large = await client.post("/v1/completions", json={"prompt": "word " * 200_000, "max_tokens": 1})
            assert large.status_code == 400, "a body of many TLS records is read whole"
        async with httpx.AsyncClient() as stranger:
            with pytest.raises(httpx.HTTPError):
                await stranger.get(f"{live.url}/live")
            with pytest.raises(httpx.ConnectError):  # it trusts nobody here
                await stranger.get(f"{url}/live")


async def test_a_client_without_a_certificate_is_not_let_in_where_a_ca_is_given(files):
    deployment = make_deployment(tls_certificate=files / "both.pem", tls_client_ca=files / "certificate.pem")
    async with running_server(deployment, fake_command(), wait=False) as live:
        url = live.url.replace("http://", "https://")
        async with httpx.AsyncClient(base_url=url, verify=trusting(files)) as stranger:
            with pytest.raises(httpx.HTTPError):
                await stranger.get("/live")
        known = trusting(files)
        known.load_cert_chain(files / "both.pem")
        async with httpx.AsyncClient(base_url=url, verify=known) as client:
            assert (await client.get("/live")).status_code == 200


@pytest.mark.parametrize(
    "settings",
    [
        {"tls_certificate": "missing.pem"},
        {"tls_certificate": "none.pem"},
        {"tls_certificate": "certificate.pem"},
        {"tls_certificate": "certificate.pem", "tls_key": "missing.pem"},
        {"tls_certificate": "both.pem", "tls_client_ca": "none.pem"},
    ],
)
def test_files_that_cannot_be_used_are_told_in_one_line(files, settings):
    deployment = make_deployment(**{name: files / path for name, path in settings.items()})
    with pytest.raises(ConfigError, match=r"^server.tls: one of .* cannot be used: ") as refused:
        http_config(make_app(deployment, fake_command()))
    assert "\n" not in str(refused.value)


def test_a_key_without_a_certificate_is_refused_and_paths_are_of_the_files_folder(tmp_path):
    path = tmp_path / "tandem.yaml"
    path.write_text("model: {random_weights: llama-3.1-8b}\nserver: {tls_key: key.pem}\n")
    with pytest.raises(ConfigError, match=r"tls_key: got .* without tls_certificate"):
        load_deployment(path)
    path.write_text("model: {random_weights: llama-3.1-8b}\nserver: {tls_key: key.pem, tls_certificate: c.pem}\n")
    server = load_deployment(path).server
    assert (server.tls_key, server.tls_certificate) == (tmp_path / "key.pem", tmp_path / "c.pem")
