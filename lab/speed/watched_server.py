"""Serve a deployment, with a clock on its engine's loop: `python -m lab.speed.watched_server CONFIG PORT FILE`."""

import sys
from pathlib import Path

from server.commands.address import override_address
from server.deployment import load_deployment
from server.http.app import serve
from server.planning.deployment_plan import resolve_plan
from transfer.machine import probe_machine


def main(config: Path, port: int, file: Path) -> int:
    resolved = resolve_plan(override_address(load_deployment(config), "127.0.0.1", port), probe_machine())
    command = (sys.executable, "-m", "lab.speed.watched_engine", str(file))
    failure = serve(resolved.deployment, resolved.memory, engine_command=command)
    if failure is not None:
        print(f"error: {failure}", file=sys.stderr)
    return failure is not None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
