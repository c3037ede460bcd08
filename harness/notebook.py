"""Completions in three calls, for a notebook or a script: `kvsweep.load_model`, `policy` and `generate`."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import InstanceOf, PositiveInt

from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policy import Policy
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import Branch, Request, build_decoding
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model as load
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.settings import build, compose_config, plain_config_errors
from kvsweep.harness.sweep.grid import build_policies
from kvsweep.harness.sweep.source import Decoded
from kvsweep.kernels.implementation import Implementation
from kvsweep.messages.checked import checked
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import Completion


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """What `generate` takes, so that one word for a list of words is refused."""

    model: InstanceOf[LoadedModel]
    policy: InstanceOf[Policy]
    prompts: list[str]
    seed: int = 0
    slots: PositiveInt | None = None
    cache: InstanceOf[CacheConfig] = UNPACKED
    impl: Implementation = "torch"


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Raise a user's mistake without the errors that led to it, which would fill a notebook's page."""
    try:
        with plain_config_errors():
            yield
    except UserError as error:
        raise type(error)(str(error)) from None


def load_model(name: str, *overrides: str) -> LoadedModel:
    """The model of conf/model/NAME.yaml, changed by overrides such as "model.path=DIR"; a mistake is a UserError."""
    with _one_sentence():
        return load(build(ModelConfig, "model", compose_config(f"model={name}", *overrides).model))


def policy(name: str, model: str = "toy_qwen", **settings: Any) -> Policy:
    """The policy of conf/policy/NAME.yaml with these settings, such as keep_ratio; a mistake is a UserError.

    What is not given, such as the budget or a predictor, is that of conf/model/MODEL.yaml.
    """
    given = [f"policy.{key}={json.dumps(value)}" for key, value in settings.items()]
    with _one_sentence():
        # Without a grid there is one policy.
        [made] = build_policies(compose_config(f"model={model}", f"policy={name}", *given))
    return made


def generate(
    model: LoadedModel,
    policy: Policy,
    prompts: Iterable[str],
    *,
    max_new_tokens: int,
    temperature: float = 0.6,
    top_p: float = 0.95,
    seed: int = 0,
    **options: Any,
) -> list[Completion]:
    """A completion for each user message, in their order; `options` are those of `Engine`, such as slots.

    Raises UserError for an argument of another type, and for a policy or a cache that a sweep with this model refuses,
    such as another model's predictor.
    """
    arguments = {"model": model, "policy": policy, "prompts": prompts, "seed": seed, **options}
    with _one_sentence():
        given = checked(_Arguments, arguments, extra=True)
        Decoded.read(given.cache, given.impl, model.config, [policy])  # only for its refusals
    branches = (Branch(cell_id=policy.name, policy=policy),)  # here is no cell, so any id does
    decoding = build_decoding(
        {"name": "notebook", "temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens}
    )
    # Prompts are numbered in place of problems' ids; the numbers give the order back at the end.
    requests = [
        Request(problem_id=str(number), draw=0, prompt_ids=model.dialogue.prompt_ids(prompt), branches=branches)
        for number, prompt in enumerate(given.prompts)
    ]
    if not requests:
        return []
    engine = Engine.sized_for(requests, model, decoding=decoding, seed=seed, **options)
    completions = [completion for _, completion in engine.generate(requests)]  # in the order in which they end
    return sorted(completions, key=lambda completion: int(completion.problem_id))
