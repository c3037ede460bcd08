"""An address of the hub or of a proxy that is none is named, wherever the hub is asked first."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import constants

from kvsweep.errors import UserError
from kvsweep.harness.models import hub
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.hub import commit_of, is_reachable
from kvsweep.harness.models.spec import read_architecture

COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def online(monkeypatch) -> Iterator[None]:
    """A process that was never told to stay offline, has no proxy, and has not asked yet."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    is_reachable.cache_clear()
    commit_of.cache_clear()
    yield
    is_reachable.cache_clear()


@pytest.mark.parametrize("endpoint", ["", "hf-mirror.com", "hf-mirror.com:443", "https://", "ftp://a", "http://a:8x"])
def test_an_address_of_the_hub(endpoint, monkeypatch, kvsweep):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    fault = f"HF_ENDPOINT={endpoint} is no address"
    with pytest.raises(UserError, match=fault):
        is_reachable()
    if endpoint == "":
        with pytest.raises(UserError, match=fault):
            commit_of("me/toy", None)
        with pytest.raises(UserError, match=fault):
            read_architecture(ModelConfig(name="mine", title="", path="me/toy", revision=COMMIT))
        ended = kvsweep("model=toy_qwen", "benchmark=hmmt_feb25", "policy=full")
        assert ended.code == 2
        assert fault in ended.err


@pytest.mark.parametrize("name", ["https_proxy", "HTTP_PROXY", "all_proxy"])
@pytest.mark.parametrize("proxy", ["proxy:3128x", "http://me:secret@proxy:3128x", "gopher://proxy", "http://", " "])
def test_a_proxy(name, proxy, monkeypatch):
    monkeypatch.setenv(name, proxy)
    with pytest.raises(UserError) as refused:
        is_reachable()
    assert f"{name}={proxy.rpartition('@')[2]} is no address" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("proxy", ["127.0.0.1:9", "http://me:secret@127.0.0.1:9/", "socks5://127.0.0.1:9"])
def test_a_proxy_that_does_not_answer_is_an_unreachable_hub(proxy, monkeypatch):
    monkeypatch.setenv("http_proxy", proxy)
    assert not is_reachable()


def test_what_answers_without_http_is_an_unreachable_hub(monkeypatch):
    monkeypatch.setattr(hub.urllib.request, "urlopen", _answer_without_http)
    assert not is_reachable()


def _answer_without_http(*_: Any, **__: Any) -> None:
    from http.client import BadStatusLine

    raise BadStatusLine("SSH-2.0-OpenSSH")
