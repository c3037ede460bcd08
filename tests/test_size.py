"""`make size` counts tokens without comments and docstrings, and inline constructs of functions."""

import ast

import pytest

from scripts.size import ROOT, boolean_fields, part_of, patterns_of, size_of

TEXT = '''"""A docstring."""
LIMIT = 3  # no part of a function


def first(values):
    """Another docstring."""

    def inner(value):
        return value if value else LIMIT

    return [inner(value) for value in values]
'''


def test_a_file_is_counted_without_comments_and_docstrings(tmp_path):
    (tmp_path / "module.py").write_text(TEXT)
    size = size_of(tmp_path / "module.py")
    # LIMIT = 3 | def first ( values ) : | def inner ( value ) : | return value if value else LIMIT | return [ ... ]
    assert size.tokens == 3 + 6 + 6 + 6 + 11
    assert (size.files, size.inline, size.lines) == (1, 2, 7)
    assert round(size.density, 2) == 2.86


def test_what_no_annex_names_is_core():
    parts = {"core": {}, "judge": {"places": ["harness/judge.py"]}, "verify": {"places": ["harness/verify"]}}
    assert part_of(ROOT / "harness/judge.py", parts) == "judge"
    assert part_of(ROOT / "harness/verify/stored.py", parts) == "verify"
    assert part_of(ROOT / "harness/judges.py", parts) == "core"


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        ("a = b if c else d", []),
        ("a = b if c else d if e else f", ["conditional"]),
        ("a = f(b if c else d) if e else g", ["conditional"]),
        ("a = [b for b in c if d(b)]", []),
        ("a = [e for b in c if (e := d(b))]", ["walrus"]),
        ("a = {b: [d for d in e] for b in c}", ["comprehension"]),
        ("a = {b: [f(d for d in g) for e in h] for b in c}", ["comprehension", "comprehension"]),
        ("a = [d for b in c for d in b]", ["two for"]),
        ("a, b = (c(d) for d in e)", ["names"]),
        ("*a, b = [c(d) for d in e]", ["names"]),
        ("[a] = [c(d) for d in e]", []),
        ("a = ', ' * len(b)", []),
        ("a = ', ' * (len(b) > 1)", ["boolean"]),
        ("a = bool(b) * [c]", ["boolean"]),
        ("a = f'{b}' * (not c)", ["boolean"]),
        ("a, b = c > 1, 2\nd = 'x' * a + 'y' * b", ["boolean"]),
        ("def f(a: bool, b: int):\n    return 'x' * a + 'y' * b", ["boolean"]),
        ("a = ['x'] * job.dry + ['y'] * job.count", ["boolean"]),
    ],
)
def test_what_has_to_be_read_twice_is_counted(code, kinds):
    fields = boolean_fields([ast.parse("class Job:\n    dry: bool\n    count: int")])
    assert [kind for kind, _ in patterns_of(ast.parse(code), fields)] == kinds
