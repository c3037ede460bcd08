"""Ask servers for the missing completions of one job's cells, and store each as it arrives."""

import asyncio
import json
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import openai

from kvsweep.analysis.server_caches import models_told
from kvsweep.command_line import FAILED
from kvsweep.compression.policy import Policy
from kvsweep.errors import UserError
from kvsweep.escape import visible
from kvsweep.files import at_home, open_file
from kvsweep.harness.provenance import describe_code
from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.server import Server
from kvsweep.harness.sweep.store import CellStore, OpenCells
from kvsweep.records import Completion, Pair, Tokens, content_hash, decode
from kvsweep.thinking import ending, joined

# The client waits 0.5 s, 1 s, 2 s, ... and then 8 s, or as long as the server says: about a minute in all.
RETRIES, CONNECT_S = 11, 10.0
_BEAT_S = 1.0
_OF_ONE_QUESTION = (400, 413, 422)  # with these a server answers, but not this request
_SHOWN = 200  # characters of what a server said
_OF_LENGTH = re.compile(r"context|exceed|too (?:long|large|many)|longer than", re.IGNORECASE)
_GOES_ON = "mend it, and the same command goes on"
# What is kept of a server's words, which may have a key among them: vLLM's labels and SGLang's fields of the cache.
_OF_CACHE = re.compile(
    r"\b(cache_dtype|kv_cache_memory_bytes|kv_cache_size_tokens|kv_cache_dtype|max_total_num_tokens|kvcache|token_capacity)"
    r'"?\s*[:=]\s*"?([^",}\s]+)'
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
    """A server gives no completion of this one question, such as one too long for its context."""


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # its name in newer versions of vLLM


class _Choice(msgspec.Struct):
    finish_reason: Any
    error: Any = None
    message: _Message | None = None
    text: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Tokens
    completion_tokens: Tokens
    completion_tokens_details: dict[str, Tokens | None] | None = None

    @property
    def thinking(self) -> Tokens | None:
        return (self.completion_tokens_details or {}).get("reasoning_tokens")


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage
    model: Annotated[str, msgspec.Meta(max_length=1000)] | None = None
    error: Any = None


def fill(work: OpenCells) -> None:
    """Fill the open cells. If a server fails, the others continue; then the first error is raised."""
    asyncio.run(_ask_all(work))


async def _ask_all(work: OpenCells) -> None:
    lacking = [store for store in work.stores.values() if not store.finished_pairs.issuperset(work.share.pairs)]
    logs = [_said_in_log(store.cell.policy) for store in lacking]  # a log that says nothing ends the sweep here
    written = dict.fromkeys((store.cell.cell_id for store in lacking), 0)
    beat = asyncio.create_task(_beat())
    work.reporter.counters.append(lambda: sum(written.values()))
    fills = (_fill(work, store, written, log) for store, log in zip(lacking, logs, strict=True))
    ended = await asyncio.gather(*fills, return_exceptions=True)
    beat.cancel()
    if failures := [one for one in ended if one is not None]:
        raise failures[0]


async def _beat() -> None:
    """Wake the loop regularly: a signal just before the loop starts waiting is handled only after the wait."""
    while True:
        await asyncio.sleep(_BEAT_S)


async def _fill(work: OpenCells, store: CellStore, written: dict[str, int], log: dict[str, str]) -> None:
    job, server, cell_id = work.share.job, store.cell.policy, store.cell.cell_id
    assert isinstance(server, Server)
    started = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": sys.argv, "code": describe_code()}
    timeout = openai.Timeout(None, connect=CONNECT_S)  # a long text takes hours on a slow server
    # Without these the client would send those of another place, from the environment.
    names: Any = {"api_key": server.key or "none", "organization": "", "project": ""}
    async with openai.AsyncOpenAI(base_url=server.url, max_retries=RETRIES, timeout=timeout, **names) as client:
        said = {"url": server.url, "cache": log or await _said_of_cache(client, server.url)}
        models = models_told(store.begin_pass(job.provenance(store.cell), {**started, **said}))
        prompts = {problem.id: problem.prompt for problem in job.benchmark.problems}
        free = asyncio.Semaphore(server.parallel)
        asker = _Asker(job=job, server=server, client=client, prompts=prompts, free=free, models=models)
        refused: list[_RefusedError] = []

        async def answer(pair: Pair) -> None:
            try:
                completion = await asker.ask(pair)
            except _RefusedError as error:
                refused.append(error)  # the other questions are still asked
                return
            store.note(model=asker.model)
            work.append(cell_id, completion)
            written[cell_id] += completion.num_tokens

        try:
            if server.check:
                await asker.check(work.share.pairs[: server.check])
            async with asyncio.TaskGroup() as tasks:
                for pair in (pair for pair in work.share.pairs if work.lacks(cell_id, pair)):
                    tasks.create_task(answer(pair))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if refused:
            raise ServerError(f"{refused[0]} Answers that lack: {len(refused)} of {len(work.share.pairs)}.")


async def _said_of_cache(client: openai.AsyncOpenAI, url: str) -> dict[str, str]:
    """What a server says of its cache, by its own names: vLLM in /metrics, SGLang in /server_info; empty for others."""
    once = client.with_options(max_retries=0, timeout=CONNECT_S)
    for path in ("/metrics", "/server_info"):
        with suppress(openai.APIError):
            text = await once.get(url.removesuffix("/").removesuffix("/v1") + path, cast_to=str)
            if found := dict(_OF_CACHE.findall(text)):
                return found
    return {}


def _said_in_log(server: Policy) -> dict[str, str]:
    """What llama.cpp's server says of its cache in its log, several values of a name joined; empty without a log."""
    assert isinstance(server, Server)
    if server.log is None:
        return {}
    try:
        with open_file(Path(at_home(server.log)), linked=True) as file:  # a pipe would be waited for
            text = file.read(_LOG_START).decode(errors="replace")
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"engine.log={server.log} cannot be read ({error.strerror}): name the server's log.") from None
    found = dict[str, list[str]]()
    for match in _OF_LOG.finditer(text):
        for name, value in match.groupdict().items():
            found.setdefault(name, []).extend([value] if value else [])
    if not any(found.values()):
        raise UserError(
            f"engine.log={server.log} says nothing of a cache: start llama-server with -lv 4, or give none."
        )
    return {name: ", ".join(dict.fromkeys(values)) for name, values in found.items() if values}


@dataclass(frozen=True, kw_only=True)
class _Asker:
    job: Job
    server: Server
    client: openai.AsyncOpenAI
    prompts: dict[str, str]
    free: asyncio.Semaphore
    models: set[str | None]  # that this cell's answers name, those of earlier passes too

    @property
    def model(self) -> str | None:
        """The one model that the answers name."""
        [model] = self.models
        return model

    async def check(self, pairs: list[Pair]) -> None:
        """Ask each of the pairs twice, and print how many completions were equal."""
        texts = [[one.text for one in await asyncio.gather(*map(self.ask, pairs))] for _ in range(2)]
        same = sum(first == second for first, second in zip(*texts, strict=True))
        print(f"{self.server.name}: {same} of {len(pairs)} requests sent twice gave the same text", flush=True)

    async def ask(self, pair: Pair) -> Completion:
        async with self.free:
            start = time.monotonic()
            data = await self._post(pair)
            return self._completion(pair, data, time.monotonic() - start)

    async def _post(self, pair: Pair) -> bytes:
        question = self.prompts[pair[0]]
        api: Any = self.client.completions
        given: dict[str, Any] = {"prompt": question}
        if self.server.api == "chat":
            api, given = self.client.chat.completions, {"messages": [{"role": "user", "content": question}]}
        fields = self._fields(pair)
        given |= {"model": self.server.model, "extra_body": fields}
        try:
            return (await api.with_raw_response.create(**given)).content
        except openai.APIStatusError as error:
            answer = error.response.text
            what = f"answers {error.status_code}: {answer}"
            if error.status_code not in _OF_ONE_QUESTION:
                raise self._error(what) from None
            raise self._error(what, _RefusedError, self._remedy(answer, fields)) from None
        except openai.APIConnectionError as error:
            raise self._error(f"does not answer: {error.__cause__ or error}") from None

    def _remedy(self, refusal: str, fields: Mapping[str, Any]) -> str:
        """Return the way out of a refused request: another length, or the request without the fields that are named."""
        if _OF_LENGTH.search(refusal):
            return "lower decoding.max_new_tokens, or start the server with a longer context"
        named = [name for name in fields if re.search(rf"\b{re.escape(name)}\b", refusal)]
        if not named or len(named) == len(fields):  # a server may repeat the whole request
            return _GOES_ON
        extra = {**self.server.extra, **dict.fromkeys(named)}
        if "max_tokens" in named and "max_completion_tokens" in refusal:
            extra["max_completion_tokens"] = self.job.decoding.max_new_tokens
        listed = ", ".join(f"{name}: {json.dumps(value)}" for name, value in extra.items())
        return f"give 'engine.extra={{{listed}}}'"

    def _fields(self, pair: Pair) -> dict[str, Any]:
        """Return the request's fields besides model and question."""
        sampling = self.job.decoding.sampling
        fields: dict[str, Any] = {"max_tokens": self.job.decoding.max_new_tokens, "temperature": sampling.temperature}
        if sampling.temperature:
            # Servers have their own defaults for missing fields; -1 keeps all tokens.
            fields |= {"top_p": sampling.top_p, "top_k": sampling.top_k or -1, "min_p": 0.0}
        if self.server.seed:
            fields["seed"] = int(content_hash([self.job.seed, *pair])[:7], 16)  # below 2^31, which every server accepts
        return {name: value for name, value in {**fields, **self.server.extra}.items() if value is not None}

    def _completion(self, pair: Pair, data: bytes, seconds: float) -> Completion:
        said = data.decode(errors="replace")
        if self.server.key and self.server.key in said:
            raise self._error("sends the key back in an answer, which is not stored")
        try:
            answer = decode(data, _Answer)
            if len(answer.choices) != 1:
                raise ValueError(f"it has {len(answer.choices)} choices, where one was asked for")
            [choice] = answer.choices
            text = self._text(choice)
            self._check(answer, text)
        except (ValueError, RecursionError) as error:
            raise self._error(f"sends what is no completion ({error}): {said}") from None
        ended = ending(choice.finish_reason)
        if ended is None:
            why = f"ends a text with finish_reason {choice.finish_reason!r}, neither stop nor length"
            raise self._error(why, _RefusedError)
        # Some servers report "stop" for a completion that they truncated at the limit.
        cut = ended == "length" or answer.usage.completion_tokens == self._limit
        return Completion(
            problem_id=pair[0],
            draw=pair[1],
            text=text,
            token_ids=[],
            evictions=[],
            fork_step=None,
            peak_length=None,
            num_tokens=answer.usage.completion_tokens,
            prompt_tokens=answer.usage.prompt_tokens,
            thinking_tokens=answer.usage.thinking,
            stop_reason="length" if cut else "stop",
            seed=self.job.seed,
            seconds=seconds,
        )

    def _check(self, answer: _Answer, text: str) -> None:
        """Refuse a completion that is incomplete or of another model, and token counts that cannot be its own."""
        if fault := answer.error or answer.choices[0].error:
            raise ValueError(f"it has the error {fault}")
        count, thinking = answer.usage.completion_tokens, answer.usage.thinking or 0
        if count < max(thinking, bool(text)) or (self._limit is not None and count > self._limit):
            possible = f"1 to {self._limit or 'any number'}"
            raise ValueError(f"it counts {count} tokens, {thinking} of thinking, where {possible} are possible")
        self._check_model(answer.model)

    def _check_model(self, model: str | None) -> None:
        if others := self.models - {model}:
            named = " and ".join(sorted(map(_named, others)))
            what = f"names {_named(model)}, and other answers of this cell name {named}"
            raise self._error(what, mend="take another run_name, or start the server that gave those")
        self.models.add(model)

    @property
    def _limit(self) -> int | None:
        """The most tokens of a completion; None if the server is not told."""
        return None if "max_tokens" in self.server.extra else self.job.decoding.max_new_tokens

    def _text(self, choice: _Choice) -> str:
        """Return the completion with its thinking between the model's tags, which a server may have split off."""
        message = choice.message or _Message(content=choice.text)
        thinking, tags = message.reasoning_content, self.job.model.tags
        thinking = message.reasoning if thinking is None else thinking
        # An empty thinking was split off too; but servers that split nothing also send an empty one.
        unsplit = thinking == "" and (tags.end is None or tags.end in (message.content or ""))
        if thinking is None or unsplit:
            if message.content is None:
                raise ValueError("it has no text")
            return message.content
        if tags.end is None:
            raise ValueError("its thinking is split off, and model.think_end=null: name the model's tags")
        return joined(thinking, message.content, tags, ended=ending(choice.finish_reason) == "stop")

    def _error(self, what: str, kind: type[ServerError] = ServerError, mend: str = _GOES_ON) -> ServerError:
        """Return an error of one sentence, without a key, whatever the server has said."""
        said = what.replace(self.server.key, "***") if self.server.key else what
        said = visible(" ".join(said.split()))[:_SHOWN]
        return kind(f"{self.server.url} ({self.server.name}) {said}; {mend}.")


def _named(model: str | None) -> str:
    return "no model" if model is None else f"the model {model}"
