"""HTML from the templates, and JSON that is safe inside it."""

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
import numpy as np

from kvsweep.command_line import counted

if TYPE_CHECKING:
    from kvsweep.analysis.figures.completion import Kept

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **context: Any) -> str:
    """Fill a template. In HTML, texts are escaped; a name that is missing in the context is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=template.endswith(".html.jinja"),
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["counted"] = counted
    return environment.get_template(template).render(context)


def script_json(value: Any) -> str:
    """Write JSON that is safe inside a script element: no text can close the element or open another."""
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # half a character; JSON in ASCII can hold it
        text = json.dumps(value)
    # The two line separators end a line in old JavaScript.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def kept_html(kept: "Kept", *, title: str) -> str:
    """Write a page of the whole text, evicted tokens shaded by eviction."""
    runs = [groupby(held[~np.isnan(held)].tolist()) for held in kept.held]
    data = {
        "text": "".join(kept.pieces),
        "lengths": [len(piece.encode("utf-16-le")) // 2 for piece in kept.pieces],
        "prompt": 0,
        "question": kept.prompt,
        "steps": list(kept.steps),
        "held": [[number for percent, run in parts for number in (int(percent), len(list(run)))] for parts in runs],
    }
    return render("kept.html.jinja", title=title, data=script_json(data))
