"""`engine=openai` against a server that adds numbers, and misbehaves as it is told."""

import copy
import dataclasses
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.against_full import plan_of
from kvsweep.harness.settings import CONF
from kvsweep.harness.sweep import ask
from kvsweep.harness.sweep.server import Server
from kvsweep.run_files.row_types import Completion, Grade, read_rows

KEY = "sk-marker-4711"
# What a server of OpenAI's API sends, by its reference.
ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14},
}


class Adder(ThreadingHTTPServer):
    """Answers sums; `misbehave` gets each request's handler and number, and says if it has answered instead."""

    daemon_threads = True

    def __init__(self, misbehave: Callable[[Any, int], bool], port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.misbehave, self.asked, self.keys = misbehave, list[dict[str, Any]](), set[str | None]()
        self.pages = dict[str, str]()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Adder

    def do_GET(self):
        self.say(200 if self.path in self.server.pages else 404, self.server.pages.get(self.path, "{}"))

    def do_POST(self):
        self.body = body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.add(self.headers["Authorization"])
        if not self.server.misbehave(self, len(self.server.asked)):
            self.add()

    def add(self, **message: Any):
        self.reply(added(self.body, **message))

    def reply(self, answer: Any):
        self.say(200, json.dumps(answer))

    def say(self, status: int, text: str, **headers: str):
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: Any) -> None: ...


def added(body: dict[str, Any], **message: Any) -> dict[str, Any]:
    question = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    first, second = map(int, re.findall(r"(\d+)\+(\d+)", question)[-1])
    text = f"</think>\\boxed{{{first + second}}}"
    said = {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text, **message}}
    return {**copy.deepcopy(ANSWER), "choices": [{"index": 0, "finish_reason": "stop", **said}]}


@pytest.fixture
def adder():
    """`adder(misbehave)` starts a server."""
    started: list[Adder] = []

    def start(misbehave=lambda handler, number: False, port=0):
        started.append(Adder(misbehave, port))
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture
def words(write_problems, tmp_path, monkeypatch):
    """The words of a sweep of 6 sums, two draws of each, into tmp_path / "runs" / "sums"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ask, "RETRIES", 1)
    rows = [{"id": f"p{i}", "problem": f"What is {i}+7?", "answer": i + 7} for i in range(6)]
    places = [f"benchmark.path={write_problems(rows)}", f"results_dir={tmp_path / 'runs'}", "run_name=sums"]
    return ["engine=openai", "engine.model=org/Adder", "benchmark=aime24", "draws=2", "engine.parallel=3", *places]


@pytest.fixture
def sweep(words, kvsweep):
    """`sweep(server, "key=value", ...)` is how the sweep of `words` ended, and asserts its status."""

    def run(*given, code=0):
        ended = kvsweep(*words, *(f"engine.url={one.url}" if isinstance(one, Adder) else one for one in given))
        assert ended.code == code, ended.err
        return ended

    return run


def rows(tmp_path: Path, kind: type[Any] = Completion, name: str = "completions.jsonl") -> list[Any]:
    return [row for path in sorted((tmp_path / "runs/sums").glob(f"*/{name}")) for row in read_rows(path, kind)]


def test_rows_grades_and_requests(adder, sweep, tmp_path):
    server = adder()
    ended = sweep(server, "engine.check=4", "engine.extra={min_p: null, foo: [1]}")
    assert "full: 4 of 4 requests sent twice gave the same text" in ended.out
    assert len(server.asked) == 12 + 8
    assert len({body["seed"] for body in server.asked}) == 12
    [body] = [one for one in server.asked[8:] if "5+7" in one["messages"][0]["content"]][:1]
    assert set(body) == {"model", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "foo"}
    assert (body["model"], body["temperature"], body["top_p"], body["foo"]) == ("org/Adder", 0.6, 0.95, [1])
    assert [message["role"] for message in body["messages"]] == ["user"]
    found = rows(tmp_path)
    assert {row.key for row in found} == {(f"p{i}", draw) for i in range(6) for draw in range(2)}
    assert {(row.num_tokens, row.prompt_tokens, row.stop_reason) for row in found} == {(5, 9, "stop")}
    assert all(row.seconds > 0 and row.peak_length is None and row.thinking_tokens is None for row in found)
    assert {row.outcome for row in rows(tmp_path, Grade, "grades.jsonl")} == {"correct"}
    [cell] = (yaml.safe_load(path.read_text()) for path in (tmp_path / "runs/sums").glob("*/cell.yaml"))
    assert (cell["impl"], cell["policy"]["kind"], cell["model"]["name"]) == ("openai", "declared", "Adder")
    assert not list((tmp_path / "runs/sums").glob("*/stats.jsonl"))
    # Another server of the same setting has nothing to do.
    other = adder()
    again = sweep(other, "engine.extra={min_p: null, foo: [1]}")
    assert "nothing to do" in again.out
    assert not other.asked


@pytest.mark.slow
def test_the_bare_prompt(adder, sweep, tmp_path):
    server = adder()
    options = ["engine.api=completions", "engine.seed=false", "decoding=greedy"]
    sweep(server, *options)
    assert {*server.asked[0]} == {"model", "prompt", "max_tokens", "temperature"}
    assert len(rows(tmp_path)) == 12


def test_thinking_that_the_server_splits_off(adder, sweep, tmp_path):
    def split(handler, number):
        answer = added(handler.body, content="\\boxed{1}", reasoning_content="Hm.")
        if number < 3:
            answer["choices"][0]["finish_reason"] = "length" if number == 1 else "stop"
            answer["choices"][0]["message"]["content"] = None
        if number == 3:  # cut at the limit, which this server does not say
            answer["usage"]["completion_tokens"] = handler.body["max_tokens"]
        answer["usage"]["completion_tokens_details"] = {"reasoning_tokens": 3}
        handler.reply(answer)
        return True

    server = adder(split)
    sweep(server, "engine.parallel=1")
    first, silent, limited, *rest = rows(tmp_path)
    assert (first.text, first.stop_reason) == ("<think>Hm.", "length")
    assert (silent.text, silent.stop_reason) == ("<think>Hm.</think>", "stop")
    assert (limited.text, limited.stop_reason) == (rest[0].text, "length")
    assert {(row.text, row.thinking_tokens) for row in rest} == {("<think>Hm.</think>\\boxed{1}", 3)}
    untagged = sweep(server, "model.think_end=null", "engine.name=other", code=1)
    assert "model.think_end" in untagged.err


NULL = {"message": {"role": "assistant", "content": None, "reasoning": None}}
# What an answer changes of OpenAI's: its choice, and the counts of the completion, of all and of the thinking; then the
# row's text, tokens, thinking and ending. None: the question has no answer. Each form is of a server or router of 2026,
# in the tokens of a limit of 400.
Counts = tuple[int, int | None, int | None]
FORMS: list[tuple[dict[str, Any], Counts, tuple[str, int, int | None, str] | None]] = [
    (NULL, (40, None, None), ("", 40, None, "stop")),
    ({**NULL, "finish_reason": "content_filter"}, (5, None, None), None),
    ({**NULL, "finish_reason": "tool_calls"}, (5, None, None), None),
    ({}, (15, 341, 317), ("7", 332, 317, "stop")),
    ({}, (15, 341, None), ("7", 332, None, "stop")),
    ({}, (15, None, 317), ("7", 332, 317, "stop")),
    ({}, (40, 49, 30), ("7", 40, 30, "stop")),
    ({}, (7, 16, 900), ("7", 7, None, "stop")),
    ({}, (401, 410, None), ("7", 401, None, "length")),
    ({"finish_reason": "length"}, (399, None, None), ("7", 399, None, "length")),
    ({}, (0, 9, None), None),
    ({"error": {"code": 502}}, (5, None, None), None),
]


def test_the_ending_decides_then_the_text_then_the_counts(adder, sweep, tmp_path):
    def form(handler, number):
        choice, (tokens, total, thinking), _ = FORMS[number - 1]
        answer = added(handler.body, content="7")
        answer["choices"][0] |= choice
        answer["usage"] |= {"completion_tokens": tokens, "total_tokens": total}
        answer["usage"]["completion_tokens_details"] = {"reasoning_tokens": thinking}
        handler.reply(answer)
        return True

    ended = sweep(adder(form), "engine.parallel=1", "decoding.max_new_tokens=400", code=1)
    assert "Missing answers: 4 of 12." in ended.err
    found = [(row.text, row.num_tokens, row.thinking_tokens, row.stop_reason) for row in rows(tmp_path)]
    assert found == [row for *_, row in FORMS if row is not None]


@pytest.mark.slow
def test_a_busy_server_is_waited_for(adder, sweep, tmp_path):
    def busy(handler, number):
        if number % 2:
            handler.say(429 if number % 4 == 1 else 503, "{}", Retry_After="0.01")
        return bool(number % 2)

    sweep(adder(busy), "engine.parallel=1")
    assert len(rows(tmp_path)) == 12


@pytest.mark.parametrize(
    ("content", "stored"),
    [("\\boxed{7}", "</think>\\boxed{7}"), pytest.param("</think>\\boxed{7}", None, marks=pytest.mark.slow)],
)
def test_thinking_that_is_empty_was_split_off_unless_the_text_closes_it(content, stored, adder, sweep, tmp_path):
    def split(handler, number):
        handler.add(content=content, reasoning_content="")
        return True

    sweep(adder(split))
    assert {row.text.removeprefix("<think>") for row in rows(tmp_path)} == {stored or content}


@pytest.mark.slow
def test_a_server_that_ignores_the_seed_has_one_draw(adder, sweep, tmp_path):
    sweep(adder())
    run = load_run(tmp_path / "runs/sums")
    assert sum("the same text in all draws" in notice for notice in run.notices) == 1
    [record] = run.provenance.values()
    assert plan_of(record).population == "like_these"
    # Asked for greedy texts, a server has nothing else to give.
    sweep(adder(), "decoding.temperature=0", "run_name=greedy")
    assert not load_run(tmp_path / "runs/greedy").notices
    assert plan_of(next(iter(load_run(tmp_path / "runs/greedy").provenance.values()))).population == "like_these"


def saying(status: int, text: str) -> Callable[[Handler, int], None]:
    return lambda handler, number: handler.say(status, text)


def half(handler: Handler, number: int):
    handler.say(200, json.dumps(added(handler.body))[:40])


def cut(handler: Handler, number: int):
    handler.send_response(200)
    handler.send_header("Content-Length", "4000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')


def with_fields(**fields: Any) -> Callable[[Handler, int], None]:
    return lambda handler, number: handler.reply({**added(handler.body), **fields})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (with_fields(error={"code": 502}), "it has the error {'code': 502}"),
        (with_fields(model="other"), "says model other, and other answers of this cell say None"),
        (with_fields(model="x" * 2000), "length <= 1000"),
        (with_fields(usage={"prompt_tokens": 9, "completion_tokens": 10**6}), "it counts 1000000 tokens"),
        (half, '{"id": "1", "object": "chat.completion",'),
        (saying(200, '{"extra": ' + "[" * 100_000), "maximum recursion"),
        (cut, "does not answer"),
        (saying(200, '{"choices": [{"finish_reason": "stop"}]}'), "usage"),
        (saying(404, '{"error": "no model org/Adder"}'), 'no model org/Adder"}; leave out engine.model'),
    ],
)
@pytest.mark.slow_unless(rule=lambda answer, said: said == "usage")
def test_what_is_no_completion_is_one_sentence(answer, said, adder, sweep, tmp_path):
    def misbehave(handler, number):
        if number > 4:
            answer(handler, number)
        return number > 4

    server = adder(misbehave)
    sentence = sweep(server, "engine.parallel=1", code=1).err.splitlines()[-1]
    assert sentence.startswith(f"kvsweep: error: {server.url} (full) ")
    assert said in sentence
    assert len(rows(tmp_path)) == 4
    good = adder()
    sweep(good)
    assert len(good.asked) == 8
    assert not {body["seed"] for body in good.asked} & {body["seed"] for body in server.asked[:4]}


def test_half_a_character_is_stored_as_it_came(adder, sweep, kvsweep, tmp_path):
    """One half of a surrogate pair, which JSON may write and UTF-8 cannot."""

    def say(handler, number):
        if number == 3:
            handler.add(content="\ud83d</think>1")
        return number == 3

    sweep(adder(say))
    assert sum("\ud83d" in row.text for row in rows(tmp_path)) == 1
    assert len(rows(tmp_path)) == 12
    for command in ("report", "export", "grade"):
        assert kvsweep(command, str(tmp_path / "runs/sums")).code == 0


def test_a_question_that_is_refused_stops_no_other_one(adder, sweep, tmp_path):
    def misbehave(handler, number):
        refused = "What is 1+7?" in str(handler.body)
        if refused:
            handler.say(400, "too long")
        return refused

    ended = sweep(adder(misbehave), "engine.parallel=1", code=1)
    assert "Missing answers: 2 of 12." in ended.err.splitlines()[-1]
    assert len(rows(tmp_path)) == 10
    good = adder()
    sweep(good)
    assert len(good.asked) == 2


def without(*names: str, refusal: str) -> Callable[[Any, int], bool]:
    """A server that refuses each request with one of these fields."""

    def misbehave(handler, number):
        has = not handler.body.keys().isdisjoint(names)
        if has:
            handler.say(422, refusal)
        return has

    return misbehave


def test_a_setting_that_was_refused_is_no_baseline(adder, sweep, kvsweep, tmp_path):
    """The remedy that the refusal names makes cells of their own; the empty ones stand for nothing, and are named."""
    # As `transformers serve` 5.17 says it.
    refusal = "{\"detail\":\"Unexpected fields in the request: {'min_p', 'top_k'}\"}"
    server = adder(without("min_p", "top_k", refusal=refusal))
    run = tmp_path / "runs/sums"
    named = ("full", "fp8")
    grid = "grid.engine=[" + ", ".join(f"{{url: '{server.url}', name: {name}}}" for name in named) + "]"
    refused = sweep(grid, code=1).err.splitlines()[-1]
    [remedy] = re.findall(r"'(engine\.extra=\{.*\})'", refused)
    assert remedy == "engine.extra={top_k: null, min_p: null}"
    empty = {path.parent for path in run.glob("*/cell.yaml")}
    [task] = (run / "status").glob("*.json")
    ended = sweep(grid, remedy)
    said = [line for line in ended.out.splitlines() if "of a failed sweep" in line]
    assert len(said) == 1
    assert "of a failed sweep" in kvsweep("status", str(run)).out
    assert said[0] in kvsweep("report", str(run)).out
    table = pd.read_csv(run / "report/cells.csv").set_index("policy")
    assert table["completions"].to_dict() == {"full": 12, "fp8": 12}
    assert table.loc["fp8", ["diff_to_full", "decision"]].notna().all()
    assert kvsweep("compare", str(run), str(run)).out.count("2 cells")
    removed = re.findall(r"`rm -r (.*?)`", said[0])[0].split()
    assert {Path(path) for path in removed} == {*empty, task}


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ("This model's maximum context length is 4096 tokens", "lower decoding.max_new_tokens"),
        # As OpenAI says it of its thinking models.
        (
            "Unsupported parameter: 'max_tokens' is not supported with this model. "
            "Use 'max_completion_tokens' instead.",
            "engine.extra={a: 1, max_tokens: null, max_completion_tokens: 30}",
        ),
        ("['max_tokens', 'temperature', 'top_p', 'top_k', 'min_p', 'seed', 'a']", "mend it"),
    ],
)
@pytest.mark.slow_unless(rule=lambda refusal, said: "null" in said)
def test_a_refusal_names_its_remedy(refusal, said, adder, sweep):
    server = adder(lambda handler, number: handler.say(400, refusal) is None)
    ended = sweep(server, "benchmark.limit=1", "engine.extra={a: 1}", "decoding.max_new_tokens=30", code=1)
    assert said in ended.err.splitlines()[-1]


@pytest.mark.parametrize("extra", ["{max_tokens:null,max_completion_tokens:5}", "{options:{num_predict:5}}"])
@pytest.mark.slow_unless(rule=lambda extra: "options" in extra)
def test_the_limit_is_what_the_request_holds(extra, adder, sweep, tmp_path):
    sweep(adder(), "benchmark.limit=1", f"engine.extra={extra}")
    assert [row.stop_reason for row in rows(tmp_path)] == ["length"] * 2  # of 5 tokens each


@pytest.mark.slow
def test_a_dead_server_stops_no_other_one(adder, sweep, tmp_path):
    alive = adder()
    with socket.socket() as dead:  # it has a port and does not listen
        dead.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dead.bind(("127.0.0.1", 0))
        port = dead.getsockname()[1]
        url = f"http://127.0.0.1:{port}/v1"
        servers = f"grid.engine=[{{url: '{alive.url}', name: full}}, {{url: '{url}', name: q4, kept_bytes: 0.28}}]"
        ended = sweep(servers, code=1)
        revived = adder(port=port)  # beside it, so that no other process gets the port
    assert ended.err.splitlines()[-1].startswith(f"kvsweep: error: {url} (q4) does not answer")
    assert len(rows(tmp_path)) == 12
    sweep(servers)
    assert (len(alive.asked), len(revived.asked)) == (12, 12)


# A shell's background job ignores Ctrl-C from its start.
HEARD = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
# As a thread of its own gets it, a signal ends no wait of the main thread, nor does one just before that wait begins.
IN_A_THREAD = f"""
{HEARD}
import pathlib, threading, time

def interrupt():
    while not pathlib.Path("interrupt").exists():
        time.sleep(0.05)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
"""


@pytest.mark.core
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, None])
@pytest.mark.slow_unless(rule=lambda number: number == signal.SIGINT)
def test_a_killed_client_goes_on(
    number,
    adder,
    words,
    kvsweep,
    start_kvsweep,
    tmp_path,
):
    def slow(handler, number):
        time.sleep(0 if number <= 6 else 600)
        return number > 6

    server = adder(slow)
    process = start_kvsweep(*words, f"engine.url={server.url}", setup=HEARD if number else IN_A_THREAD)
    deadline = time.monotonic() + 240
    while len(rows(tmp_path)) < 6:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if number:
        process.send_signal(number)
    else:
        (tmp_path / "interrupt").touch()
    process.wait(timeout=120)
    stored = len(rows(tmp_path))
    assert stored == 6
    good = adder()
    assert kvsweep(*words, f"engine.url={good.url}").code == 0
    assert len(good.asked) == 12 - stored
    assert len(rows(tmp_path)) == 12


@pytest.mark.slow
def test_the_key_appears_nowhere(adder, sweep, tmp_path, monkeypatch):
    """Servers repeat a wrong key, and a text may hold it."""
    monkeypatch.setenv("ADDER_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    texts = []

    def leak(handler, number):
        if number == 3:
            handler.say(401, json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}"}}))
        if number == 4:
            handler.add(content=f"my key is {KEY}")
        return number in (3, 4)

    server = adder(leak)
    for code in (1, 1, 0):
        ended = sweep(server, "engine.key_env=ADDER_KEY", "engine.parallel=1", code=code)
        texts.append(ended.out + ended.err)
    assert ["answers 401" in text or "key back" in text for text in texts] == [True, True, False]
    assert server.keys == {f"Bearer {KEY}"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert not [text for text in texts if KEY in text]
    # Without key_env no key of another place is sent.
    other = adder()
    sweep(other, "engine.name=other")
    assert other.keys == {"Bearer none"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("engine.key_env=sk-marker-4711", "engine.key_env names no environment variable that is set"),
        ("engine.url=http://me:sk-marker-4711@host/v1", "engine.url is no plain address"),
        ("engine.url=http://localhost:PORT/v1", "engine.url is no plain address"),
        ("engine.name=1b", "engine.name"),
        ("policy=h2o", "policy=h2o has no effect, because with engine=openai the server decides that"),
        *(
            (word, f"{word} has no effect")
            for word in ("grid.policy=[full]", "cache.bits=4", "slots=4", "impl=triton", "replay=true")
        ),
        ("decoding.stop_on_loop=true", "are nothing that a server can be asked for"),
        ("decoding.order=top_p_then_top_k decoding.top_k=5", "are nothing that a server can be asked for"),
        ("grid.engine=[{name:a},{name:b}]", "no setting with name: full"),
        ("grid.engine=[{name:full},{name:full}]", "2 settings of the name full"),
        ("grid.engine=[{nome:full}]", "engine.nome is not a setting"),
        ("engine=kvsweep model.name=x grid.engine=[{name:full}]", "engine"),
        ("engine.control=2", "engine.control=2"),
        ("grid.engine=[{name:full},{name:control,extra:{a:1}}]", "control and full differ in extra"),
        ("engine.control=true grid.engine=[{name:full},{name:control}]", "2 settings of the name control"),
        *((f"engine.extra={{{name}:1}}", name) for name in ("temperature", "max_tokens", "seed", "model", "messages")),
    ],
)
def test_what_a_server_cannot_do_is_refused(given, said, sweep, tmp_path):
    ended = sweep("engine.url=http://127.0.0.1:1/v1", *given.split(), code=2)
    assert said in ended.err
    assert KEY not in ended.err
    assert not list(tmp_path.glob("runs/sums/*/cell.yaml"))


def test_the_file_of_the_group_describes_every_field():
    section = yaml.safe_load((CONF / "engine/openai.yaml").read_text())
    assert section.keys() - {"_target_"} == {field.name for field in dataclasses.fields(Server)}


@pytest.mark.parametrize(("listed", "code"), [(["org/Adder"], 0), pytest.param(["a", "b"], 2, marks=pytest.mark.slow)])
def test_a_model_that_is_left_out_is_the_only_one_that_the_server_lists(listed, code, words, adder, kvsweep, tmp_path):
    server = adder()
    # As vLLM lists its models.
    data = [{"id": name, "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 4096} for name in listed]
    server.pages["/v1/models"] = json.dumps({"object": "list", "data": data})
    setting = f"grid.engine=[{{name: full, url: '{server.url}'}}]"
    ended = kvsweep(*(word for word in words if not word.startswith("engine.model")), setting)
    assert ended.code == code, ended.err
    if code:
        assert "a, b" in ended.err
        return
    [cell] = (yaml.safe_load(path.read_text()) for path in (tmp_path / "runs/sums").glob("*/cell.yaml"))
    assert (cell["policy"]["model"], cell["model"]["name"]) == ("org/Adder", "Adder")
    assert {body["model"] for body in server.asked} == {"org/Adder"}


def test_the_address_must_be_given(sweep):
    assert "engine.url is missing" in sweep(code=2).err


def vllm(dtype: str, size: str = "None") -> dict[str, str]:
    """Labels of vLLM's cache, with other lines."""
    labels = f'block_size="16",cache_dtype="{dtype}",kv_cache_memory_bytes="{size}",kv_cache_size_tokens="1000"'
    return {"/metrics": f"vllm:num_requests_running 0\nvllm:cache_config_info{{{labels}}} 1.0\n"}


def sglang(dtype: str, gib: float = 0.5) -> dict[str, str]:
    """Fields of SGLang's answer: its settings, and the state that each scheduler adds (managers/scheduler.py)."""
    memory = {"weight": 1.1, "kvcache": gib, "token_capacity": 4096, "graph": 0.4}
    state = [{"api_key": "secret", "memory_usage": memory}]
    return {"/server_info": json.dumps({"api_key": "secret", "kv_cache_dtype": dtype, "internal_states": state})}


CACHES = {
    "two of vLLM that are equal": (
        vllm("auto", "8000000"),
        vllm("auto", "8000000"),
        "cache_dtype auto, bytes a token 8,000",
    ),
    "two of vLLM of other bytes": (vllm("auto", "8000"), vllm("auto", "4000"), None),
    "two of vLLM of other types": (vllm("auto"), vllm("fp8"), None),
    "two of SGLang that are equal": (sglang("auto"), sglang("auto"), "kv_cache_dtype auto, bytes a token 131,072"),
    "two of SGLang of other bytes": (sglang("auto"), sglang("auto", 0.25), None),
    "two that say nothing": ({}, {}, None),
    "fp8 that was not on": (vllm("auto", "8000000"), vllm("fp8", "8000000"), "cache_dtype fp8, bytes a token 8,000"),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.slow_unless(rule=lambda name: name == "two of vLLM that are equal")
def test_a_setting_whose_cache_is_the_baseline_s_is_named(name, adder, sweep, tmp_path):
    servers = [adder(), adder()]
    for server, pages in zip(servers, CACHES[name], strict=False):
        server.pages = pages
    grid = ",".join(f'{{url: "{one.url}", name: {n}}}' for one, n in zip(servers, ("full", "q4"), strict=True))
    ended = sweep("draws=1", f"grid.engine=[{grid}]")
    files = [path.read_text() for path in (tmp_path / "runs/sums").glob("*/provenance*.json")]
    assert len(files) == 2
    assert "secret" not in "".join(files)
    said = [line for line in ended.out.splitlines() if "compression is not seen" in line]
    assert len(said) == (CACHES[name][2] is not None)
    assert all(f"({CACHES[name][2]})" in line for line in said)


@pytest.mark.parametrize(
    ("model", "dtype", "said"),
    [("other-0.5B", "auto", "model other-0.5B"), ("org/Adder", "fp8", "cache_dtype fp8")],
)
@pytest.mark.slow_unless(rule=lambda model, dtype, said: dtype == "fp8")
def test_a_server_with_another_model_or_cache_after_a_resume_is_refused(model, dtype, said, adder, sweep, tmp_path):
    def dies(handler, number):
        (half if number > 4 else with_fields(model="org/Adder"))(handler, number)
        return True

    def go_on(model, dtype, *words, **ends):
        server = adder(always(with_fields(model=model)))
        server.pages = vllm(dtype)
        return sweep(server, "engine.parallel=1", *words, **ends)

    first = adder(dies)
    first.pages = vllm("auto")
    sweep(first, "engine.parallel=1", code=1)
    refused = go_on(model, dtype, code=1)
    assert len(rows(tmp_path)) == 4
    assert f"says {said}, and other answers of this cell say" in refused.err
    go_on("org/Adder", "auto")
    assert len(rows(tmp_path)) == 12
    [file] = (tmp_path / "runs/sums").glob("*/provenance.json")
    passes = json.loads(file.read_text())["decoding_passes"]
    assert [one.get("model", "unsaid") for one in passes] == ["org/Adder", "unsaid", "org/Adder"]
    # A pass of an older version says nothing of its model.
    file.write_text(json.dumps({"schema": 1, "decoding_passes": [{}]}))
    go_on("new", "fp8", "draws=3")


@pytest.mark.slow
def test_the_providers_of_a_router_are_named(adder, sweep, tmp_path):
    makers = ("DeepInfra", "Together")
    routed = adder(lambda handler, number: always(with_fields(provider=makers[number % 2]))(handler, number))
    ended = sweep(routed, "engine.parallel=1")
    assert "its answers name provider Together and DeepInfra" in ended.out


def always(answer: Callable[[Handler, int], None]) -> Callable[[Handler, int], bool]:
    return lambda handler, number: answer(handler, number) is None


# Two settings: what each asks for and what its answers name; then whom the warnings name, and their words.
MODELS: dict[str, tuple[list[tuple[str, str | None]], list[str]]] = {
    "another": (
        [("Qwen3-8B", "Qwen3-8B"), ("Qwen3-8B", "other")],
        ["q4, declared: its answers are of the model other, and of Qwen3-8B with the full setting"],
    ),
    "one alias": ([("Qwen3-8B", "/models/q.gguf"), ("Qwen3-8B", "/models/q.gguf")], []),
    "one says nothing": ([("Qwen3-8B", "Qwen3-8B"), ("Qwen3-8B", None)], []),
    "as asked": ([("Qwen3-8B", "Qwen/Qwen3-8B"), ("Qwen3-8B-AWQ", "Qwen3-8B-AWQ")], []),
    "not as asked": (
        [("Qwen3-8B", "Qwen3-8B"), ("Qwen3-8B-AWQ", "other")],
        ["q4, declared: asked for engine.model=Qwen3-8B-AWQ, its answers are of the model other"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow_unless(rule=lambda name: name == "another")
def test_settings_of_other_models_are_named(name, adder, sweep, tmp_path):
    asked, expected = MODELS[name]
    settings = [
        f"{{name: {n}, url: '{adder(always(with_fields(model=told))).url}', model: {model}}}"
        for n, (model, told) in zip(("full", "q4"), asked, strict=True)
    ]
    ended = sweep("draws=1", f"grid.engine=[{', '.join(settings)}]")
    said = [line for line in ended.out.splitlines() if "answers are of the model" in line]
    assert [words in line for words, line in zip(expected, said, strict=True)] == [True] * len(expected)
    assert all("so that a difference may be the model's. Start " in line for line in said)


@pytest.mark.slow
def test_a_control_asks_the_baseline_again(adder, sweep, write_problems, kvsweep, tmp_path):
    """A server that answers one question otherwise when it is asked again, and one that answers all of them so."""

    first = dict[int, Handler]()  # by the seed of the question; two threads may ask it at once

    def wrong(handler, always):
        changed = always or (
            "is 2+7" in str(handler.body) and first.setdefault(handler.body["seed"], handler) is not handler
        )
        if changed:
            handler.add(content="</think>\\boxed{1}")
        return changed

    problems = write_problems([{"id": f"p{i}", "problem": f"What is {i}+7?", "answer": i + 7} for i in range(12)])
    full, q4 = (adder(lambda handler, number, always=always: wrong(handler, always)) for always in (False, True))
    named = (f"{{url: '{one.url}', name: {name}}}" for one, name in ((full, "full"), (q4, "q4"), (adder(), "q8")))
    given = [f"benchmark.path={problems}", "draws=1", "decoding=greedy", f"grid.engine=[{', '.join(named)}]"]
    ended = sweep(*given, "engine.control=true")
    assert len(full.asked) == 24
    assert not any(row.outcome == "grader_timeout" for row in rows(tmp_path, Grade, "grades.jsonl"))
    [said] = [line for line in ended.out.splitlines() if line.startswith("note: ") and "control" in line]
    assert "control, asked again, declared: 1 of 12 texts differ, answers that flip: 1; unclear. " in said
    assert said.endswith("surely flip more answers: q4, declared. Other settings: q8, declared.")
    run = tmp_path / "runs/sums"
    assert kvsweep("report", str(run)).code == 0
    table = pd.read_csv(run / "report/cells.csv").set_index("policy")
    differ = table["texts_differ"]
    assert (differ["control"], differ["q4"] - differ["q8"]) in ((1, 12), (1, 10))  # which of the two was asked first
    assert table["beyond_control"].dropna().to_dict() == {"q4": True, "q8": False}
    assert table["family"].drop("full").to_dict() == {"control": 1, "q4": 2, "q8": 2}
    assert not table.loc["control", "recommendable"]


# The lines of the cache in the log of llama.cpp's server (xllamacpp 2026.10.11549) with SmolLM2-135M.
LOG = "".join(
    f"0.55.903.634 I llama_kv_cache: {line}\n"
    for line in (
        "       CPU KV buffer size =    50.62 MiB",
        "size =   50.62 MiB (  2048 cells,  30 layers,  4/4 seqs), K (q4_0):   25.31 MiB, V (q4_0):   25.31 MiB",
        "n_rot_k = 64, n_embd_head_k_all = 64",
        "n_rot_v = 64, n_embd_head_k_all = 64",
    )
)


@pytest.mark.slow
def test_the_log_of_llama_cpp_says_bytes_and_types(adder, sweep, tmp_path):
    texts = {"full": LOG, "same": LOG, "unrotated": LOG.replace("= 64,", "= 0,"), "q8": LOG.replace("q4_0", "q8_0")}
    for name, text in texts.items():
        (tmp_path / f"{name}.log").write_text(text)
    url = adder().url
    grid = ",".join(f'{{url: "{url}", name: {name}, log: {tmp_path}/{name}.log}}' for name in texts)
    ended = sweep("draws=1", f"grid.engine=[{grid}]")
    said = [line for line in ended.out.splitlines() if "compression is not seen" in line]
    # The bytes count, and not the name: this q8_0 holds as many as the full setting.
    assert [re.search(r": (\w+), declared: .*(k_dtype \w+)", line).groups() for line in said] == [
        ("q8", "k_dtype q8_0"),
        ("same", "k_dtype q4_0"),
    ]
    # 30 layers of 3 heads of 64 numbers, keys and values, in blocks of 32 numbers and a scale: 18 bytes.
    sizes = load_run(tmp_path / "runs/sums").cells["measured_bytes"]
    assert sizes.to_list() == pytest.approx([30 * 3 * 64 * 2 * 18 / 32] * 4, rel=2e-4)


@pytest.mark.parametrize(
    ("text", "said"), [(None, "is no file"), ("ready", "says nothing of a cache"), ("|", "is no file")]
)
def test_a_log_without_a_cache_is_refused(text, said, adder, sweep, tmp_path):
    if text == "|":
        os.mkfifo(tmp_path / "log")
    elif text:
        (tmp_path / "log").write_text(text)
    server = adder()
    assert said in sweep(server, "engine.log=log", code=2).err
    assert not server.asked


@pytest.mark.slow
def test_the_page_says_what_is_declared(adder, sweep, kvsweep, tmp_path):
    def wrong(handler, number):
        if number <= 9:
            answer = added(handler.body, content="</think>\\boxed{1}")
            answer["choices"][0]["finish_reason"] = "length" if number == 1 else "stop"
            handler.reply(answer)
        return number <= 9

    full = f"{{url: '{adder().url}', name: full}}"
    other = f"{{url: '{adder(wrong).url}', name: q4, title: 'q4, engine', kept_bytes: 0.28}}"
    sweep(f"grid.engine=[{full}, {other}]")
    run = tmp_path / "runs/sums"
    for command in ("status", "report", "grade", "export"):
        ended = kvsweep(command, str(run))
        assert ended.code == 0, ended.err
    table = pd.read_csv(run / "report/cells.csv").set_index("policy")
    assert table.loc["q4", "declared_bytes"] == 0.28
    assert table.loc["q4", "variant"] == "q4, engine, declared"
    assert table.loc["q4", "regressions"] == 9
    assert set(table["engine"]) == {"server"}
    unknown = "bits mean_evictions evicted kept_memory kept_rows mean_cache_length peak_rows_together kv_bytes_mean"
    unknown += " tokens_per_second looping_texts diff_untouched untouched_differ"
    assert table[unknown.split()].isna().all(axis=None)
    page = (run / "report/report.html").read_text()
    assert "q4, q4, engine, declared" in page
    assert "Some engines draw alike for the same request" in page
    assert "same random numbers" not in page
    assert kvsweep("compare", str(run), str(run)).code == 0
    replayed = kvsweep("replay", str(run))
    assert (replayed.code, "is of a server's texts" in replayed.err) == (2, True)
