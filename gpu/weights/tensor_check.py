"""Check in a process of its own whether a model's files hold the tensors that its configuration asks for.

Run as `python -m gpu.weights.tensor_check [mtp]`, with a `ModelConfig` as JSON on standard input, and `mtp` if a
profile drafts by the checkpoint's head. So `tandem plan` can check without torch in its own process. Only headers are
read. If loading the weights would refuse them, it ends with status REFUSED and the same reason, as one line on standard
output.
"""

import sys

from gpu.config import ModelConfig
from gpu.model.architecture import ModelError, load_architecture
from gpu.weights.checkpoint import check_checkpoint

REFUSED = 3


def check_model(model: ModelConfig, drafts: bool = False) -> None:
    """Raise ModelError for broken files, and for tensors that are missing, extra, or of another shape or type."""
    if model.path is not None:
        check_checkpoint(model.path, load_architecture(model, drafts))


def main() -> int:
    try:
        check_model(ModelConfig.model_validate_json(sys.stdin.read()), "mtp" in sys.argv)
    except ModelError as error:
        print(error)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
