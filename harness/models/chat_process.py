"""The process that renders chat templates: a template is a program, and may hang or fill the memory.

Each line of stdin is one question as JSON, each line of stdout its answer. System limits end a template that exceeds
them, even inside a call of C code; the process then ends with it.
"""

import itertools
import json
import os
import resource
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from kvsweep.harness.models.hub import lines_of

SECONDS = 5  # processor time for one question: a template cannot sleep, and other load does not count
BYTES = 1 << 30  # memory that a template may take beside the imports
MOST_CHARS = 1_000_000


def main() -> None:
    """Answer questions until stdin ends, which it does when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    from transformers.utils import chat_template_utils

    _limit_memory()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        answer = json.dumps(_answer(chat_template_utils, json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, file=answers, flush=True)


def _limit_memory() -> None:
    imported = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = imported + BYTES if hard == resource.RLIM_INFINITY else min(imported + BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(transformers: Any, asked: dict[str, Any]) -> dict[str, str]:
    """Return the texts of user and assistant in turn, rendered by the template, or the template's fault."""

    class Date(datetime):  # transformers' templates can only ask for today's date
        @classmethod
        def now(cls, tz: Any = None) -> Self:
            return cls.fromisoformat(asked["today"])

    transformers.datetime = Date
    roles = itertools.cycle(("user", "assistant"))  # the template writes a system prompt itself
    messages = [{"role": role, "content": text} for role, text in zip(roles, asked["texts"], strict=False)]
    how = {"chat_template": asked["template"], "add_generation_prompt": asked["asks"], **asked["values"]}
    try:
        text = transformers.render_jinja_template(conversations=[messages], **how)[0][0]
    except MemoryError:
        return {"fault": f"it needs more than {BYTES >> 30} GiB of memory"}
    except Exception as error:  # a template may raise anything
        return {"fault": lines_of(error)[0][:200]}
    return {"text": text} if len(text) <= MOST_CHARS else {"fault": f"it writes more than {MOST_CHARS:,} characters"}


if __name__ == "__main__":
    main()
