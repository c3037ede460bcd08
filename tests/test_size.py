"""`make size` counts tokens without comments and docstrings, and inline constructs of functions."""

from scripts.size import ROOT, part_of, size_of

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
