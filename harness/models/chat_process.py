"""The process that renders chat templates: a model's template is a program, which may hang or fill the memory.

Each line of stdin is one question as JSON, each line of stdout its answer. Limits of the system end a template that
exceeds them, even within a call of C code, and then the process ends with it.
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

SECONDS = 5  # of the processor, for one question: a template cannot sleep, and a busy machine costs it nothing
BYTES = 1 << 30  # what a template may take of the memory beside the imports
MOST_CHARS = 1_000_000


def main() -> None:
    """Answer questions until stdin ends, as it does with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
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
    """The texts of a user and an assistant by turns in the template, or the fault of the template."""

    class Date(datetime):  # the templates of transformers can ask for no other date than today's
        @classmethod
        def now(cls, tz: Any = None) -> Self:
            return cls.fromisoformat(asked["today"])

    transformers.datetime = Date
    roles = itertools.cycle(("user", "assistant"))  # a system prompt is the template's own
    messages = [{"role": role, "content": text} for role, text in zip(roles, asked["texts"], strict=False)]
    how = {"chat_template": asked["template"], "add_generation_prompt": asked["asks"], **asked["values"]}
    try:
        text = transformers.render_jinja_template(conversations=[messages], **how)[0][0]
    except MemoryError:
        return {"fault": f"it needs more than {BYTES >> 30} GiB of memory"}
    except Exception as error:  # a template raises what it likes
        return {"fault": lines_of(error)[0][:200]}
    return {"text": text} if len(text) <= MOST_CHARS else {"fault": f"it writes more than {MOST_CHARS:,} characters"}


if __name__ == "__main__":
    main()
