"""A server used instead of kvsweep's own engine: its address, how it is asked, and what the user declares of it."""

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policy import Policy
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.settings import build, build_target, plain
from kvsweep.harness.sweep.source import Source
from kvsweep.kernels.implementation import Implementation
from kvsweep.messages.errors import UserError
from kvsweep.run_files.run_reader import CONTROL

# Fields of a request that a cell's settings decide, with the keys that set them.
_DECLARED = {"max_tokens": "decoding.max_new_tokens", "seed": "seed", "n": "draws", "model": "engine.model"}
_DECLARED |= {name: f"decoding.{name}" for name in ("temperature", "top_p", "top_k")}
_DECLARED |= dict.fromkeys(("messages", "prompt"), "benchmark")


@dataclass(frozen=True, kw_only=True)
class Server(FullCache):
    """One setting of a server of OpenAI's API, in a policy's place; conf/engine/openai.yaml describes the fields."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][\w.-]*$")] = "full"
    title: str | None = None
    url: str
    model: str
    api: Literal["chat", "completions"] = "chat"
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    seed: bool = True
    kept_bytes: PositiveFloat | None = None
    key_env: str | None = None
    parallel: PositiveInt = 8
    check: NonNegativeInt = 0
    log: str | None = None
    control: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_address(self.url)
        if self.key_env is not None and not self.key:
            # Do not print this value: a user may have put the key itself here.
            raise UserError("engine.key_env names no environment variable that is set: set it, and give its name.")
        for name, value in self.extra.items():
            if name in _DECLARED and value is not None:  # null only leaves the field out
                raise UserError(f"engine.extra={{{name}: ...}} changes what the cell declares: set {_DECLARED[name]}.")

    @property
    def key(self) -> str | None:
        """The key, which the variable `key_env` has; None without one."""
        return os.environ.get(self.key_env or "")

    def identity(self) -> dict[str, Any]:
        """Everything that is declared and sent. A server that is restarted elsewhere continues the same cell."""
        fields = dataclasses.asdict(self)
        for name in ("url", "key_env", "parallel", "check", "log", "control"):
            del fields[name]
        return {**fields, "kind": "declared"}


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if it is no number
    except ValueError:  # also for http://[HOST
        parts = urlsplit("")  # without a scheme, which is refused
    # What stands before an @ or behind a question mark may be a key.
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        # Do not print the address: it may contain a key.
        raise UserError("engine.url is no plain address: write http://HOST:PORT/v1, and name a key's variable.")


@dataclass(frozen=True, kw_only=True)
class ServedModel(ModelConfig):
    """The name of a model on servers, and its thinking tags; its weights are unknown."""

    path: str | None = "served"
    device: str = "cpu"

    @property
    def commit(self) -> None:
        return None

    def files(self) -> dict[Any, str]:
        return {}

    def identity(self) -> dict[str, Any]:
        return {"weights": self.path, "think_end": self.think_end}


# The settings of a model that a job of servers uses: its names and tags.
NAMES = ("name", "title", "think_start", "think_end")


def _only_model(url: str, key_env: str | None) -> str:
    """Return the model that a server lists; raises UserError if it lists none or several."""
    import openai  # takes a second

    _check_address(url)
    key = os.environ.get(key_env or "") or "none"  # the client refuses an empty one
    try:
        client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=10)
        models = [model.id for model in client.models.list()]
    except openai.OpenAIError:
        models = []
    if len(models) != 1:
        raise UserError(
            f"engine.model is missing, and the server lists {len(models)} models: "
            f"start it, or give one of its models. {', '.join(models[:10])}"
        )
    return models[0]


def _check_names(servers: Sequence[Server]) -> None:
    """Refuse two settings of one name, settings without a baseline, and a control that is another setting."""
    name, count = Counter(server.name for server in servers).most_common(1)[0]
    if count > 1:
        raise UserError(f"grid.engine has {count} settings of the name {name}: give each its own.")
    identities = {server.name: server.identity() for server in servers}
    if len(servers) > 1 and "full" not in identities:
        raise UserError("grid.engine has no setting with name: full, the baseline of the others: name one so.")
    if "full" in identities and CONTROL in identities:
        full = identities["full"]
        control = identities[CONTROL]
        different = [name for name in full if name not in ("name", "title") and full[name] != control[name]]
        if different:
            raise UserError(
                f"grid.engine: {CONTROL} and full differ in {', '.join(different)}, "
                "but a control is the full setting again."
            )


def _asked_again(full: Server) -> Server:
    """Return the control of the full setting: the same server, asked a second time."""
    title = f"{full.title}, asked again" if full.title else "asked again"
    return dataclasses.replace(full, name=CONTROL, title=title)


class Served(Source):
    """Servers of OpenAI's API: each cell's policy is a `Server`, and nothing is known of the model but its name."""

    filler = "kvsweep.harness.sweep.ask"
    local = False
    lent = "the tags of thinking"
    unused = (
        "policy",
        "cache.",
        "grid.",
        "model.",
        "impl",
        "slots",
        "invariant",
        "replay",
        "screen",
        "texts",
        "card",
        "cost.",
    )
    used = ("grid.engine", "model.sizes", *(f"model.{name}" for name in NAMES))
    why = "with engine=openai the server decides that"

    @classmethod
    def check(cls, config: DictConfig) -> None:
        """Let each setting without a model ask for the only one that its server lists; the first names the results."""
        if find_spec("openai") is None:
            raise UserError("engine=openai needs the package openai: pip install 'kvsweep[openai]'.")
        grid = OmegaConf.select(config, "grid.engine")
        settings = grid if OmegaConf.is_list(grid) else [config.engine]
        with open_dict(config):
            for setting in settings:
                if not OmegaConf.is_dict(setting):
                    continue  # refused by `choose`
                complete_setting = {**config.engine, **setting}  # what the setting leaves open is that of `engine`
                if complete_setting["model"] is None and complete_setting["url"] is not None:
                    setting.model = _only_model(str(complete_setting["url"]), complete_setting["key_env"])
                if config.engine.model is None:  # only at the first setting
                    config.engine.model = setting.get("model")

    @classmethod
    def choose(cls, config: DictConfig) -> tuple[ModelConfig, list[Policy]]:
        """Return the model's name, and one server per setting of `grid.engine`, or the one of `engine`."""
        stops_on_loop = config.decoding.stop_on_loop
        order = config.decoding.order
        # The order of the two limits makes a difference only where both are set.
        if stops_on_loop or (order == "top_p_then_top_k" and config.decoding.top_k and config.decoding.top_p < 1):
            raise UserError(
                f"decoding.stop_on_loop={str(stops_on_loop).lower()} and decoding.order={order} "
                "are nothing that a server can be asked for: set false and top_k_then_top_p."
            )
        engine = plain(config.engine)
        grid = plain(config.grid)["engine"]
        if grid is None:  # one setting, that of `engine` unchanged
            grid = [{}]
        if not grid or not isinstance(grid, list) or not all(isinstance(setting, dict) for setting in grid):
            raise UserError("grid.engine is no list of settings: write grid.engine=[{url: URL, name: full}, ...].")
        servers = []
        for setting in grid:
            section = {name: value for name, value in {**engine, **setting}.items() if value is not None}
            servers.append(build_target("engine", section, Server))
        servers += [_asked_again(server) for server in servers if server.control and server.name == "full"]
        _check_names(servers)
        model = {key: config.model[key] for key in (*NAMES, "revision")}  # `make_job` reads the revision of any model
        return build(ServedModel, "model", model), [*servers]

    @classmethod
    def read(cls, *settings: Any) -> Self:
        return cls()

    def impl(self, asked: Implementation) -> Literal["openai"]:
        return "openai"
