"""Read the keys of a mixture of experts in a `config.json`."""

from gpu.model.config_keys import ConfigKeys
from gpu.model.spec import Experts, ModelError


def parse_experts(keys: ConfigKeys, count_key: str, size_key: str, is_normalised: bool) -> Experts:
    """Return the experts of a layer. count_key: of how many there are, by either of its names; size_key: of one's
    intermediate size. Raises ModelError where a token would take more than there are.
    """
    names = (count_key, *(name for name in ("num_experts", "num_local_experts") if name != count_key))
    given = [name for name in names if name in keys]
    for name in given:
        keys.get(name)
    if any(keys.get(name) != keys.get(given[0]) for name in given):
        found = ", ".join(f"{name} is {keys.get(name)!r}" for name in given)
        raise ModelError(f"model: {keys.source}: {found}; wanted one number of experts")
    num_experts = keys.positive(given[0] if given else count_key, int)
    per_token = keys.positive("num_experts_per_tok", int)
    if per_token > num_experts:
        raise ModelError(
            f"model: {keys.source}: num_experts_per_tok is {per_token}; wanted at most {num_experts}, which is how "
            "many experts there are"
        )
    return Experts(num_experts, per_token, keys.positive(size_key, int), is_normalised)
