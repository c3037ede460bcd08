"""A template of one's own asks the problem and can do nothing else: it runs no code and fills no memory."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import jinja2
import pytest

from kvsweep.base.errors import UserError
from kvsweep.harness.benchmarks.prompts import MOST_CHARS, PROMPTS, read_prompt

OPTIONS = {"A": "one", "B": "two", "C": "three", "D": "four"}


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """End a test that hangs, by an error that no product code catches."""

    def end(number: int, frame: FrameType | None) -> None:
        raise AssertionError("the test hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def mistake(path: Path, template: str | None = None) -> str:
    """The one sentence that refuses a template."""
    if template is not None:
        path.write_text(template)
    with pytest.raises(UserError) as caught:
        read_prompt(str(path)).ask("What is 1+1?", {})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("benchmark.prompt=")
    assert message.endswith(".")
    return message


@pytest.mark.parametrize("name", sorted(path.stem for path in PROMPTS.glob("*.jinja")))
def test_the_sandbox_renders_as_jinja_does(name: str) -> None:
    options = {} if name in ("bare", "boxed") else OPTIONS
    text = (PROMPTS / f"{name}.jinja").read_text().rstrip("\n")
    for problem in ("What is 1+1?", "{{ x }} {% y %} <b>&amp;</b>\n\n  é"):
        plain = jinja2.Template(text, keep_trailing_newline=True).render(problem=problem, options=options)
        assert read_prompt(name).ask(problem, options) == plain


@pytest.mark.parametrize(
    "reach",
    [
        "cycler.__init__.__globals__.os.system('touch {file}')",
        "lipsum.__globals__['os'].system('touch {file}')",
        "self.__init__.__globals__.__builtins__.open('{file}', 'w')",
        "problem.__class__.__mro__[-1].__subclasses__()",
        "''['__class__']",
        "problem|attr('__class__')",
        "'{0.__class__}'.format(problem)",
    ],
)
def test_no_python_object_is_reached(reach: str, tmp_path: Path) -> None:
    file = tmp_path / "made"
    message = mistake(tmp_path / "p.jinja", "{{ problem }}{{ " + reach.replace("{file}", str(file)) + " }}")
    assert "SecurityError" in message
    assert not file.exists()


def test_no_value_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "p.jinja"
    path.write_text("{{ problem }}{{ options.pop('A') }}")
    options = dict(OPTIONS)
    with pytest.raises(UserError, match="SecurityError"):
        read_prompt(str(path)).ask("What is 1+1?", options)
    assert options == OPTIONS


@pytest.mark.parametrize(
    "too_much",
    [
        "{{ 'x' * 10000000000 }}",
        "{{ [problem] * 10000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ '%010000000000d' % 1 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ problem }}{% endfor %}{% endfor %}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ 'x'|center(" + str(MOST_CHARS + 1) + ") }}",
    ],
)
def test_a_template_that_writes_too_much(too_much: str, tmp_path: Path) -> None:
    assert "cannot ask this benchmark" in mistake(tmp_path / "p.jinja", "{{ problem }}" + too_much)


def test_numbers_are_still_calculated(tmp_path: Path) -> None:
    (tmp_path / "p.jinja").write_text("{{ problem }} {{ 6 * 7 }} {{ 7 % 4 }}")
    assert read_prompt(str(tmp_path / "p.jinja")).ask("Q?", {}) == "Q? 42 3"


@pytest.mark.parametrize(
    "text",
    ["{{ problem }", "{% for %}", "{% include 'x' %}{{", "{% for i in '1' %}" * 30 + "{% endfor %}" * 30],
    ids=lambda text: text[:20],
)
def test_a_file_that_is_no_template(text: str, tmp_path: Path) -> None:
    assert "is no template" in mistake(tmp_path / "p.jinja", text)


def test_another_file_is_not_included(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    assert "secret!" not in mistake(
        tmp_path / "p.jinja", "{{ problem }}{% include '" + f"{tmp_path}/secret.txt" + "' %}"
    )


def test_a_pipe_or_a_device_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jinja")
    (tmp_path / "zero.jinja").symlink_to("/dev/zero")
    for path in (tmp_path / "p.jinja", tmp_path / "zero.jinja", Path("/dev/zero"), tmp_path):
        assert "neither a name nor a readable file" in mistake(path)
