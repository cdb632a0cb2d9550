"""Write the packages of the image as two lists: torch and its kernels, and all others."""

import sys
import tomllib
from pathlib import Path

TORCH = ("torch", "triton", "fbgemm-gpu", "fa3-fwd")


def main() -> None:
    """Write the lists. Arguments: pyproject.toml, the device's extra (cuda or cpu), and the folder of the lists."""
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    extras = project["optional-dependencies"]
    packages = [*project["dependencies"], *extras[sys.argv[2]], *extras["otel"]]
    folder = Path(sys.argv[3])
    folder.mkdir()
    (folder / "torch.txt").write_text("".join(f"{one}\n" for one in packages if one.startswith(TORCH)))
    (folder / "others.txt").write_text("".join(f"{one}\n" for one in packages if not one.startswith(TORCH)))


if __name__ == "__main__":
    main()
