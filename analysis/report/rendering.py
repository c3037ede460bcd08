"""HTML from the templates, and JSON that is safe inside it."""

import json
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from kvsweep.messages.command_line import counted

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
