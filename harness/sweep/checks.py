"""Check a job's settings and files against each other; each contradiction is a UserError."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsweep.compression import artifacts
from kvsweep.compression.config import CacheConfig
from kvsweep.compression.policy import BudgetPolicy, Policy
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.spec import ModelSpec
from kvsweep.messages.errors import UserError


def input_files(model: ModelConfig, policies: Sequence[Policy], cache: CacheConfig) -> dict[Path, str]:
    """Return the weight files on this disk that the outputs depend on, each with its hash."""
    files = model.files() | artifacts.files(cache.placed)
    for policy in policies:
        files |= policy.files()
    return files


def rounds_until(draws: int, cache: CacheConfig, policies: Sequence[Policy]) -> tuple[int, ...]:
    """Return the draws per problem until the end of each round of `until=decided`, 2, 4, 8, ..., `draws`."""
    if draws < 2:
        raise UserError(f"until=decided has no rounds with draws={draws}: give draws=2 or more, or until=null.")
    names = {policy.name for policy in policies}
    if "full" not in names or len(names) < 2:
        compares = f"compares cells with the full cache, and the grid has {', '.join(sorted(names))} alone"
        raise UserError(f"until=decided {compares}: let grid.policy name full and another policy, or give until=null.")
    if cache.is_packed:
        compared = "until=decided compares cells with the full cache of unpacked rows"
        no_full = f"which a job of{cache.title} does not decode"  # the title begins with a blank
        raise UserError(f"{compared}, {no_full}: give until=null, or cache.bits=16.")
    return doubled(draws)


def doubled(draws: int) -> tuple[int, ...]:
    """Return 2, 4, 8, ... up to `draws`, which is at least 2."""
    powers = (2**exponent for exponent in range(1, (draws - 1).bit_length()))  # below `draws`
    return (*powers, draws)


def check_tags(model: ModelConfig, policies: Sequence[Policy]) -> None:
    """Refuse policies that need the end of the thinking, if the model names no tag."""
    for policy in policies:
        if model.think_end is None and isinstance(policy, BudgetPolicy) and policy.THINKS:
            untagged = f"policy={policy.name} keeps the answer behind model.think_end, which is null"
            raise UserError(f"{untagged}: name the tag that closes the model's thinking, or choose another policy.")


def check_artifacts(model: ModelConfig, spec: ModelSpec, users: Sequence[Policy | CacheConfig]) -> None:
    """Refuse artifacts made for another model; `users` are the policies and the cache that name artifacts."""
    artifacts_used = set[tuple[str, str]]()  # kind and place
    for user in users:
        artifacts_used.update(user.placed.items())
    for kind, place in sorted(artifacts_used):
        card = artifacts.read_card(kind, place)
        other = other_model(card, model, spec) or other_sizes(kind, place, model, spec)
        if other:
            without = "cache.scale=none" if kind == "scales" else "policy=window"
            hint = f"give one made for this model (`kvsweep predictor`), or take {without}, which needs no {kind}"
            names = "model.name=NAME model.title=TITLE name a model of your own, or a copy as the card names it"
            raise UserError(f"{artifacts.setting(kind)}={place} was made for {other}: {hint}; {names}.")


def other_model(card: Mapping[str, Any], model: ModelConfig, spec: ModelSpec) -> str:
    """Return the other model named in an artifact's card, and this one, as text; "" if it may be this one."""
    if card["hidden_size"] != spec.hidden_size:
        return f"hidden size {card['hidden_size']}, but model={model.name} has {spec.hidden_size}"
    weights = model.identity()["weights"]
    made_for = card.get("model_weights", weights)
    if made_for == weights:
        return ""
    # A model of the hub is identified by PLACE@COMMIT, a folder by a hash. If one is from the hub and the other is not,
    # nobody can say if the weights are the same; there the model's name decides.
    both_on_hub_or_neither = ("@" in made_for) == ("@" in weights)
    if both_on_hub_or_neither or card.get("model", model.name) != model.name:
        return f"{card.get('model')} ({made_for}), but model={model.name} is {weights}"
    return ""


def other_sizes(kind: str, place: str, model: ModelConfig, spec: ModelSpec) -> str:
    """Return the first size of an artifact's tensors that is not the model's, and the model's, as text; else ""."""
    sizes = {"layers": spec.layers}  # in the order of the tensor's dimensions
    if kind == "statistics":
        # The rotary embedding turns a head's numbers in pairs, which have a mean query each.
        sizes |= {"query heads": spec.q_heads, "pairs": spec.head_dim // 2}
        tensor = "mean_real"
    elif kind == "scales":
        tensor = "keys"
    else:  # a predictor: its card has the only size to compare
        return ""
    shape, _ = artifacts.tensors_of(kind, place)[tensor]
    for stored, (name, size) in zip(shape, sizes.items(), strict=True):
        if stored != size:
            return f"{stored} {name}, but model={model.name} has {size}"
    return ""


def check_cache(cache: CacheConfig, impl: str, model: ModelConfig, spec: ModelSpec, policies: Sequence[Policy]) -> None:
    """Refuse policies without a layer to evict from, and a precision that is not supported."""
    # Questions of one token: whether a policy evicts at all does not depend on their length.
    evicting_names = [policy.name for policy in policies if policy.trigger(1) is not None]
    if not spec.layers and evicting_names:
        no_rows = f"no layer of full attention, whose rows policy={evicting_names[0]} could evict"
        raise UserError(f"model={model.name} has {no_rows}: choose policy=full.")
    cache.row_formats(spec.head_dim)  # raises UserError for a width of heads that the scheme cannot pack
    cache.check_implementation(impl)
    if spec.layers:
        cache.bytes_per_slot(spec, itemsize=1, capacity=0)  # raises UserError if all layers are to stay whole
