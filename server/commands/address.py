"""Choose the address that `tandem serve` listens on, from the file and the options, and check that it is free."""

import os
import socket

from server.deployment import ConfigError, Deployment


def override_address(deployment: Deployment, host: str | None, port: int | None) -> Deployment:
    update = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    return deployment.model_copy(update={"server": deployment.server.model_copy(update=update)})


def require_free_port(host: str, port: int) -> None:
    """Raise ConfigError if nothing can listen there: before the model is loaded, not after."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise ConfigError(
                f"server.host: {host!r} is not an address of this machine ({error.strerror}); give another --host"
            ) from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(
                f"server.port: cannot listen on {host}:{port} ({reason}); give another --port, or 0 for any free one"
            ) from None
