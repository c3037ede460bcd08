"""Ask servers for the missing completions of one job's cells, and store each as it arrives."""

import asyncio
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urljoin

import msgspec
import openai

from kvsweep.analysis.server_records import BYTES, MISCOUNTED, ROUTED, cache_of, record_of
from kvsweep.compression.policy import Policy
from kvsweep.harness.provenance import describe_code
from kvsweep.harness.sweep.cell_store import CellStore, OpenCells
from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.server import Server
from kvsweep.messages.command_line import FAILED
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import visible
from kvsweep.run_files.row_types import MOST_TOKENS, Completion, Pair, Tokens, content_hash, decode, leaves
from kvsweep.run_files.safe_files import open_file
from kvsweep.run_files.thinking import ending, joined

# The client waits 0.5 s, 1 s, 2 s, ... and then 8 s, or as long as the server says: about a minute in all.
RETRIES = 11
CONNECT_S = 10.0
_BEAT_S = 1.0
_OF_ONE_QUESTION = (400, 413, 422)  # with these a server answers, but not this request
_MOST_REFUSED = 8  # answers that a server may refuse before it has given as many
# Among servers a request's limit has these names.
_LIMITS = {"max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "max_gen_tokens", "max_length"}
_LIMITS |= {"n_predict", "num_predict"}
_SHOWN = 200  # characters of what a server said
_OF_LENGTH = re.compile(r"context|exceed|too (?:long|large|many)|longer than", re.IGNORECASE)
_GOES_ON = "mend it, and the same command goes on"
_WAYS_OUT = {401: "name the variable of your key by engine.key_env", 404: "leave out engine.model, or check engine.url"}
# What is kept of a server's pages, which may have a key: vLLM's and SGLang's names of the cache, and the longest text.
_PAGES = ("metrics", "server_info", "v1/models")
# Matches `cache_dtype="fp8"`, `"max_model_len": 4096` and `n_ctx = 512`; the groups are the name and the value.
_ON_PAGES = re.compile(
    r"\b(cache_dtype|kv_cache_memory_bytes|kv_cache_size_tokens|kv_cache_dtype|max_total_num_tokens|kvcache|token_capacity"
    r'|max_model_len|n_ctx)"?\s*[:=]\s*"?([^",}\s]+)'
)
# llama.cpp's log has these lines from verbosity 4 on; it calls each text's rows cells, and has a stream for each text.
_OF_LOG = re.compile(
    r"llama_kv_cache: size = +(?P<kv_mib>[\d.]+) MiB \( *(?P<kv_cells>\d+) cells,.*/(?P<kv_streams>\d+) seqs\), "
    r"K \((?P<k_dtype>\w+)\).* V \((?P<v_dtype>\w+)\)"
    r"|llama_kv_cache: (?:n|attn)_rot_k = (?P<rotated_k>\d+)|llama_kv_cache: (?:n|attn)_rot_v = (?P<rotated_v>\d+)"
)
_LOG_START = 1 << 22  # bytes of a log in which these lines stand


class ServerError(UserError):
    """A server does not answer, or answers what is no completion."""

    exit_code = FAILED


class _RefusedError(ServerError):
    """A server gives no completion of this one question: too long for its context, or filtered."""


_Name = Annotated[str, msgspec.Meta(max_length=1000)] | None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # its name in newer versions of vLLM


class _Choice(msgspec.Struct):
    finish_reason: Any
    error: Any = None
    message: _Message | None = None
    text: str | None = None


class _Details(msgspec.Struct):
    reasoning_tokens: Tokens | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Tokens
    completion_tokens: Tokens
    total_tokens: Tokens | None = None
    completion_tokens_details: _Details | None = None

    @property
    def thinking(self) -> Tokens | None:
        return None if self.completion_tokens_details is None else self.completion_tokens_details.reasoning_tokens

    @property
    def generated(self) -> int:
        """All generated tokens. Some servers count thinking beside the completion, which then only the total shows."""
        thinking = self.thinking or 0
        # More thinking than completion cannot be a part of it, so it was counted beside it.
        if self.total_tokens is None and thinking > self.completion_tokens:
            return self.completion_tokens + thinking
        # The total beyond the prompt is the larger number where thinking is counted beside the completion.
        return max(self.completion_tokens, (self.total_tokens or 0) - self.prompt_tokens)


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]
    usage: _Usage
    model: _Name = None
    provider: _Name = None
    system_fingerprint: _Name = None
    error: Any = None


def fill(work: OpenCells) -> None:
    """Fill the open cells. If a server fails, the others continue; then the first error is raised."""
    asyncio.run(_ask_all(work))


async def _ask_all(work: OpenCells) -> None:
    """Ask for the missing completions of all cells at once."""
    incomplete = [store for store in work.stores.values() if not store.finished_pairs.issuperset(work.share.pairs)]
    # All before any server is asked: a log that says nothing ends the sweep here.
    caches = [_cache_in_log(store.cell.policy) for store in incomplete]
    beat = asyncio.create_task(_beat())
    fills = [_fill(work, store, cache) for store, cache in zip(incomplete, caches, strict=True)]
    results = await asyncio.gather(*fills, return_exceptions=True)
    beat.cancel()
    for failure in results:
        if failure is not None:
            raise failure


async def _beat() -> None:
    """Wake the loop regularly: a signal just before the loop starts waiting is handled only after the wait."""
    while True:
        await asyncio.sleep(_BEAT_S)


async def _fill(work: OpenCells, store: CellStore, cache_in_log: dict[str, str]) -> None:
    """Ask a cell's server for the missing completions, and store each that it gives."""
    job = work.share.job
    server = store.cell.policy
    cell_id = store.cell.cell_id
    assert isinstance(server, Server)
    origin = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": sys.argv, "code": describe_code()}
    timeout = openai.Timeout(None, connect=CONNECT_S)  # a long text takes hours on a slow server
    # Without these the client would send those of another place, from the environment; it refuses an empty key.
    account: Any = {"api_key": server.key or "none", "organization": "", "project": ""}
    async with openai.AsyncOpenAI(base_url=server.url, max_retries=RETRIES, timeout=timeout, **account) as client:
        cache = {**await _cache_on_pages(client, server.url), **cache_in_log}
        decoding_pass = {**origin, "url": server.url, "cache": cache}
        # What earlier passes say of the server, with which its answers now have to agree.
        record = record_of(store.begin_pass(job.provenance(store.cell), decoding_pass))
        asker = _Asker(job=job, server=server, client=client, cache=cache_of(cache), record=record)
        work.reporter.counters.append(lambda: asker.tokens)  # the status file shows the tokens so far

        async def store_answer(pair: Pair) -> None:
            """Ask for a pair's completion, and store it if the server gives one."""
            completion = await asker.ask(pair)
            if completion is not None:
                # The model, provider and system that the answers have named so far.
                store.note(**{name: asker.record[name] for name in ("model", *ROUTED) if name in asker.record})
                work.append(cell_id, completion)
                asker.tokens += completion.num_tokens
                asker.taken += 1

        try:
            if server.check:
                await asker.check(work.share.pairs[: server.check])
            async with asyncio.TaskGroup() as tasks:
                for pair in work.share.pairs:
                    if work.lacks(cell_id, pair):
                        tasks.create_task(store_answer(pair))  # waits for one of `parallel` turns
        except ExceptionGroup as errors:  # the first error has cancelled the other tasks
            raise errors.exceptions[0] from None
        if asker.refused:  # all other answers are stored
            raise asker.refusal


async def _cache_on_pages(client: openai.AsyncOpenAI, url: str) -> dict[str, str]:
    """What a server says of its cache and its limit, by its own names; empty for many."""
    impatient = client.with_options(max_retries=0, timeout=CONNECT_S)
    # The pages lie at the host's root, or beside the /v1 of an address that has a path before it. Often both are one:
    # http://host/v1 has http://host/ twice, http://host/a/v1 has http://host/ and http://host/a/.
    roots = dict.fromkeys([urljoin(url, "/"), url.removesuffix("/").removesuffix("/v1") + "/"])
    values: dict[str, str] = {}
    for root in roots:
        for page in _PAGES:
            with suppress(openai.APIError):  # few servers have all pages
                text = await impatient.get(root + page, cast_to=str)
                values |= _ON_PAGES.findall(text)  # pairs of a name and its value
    return values


def _cache_in_log(server: Policy) -> dict[str, str]:
    """What llama.cpp's server says of its cache in its log, several values of a name joined; empty without a log."""
    assert isinstance(server, Server)
    if server.log is None:
        return {}
    path = Path(server.log)
    if not path.is_file():  # a pipe would be waited for
        raise UserError(f"engine.log={server.log} is no file: name the server's log.")
    with open_file(path, linked=True) as file:
        text = file.read(_LOG_START).decode(errors="replace")
    values = defaultdict[str, dict[str, None]](dict)  # each name's different values, in the order of the log
    for match in _OF_LOG.finditer(text):
        for name, value in match.groupdict().items():
            if value:  # a line has the values of some of the names
                values[name][value] = None
    if not values:
        silent = f"engine.log={server.log} says nothing of a cache"
        raise UserError(f"{silent}: start llama-server with -lv 4, or give none.")
    return {name: ", ".join(distinct) for name, distinct in values.items()}


@dataclass(kw_only=True)
class _Asker:
    job: Job
    server: Server
    client: openai.AsyncOpenAI
    cache: dict[str, Any]  # what the server says of its cache now, as `cache_of` reads it
    record: dict[str, Any]  # what the cell's answers, also those of earlier passes, say
    taken: int = 0  # completions that are stored
    tokens: int = 0  # theirs
    refused: dict[Pair, ServerError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = asyncio.Semaphore(self.server.parallel)
        self.prompts = {problem.id: problem.prompt for problem in self.job.benchmark.problems}

    async def check(self, pairs: list[Pair]) -> None:
        """Ask each of the pairs twice, and print how many completions were equal."""
        first = await asyncio.gather(*map(self.ask, pairs))
        second = await asyncio.gather(*map(self.ask, pairs))
        same = 0
        for completion, again in zip(first, second, strict=True):
            # A refused request gives None, which has no text, so two refusals count as equal.
            same += getattr(completion, "text", None) == getattr(again, "text", None)
        print(f"{self.server.name}: {same} of {len(pairs)} requests sent twice gave the same text", flush=True)

    async def ask(self, pair: Pair) -> Completion | None:
        """Return a pair's completion; None if the server gives none, and the other questions are still asked.

        Raises ServerError where the server gives none to anybody, or none to most.
        """
        async with self.turns:
            start = time.monotonic()
            try:
                data = await self._post(pair)
                completion = self._completion(pair, data, time.monotonic() - start)
            except _RefusedError as error:
                self.refused[pair] = error
                # It refuses more than it answers, and not just the first few.
                if len(self.refused) > max(_MOST_REFUSED, self.taken):
                    raise self.refusal from None
                return None
            self.refused.pop(pair, None)  # `check` asks a pair again, which may then be answered
            return completion

    @property
    def refusal(self) -> ServerError:
        """The first refusal, with the number of answers that are missing."""
        first = next(iter(self.refused.values()))
        missing = len(self.refused)
        return ServerError(f"{first} Missing answers: {missing} of {missing + self.taken}.")

    async def _post(self, pair: Pair) -> bytes:
        """Send a pair's question, and return the answer's bytes; raises ServerError for any other answer, or none."""
        question = self.prompts[pair[0]]
        fields = self._fields(pair)
        request: dict[str, Any] = {"model": self.server.model, "extra_body": fields}
        api: Any = self.client.completions
        if self.server.api == "chat":
            api = self.client.chat.completions
            request["messages"] = [{"role": "user", "content": question}]
        else:
            request["prompt"] = question
        try:
            return (await api.with_raw_response.create(**request)).content
        except openai.APIStatusError as error:
            status = error.status_code
            answer = error.response.text
            what = f"answers {status}: {answer}"
            is_too_long = status == 500 and _OF_LENGTH.search(answer)  # as llama.cpp says it
            if status in _OF_ONE_QUESTION or is_too_long:
                raise self._error(what, _RefusedError, self._remedy(answer, fields)) from None
            raise self._error(what, hint=_WAYS_OUT.get(status, _GOES_ON)) from None
        except openai.APIConnectionError as error:
            # The client's error says no more than "Connection error."; its cause says why.
            raise self._error(f"does not answer: {error.__cause__ or error}") from None

    def _remedy(self, refusal: str, fields: Mapping[str, Any]) -> str:
        """Return the way out of a refused request: another length, or the request without the fields that are named."""
        if _OF_LENGTH.search(refusal):
            return "lower decoding.max_new_tokens, or start the server with a longer context"
        named = [name for name in fields if re.search(rf"\b{re.escape(name)}\b", refusal)]
        if not named or len(named) == len(fields):  # a server may repeat the whole request
            return _GOES_ON
        extra = {**self.server.extra, **dict.fromkeys(named)}  # null leaves a field out
        # Newer models of OpenAI's refuse the one name of the limit and ask for the other.
        if "max_tokens" in named and "max_completion_tokens" in refusal:
            extra["max_completion_tokens"] = self.job.decoding.max_new_tokens
        listed = ", ".join(f"{name}: {json.dumps(value)}" for name, value in extra.items())
        return f"give 'engine.extra={{{listed}}}'"

    def _fields(self, pair: Pair) -> dict[str, Any]:
        """Return the request's fields besides model and question."""
        sampling = self.job.decoding.sampling
        fields: dict[str, Any] = {"max_tokens": self.job.decoding.max_new_tokens, "temperature": sampling.temperature}
        if sampling.temperature:
            # Servers have their own defaults for missing fields. For a server -1 keeps all tokens, as 0 does here.
            fields |= {"top_p": sampling.top_p, "top_k": sampling.top_k or -1, "min_p": 0.0}
        if self.server.seed:
            # Another one for each pair. Seven hexadecimal digits stay below 2^31, which every server accepts.
            fields["seed"] = int(content_hash([self.job.seed, *pair])[:7], 16)
        # `extra` comes last: it may replace a field, or leave it out by null.
        return {name: value for name, value in {**fields, **self.server.extra}.items() if value is not None}

    def _completion(self, pair: Pair, data: bytes, seconds: float) -> Completion:
        """Return an answer's completion; raises ServerError for its first fault: of ending, text, counts, or server."""
        body = data.decode(errors="replace")
        if self.server.key and self.server.key in body:
            raise self._error("sends the key back in an answer, which is not stored", _RefusedError)
        try:
            answer = decode(data, _Answer)
            [choice] = answer.choices
            fault = answer.error or choice.error
            if fault:
                raise ValueError(f"it has the error {fault}")
            finish = ending(choice.finish_reason)
            if finish is None:
                raise ValueError(f"its finish_reason is {choice.finish_reason!r}, neither stop nor length")
            text = self._text(choice, finish)
            tokens = answer.usage.generated
            limit = self._limit
            if (text and not tokens) or tokens > limit + MISCOUNTED:  # only an empty text may have no token
                raise ValueError(f"it counts {tokens} tokens, where 1 to {limit} are possible")
        except (ValueError, RecursionError) as error:
            raise self._error(f"sends what is no completion ({error}): {body}", _RefusedError) from None
        self._check_record(answer)
        thinking = answer.usage.thinking
        return Completion(
            problem_id=pair[0],
            draw=pair[1],
            text=text,
            token_ids=[],
            evictions=[],
            fork_step=None,
            peak_length=None,
            num_tokens=tokens,
            prompt_tokens=answer.usage.prompt_tokens,
            # Thinking is a part of the tokens; a larger count is an error of the server.
            thinking_tokens=None if thinking is None or thinking > tokens else thinking,
            # Some servers report "stop" for a completion that they truncated at the limit.
            stop_reason="length" if finish == "length" or tokens >= limit else "stop",
            seed=self.job.seed,
            seconds=seconds,
        )

    @property
    def _limit(self) -> int:
        """The most tokens of a completion by the request; any number if it names no limit."""
        limit = MOST_TOKENS
        for place, value in leaves({"max_tokens": self.job.decoding.max_new_tokens, **self.server.extra}):
            # The last part is the field's name, also of a field within another; null sets no limit.
            if place.rpartition(".")[2] in _LIMITS and isinstance(value, int):
                limit = min(limit, value)
        return limit

    def _check_record(self, answer: _Answer) -> None:
        """Refuse an answer of another model or cache than the cell's other answers; else remember what it says."""
        for name, value in {"model": answer.model, **self.cache}.items():
            if name == BYTES:  # bytes a token are computed from sizes that servers round, and may differ a little
                continue
            recorded = self.record.setdefault(name, value)  # the first answer's value
            if recorded != value:
                what = f"says {name} {value}, and other answers of this cell say {recorded}"
                raise self._error(what, hint="take another run_name, or start the server that gave those")
        for name in ROUTED:
            value = getattr(answer, name)
            # Several are no contradiction: a router sends requests to several providers. A new list each time, because
            # `CellStore.note` holds the earlier one and compares.
            if value and value not in self.record.setdefault(name, []):
                self.record[name] = [*self.record[name], value]

    def _text(self, choice: _Choice, finish: Literal["stop", "length"]) -> str:
        """Return the completion with its thinking between the model's tags, which a server may have split off."""
        tags = self.job.model.tags
        message = choice.message or _Message(content=choice.text)  # without one it is an answer of api=completions
        content = message.content or ""
        thinking = message.reasoning_content
        if thinking is None:
            thinking = message.reasoning
        # An empty thinking may be one that was split off. But servers that split nothing also send an empty one.
        splits_nothing = tags.end is None or tags.end in content
        if thinking is None or (thinking == "" and splits_nothing):
            return content
        if tags.end is None:  # then nobody could tell the thinking from the answer
            raise self._error("splits thinking off", hint="name the tags of the model by model.think_end")
        return joined(thinking, content, tags, ended=finish == "stop")

    def _error(self, what: str, kind: type[ServerError] = ServerError, hint: str = _GOES_ON) -> ServerError:
        """Return an error of one sentence, without a key, whatever the server has said."""
        if self.server.key:
            what = what.replace(self.server.key, "***")
        shown = visible(" ".join(what.split()))[:_SHOWN]
        return kind(f"{self.server.url} ({self.server.name}) {shown}; {hint}.")
