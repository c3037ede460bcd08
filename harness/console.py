"""The functions that the console scripts call. Each makes Ctrl-C end in one sentence before it imports its command."""

import atexit
import signal
import sys
from functools import partial
from importlib import import_module
from typing import Any

# Seconds after which a dropped Ctrl-C comes again. The hook must have returned by then: what it raises is dropped too.
_AGAIN = 0.05


def _raise_again_if_interrupted(found: Any) -> None:
    """Let Ctrl-C come again if it came inside a callback, where Python prints the exception and drops it."""
    if found.exc_type is KeyboardInterrupt:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)
    else:
        sys.__unraisablehook__(found)


def _end_by_signal() -> None:
    """Let Ctrl-C end the process, since nothing turns an exception into a sentence while the interpreter shuts down."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(program: str, module: str, *, goes_on: bool = False) -> Any:
    """Call the `main` of a module; with `goes_on` the sentence of Ctrl-C says that the work goes on next time."""
    sys.unraisablehook = _raise_again_if_interrupted
    atexit.register(_end_by_signal)
    try:
        from kvsweep.base.command_line import GOES_ON, one_sentence

        with one_sentence(program, GOES_ON if goes_on else "interrupted."):
            return import_module(module).main()
    except KeyboardInterrupt:
        sys.exit(130)


kvsweep = partial(_run, "kvsweep", "kvsweep.harness.sweep.command", goes_on=True)
grade = partial(_run, "kvsweep-grade", "kvsweep.harness.grading.command")
status = partial(_run, "kvsweep-status", "kvsweep.harness.sweep.watch.status")
report = partial(_run, "kvsweep-report", "kvsweep.analysis.report.build")
compare = partial(_run, "kvsweep-compare", "kvsweep.analysis.compare")
export = partial(_run, "kvsweep-export", "kvsweep.analysis.export")
replay = partial(_run, "kvsweep-replay", "kvsweep.harness.replay.command")
predictor = partial(_run, "kvsweep-predictor", "kvsweep.harness.predictor.command", goes_on=True)
trace = partial(_run, "kvsweep-trace", "kvsweep.harness.inspect.command")
