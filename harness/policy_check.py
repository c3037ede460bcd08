"""`kvsweep policy check NAME`: a policy on small caches."""

from collections.abc import Sequence

from kvsweep.compression.trial import check, trials
from kvsweep.harness import settings
from kvsweep.harness.sweep.grid import build_policies
from kvsweep.messages.errors import UserError

# Made from one model, whose layers and heads the caches do not have.
_OF_A_MODEL = {"statistics", "labels"}


def check_policy(name: str, overrides: Sequence[str]) -> None:
    """Print a line for each cache; a UserError names the policy's first fault."""
    with settings.plain_config_errors():
        [policy] = build_policies(settings.compose_config(f"policy={name}", *overrides))
    of_model = sorted(_OF_A_MODEL & policy.ARTIFACTS.keys())
    if of_model:
        raise UserError(
            f"policy={name}: policy.{of_model[0]} is made for one model, whose layers these caches do not have: "
            "try the policy in a sweep with benchmark.limit=1."
        )
    caches = trials(policy)
    kept = check(caches)
    for trial in caches:
        print(
            f"{trial.name:<16} {trial.layers} x {trial.kv_heads} heads  keeps {kept[trial.name].shape[-1]} of "
            f"{trial.length} cached tokens"
        )
    print(f"policy={name}: no fault found.")
