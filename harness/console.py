"""The entries of the console scripts. Each imports its command only when Ctrl-C has a sentence already."""

import atexit
import signal
import sys
from functools import partial
from importlib import import_module
from typing import Any


def _interrupted_where_nothing_can_be_raised(found: Any) -> None:
    """Send a Ctrl-C again that came inside a callback, where Python only prints and forgets an exception."""
    if found.exc_type is KeyboardInterrupt:
        signal.raise_signal(signal.SIGINT)
    else:
        sys.__unraisablehook__(found)


def _run(program: str, module: str) -> Any:
    sys.unraisablehook = _interrupted_where_nothing_can_be_raised
    # A Ctrl-C while the interpreter takes itself down finds nobody to say a sentence.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    try:
        from kvsweep.base.command_line import one_sentence

        with one_sentence(program):
            return import_module(module).main()
    except KeyboardInterrupt:
        sys.exit(130)


kvsweep = partial(_run, "kvsweep", "kvsweep.harness.sweep.command")
grade = partial(_run, "kvsweep-grade", "kvsweep.harness.grading.command")
status = partial(_run, "kvsweep-status", "kvsweep.harness.sweep.watch.status")
report = partial(_run, "kvsweep-report", "kvsweep.analysis.report.build")
compare = partial(_run, "kvsweep-compare", "kvsweep.analysis.compare")
export = partial(_run, "kvsweep-export", "kvsweep.analysis.export")
predictor = partial(_run, "kvsweep-predictor", "kvsweep.harness.predictor.command")
trace = partial(_run, "kvsweep-trace", "kvsweep.harness.inspect.command")
