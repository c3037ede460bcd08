"""An address of the hub or of a proxy that is none is named, wherever the hub is asked first."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import constants

from kvsweep.harness.models import hub
from kvsweep.harness.models.hub import commit_of, is_reachable

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


@pytest.mark.parametrize("proxy", ["127.0.0.1:9", "http://me:secret@127.0.0.1:9/", "socks5://127.0.0.1:9"])
def test_a_proxy_that_does_not_answer_is_an_unreachable_hub(proxy, monkeypatch):
    monkeypatch.setenv("http_proxy", proxy)
    assert not is_reachable()


def test_what_answers_without_http_is_an_unreachable_hub(monkeypatch):
    monkeypatch.setattr(hub.urllib.request, "urlopen", _answer_without_http)
    assert not is_reachable()


def _answer_without_http(*_: Any, **__: Any):
    from http.client import BadStatusLine

    raise BadStatusLine("SSH-2.0-OpenSSH")
