"""Count tokens, files and inline constructs of the core and of each annex, beside the limits in pyproject.toml.

    python scripts/size.py            the table
    python scripts/size.py --check    status 1 where a number lies above its limit
    python scripts/size.py --places   each place that has to be read twice, with its line

Tokens are Python's, without comments, docstrings and layout, so that no formatting changes them. An inline construct
is a comprehension, a generator expression, a conditional expression, a lambda or `:=`; they are counted for ten lines
of functions. A file belongs to the first part of [tool.kvsweep.size] that names it or a folder above it, else to core.

Five patterns of the product are counted by file, because they have to be read twice (`PATTERNS`). A file has none,
unless [tool.kvsweep.size.patterns] allows it some. Comprehensions with two `for` are counted for the product.
"""

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("kernels", "compression", "harness", "analysis", "src/kvsweep")
INLINE = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.Lambda, ast.NamedExpr)
COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
PATTERNS = {
    "conditional": "a conditional expression in a conditional expression",
    "walrus": ":= within a comprehension",
    "names": "a, b = (... for ...)",
    "comprehension": "a comprehension within a comprehension",
    "boolean": "a text or list times a boolean",
}
TWO_FOR = "two for"
BOOLEAN = ("bool", "StrictBool")
# Functions of Python and methods of texts that return a boolean.
TESTS = {"bool", "isinstance", "issubclass", "any", "all", "hasattr", "callable", "startswith", "endswith", "is_file"}
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass
class Size:
    """What a file or a part of the program has."""

    files: int = 0
    tokens: int = 0
    inline: int = 0
    lines: int = 0  # of functions

    def add(self, other: "Size") -> None:
        self.files += other.files
        self.tokens += other.tokens
        self.inline += other.inline
        self.lines += other.lines

    @property
    def density(self) -> float:
        """Inline constructs in ten lines of functions."""
        return 10 * self.inline / max(1, self.lines)


def size_of(path: Path) -> Size:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    docstrings = set()
    functions = []
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
        if isinstance(node, FUNCTION):
            functions.append(node)
    size = Size(files=1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        size.tokens += token.type not in LAYOUT and token.start not in docstrings
    end = 0
    for function in sorted(functions, key=lambda function: function.lineno):
        if function.lineno > end:  # not inside the one before
            end = function.end_lineno or function.lineno
            size.lines += end - function.lineno + 1
            size.inline += sum(isinstance(node, INLINE) for part in function.body for node in ast.walk(part))
    return size


def patterns_of(tree: ast.Module, fields: frozenset[str] = frozenset()) -> Iterator[tuple[str, int]]:
    """Yield the name and the line of each of the `PATTERNS`, and of each comprehension with two `for`.

    `fields` are the boolean fields of other modules' classes (`boolean_fields`).
    """
    booleans = _booleans(tree) | fields
    yield from (("walrus", line) for line in _lines_within(tree, COMPREHENSION, ast.NamedExpr))
    yield from (("comprehension", line) for line in _lines_within(tree, COMPREHENSION, COMPREHENSION))
    yield from (("conditional", line) for line in _lines_within(tree, ast.IfExp, ast.IfExp))
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSION) and len(node.generators) > 1:
            yield TWO_FOR, node.lineno
        if isinstance(node, ast.Assign) and isinstance(node.value, COMPREHENSION):
            yield from (("names", node.lineno) for target in node.targets if _has_several(target))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            if any(map(_is_sequence, sides)) and any(_is_boolean(side, booleans) for side in sides):
                yield "boolean", node.lineno


def _lines_within(tree: ast.AST, outer: type | tuple[type, ...], inner: type | tuple[type, ...]) -> list[int]:
    """Return the lines of the `inner` nodes that lie within an `outer` node, each once."""
    lines = {}
    for around in ast.walk(tree):
        if isinstance(around, outer):
            for node in ast.walk(around):
                if node is not around and isinstance(node, inner):
                    lines[node] = node.lineno  # type: ignore[attr-defined]
    return list(lines.values())


def _has_several(target: ast.expr) -> bool:
    """True for `a, b` and `*a, b`, but not for `[a]`."""
    return isinstance(target, ast.Tuple | ast.List) and len(target.elts) > 1


def _is_sequence(node: ast.expr) -> bool:
    """True for a text, a list, a tuple, or a sum of such."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_sequence(node.left) or _is_sequence(node.right)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple)


def _is_boolean(node: ast.expr | None, booleans: set[str]) -> bool:
    """True for a comparison, `not`, `and`, `or`, a call that returns a boolean, and a name of `booleans`."""
    if isinstance(node, ast.Compare | ast.BoolOp):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    if isinstance(node, ast.Call):
        return _name(node.func) in TESTS | booleans
    return _name(node) in booleans


def _name(node: ast.expr | None) -> str | None:
    """Return the name of a variable or of an attribute, None of other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _booleans(tree: ast.Module) -> set[str]:
    """Return the names that a module declares as `bool`, or assigns something boolean to."""
    names: set[str | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and _name(node.annotation) in BOOLEAN:
            names.add(node.arg)
        if isinstance(node, FUNCTION) and _name(node.returns) in BOOLEAN:
            names.add(node.name)
        if isinstance(node, ast.AnnAssign) and _name(node.annotation) in BOOLEAN:
            names.add(_name(node.target))
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names.update(_name(name) for name, value in _pairs(target, node.value) if _is_boolean(value, set()))
    return {name for name in names if name}


def boolean_fields(trees: Iterable[ast.Module]) -> frozenset[str]:
    """Return the names that only ever are boolean fields of classes, of all modules of the product."""
    fields = Counter[str | None]()
    booleans = Counter[str | None]()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign):
                fields[_name(node.target)] += 1
                booleans[_name(node.target)] += _name(node.annotation) in BOOLEAN
    return frozenset(name for name in fields if name and fields[name] == booleans[name])


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return each assigned name with its value: two of `a, b = x, y`."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def part_of(path: Path, parts: dict[str, dict[str, object]]) -> str:
    """Return the name of the part that a file of the product belongs to."""
    for name, part in parts.items():
        for place in part.get("places", []):  # type: ignore[attr-defined]
            if path == ROOT / place or (ROOT / place) in path.parents:
                return name
    return "core"


def python_files(folder: Path) -> list[Path]:
    """Return a folder's files; src/kvsweep has links to the other folders, which are not followed."""
    return sorted(path for path in folder.rglob("*.py") if path.resolve() == path)


def places_to_read_twice() -> dict[str, list[tuple[str, int]]]:
    """Return the patterns of each file of the product, by name and line."""
    trees = {}
    for folder in PRODUCT:
        for path in python_files(ROOT / folder):
            trees[path.relative_to(ROOT).as_posix()] = ast.parse(path.read_text(encoding="utf-8"))
    fields = boolean_fields(trees.values())
    return {name: list(patterns_of(tree, fields)) for name, tree in trees.items()}


def patterns_above(limits: dict[str, int], most_two_for: int) -> Iterator[str]:
    """Yield a line for each file with more places to read twice than it may have."""
    two_for = 0
    for name, places in places_to_read_twice().items():
        counts = Counter(kind for kind, _ in places)
        two_for += counts.pop(TWO_FOR, 0)
        allowed = limits.get(name, 0)
        if counts.total() > allowed:
            yield f"size.py: {name}: {counts.total()} places to read twice, at most {allowed}; --places lists them."
    if two_for > most_two_for:
        yield f"size.py: {two_for} comprehensions with two `for`, at most {most_two_for}; write a loop."


def print_places() -> None:
    for name, places in places_to_read_twice().items():
        for kind, line in places:
            print(f"{name}:{line}: {PATTERNS.get(kind, kind)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="status 1 where a number lies above its limit")
    parser.add_argument("--places", action="store_true", help="list the places that have to be read twice")
    options = parser.parse_args()
    if options.places:
        print_places()
        return 0
    parts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvsweep"]["size"]
    limits = parts.pop("patterns")
    most_two_for = limits.pop("two_for")
    sizes = {name: Size() for name in parts}
    for folder in PRODUCT:
        for path in python_files(ROOT / folder):
            sizes[part_of(path, parts)].add(size_of(path))
    for path in python_files(ROOT / "tests"):
        sizes["tests"].add(size_of(path))
    print(f"{'':12} files   tokens    limit  inline   limit")
    above = []
    for name, size in sizes.items():
        tokens, inline = parts[name]["tokens"], parts[name]["inline"]
        print(f"{name:12} {size.files:5} {size.tokens:8,} {tokens:8,} {size.density:7.2f} {inline:7.2f}")
        if size.tokens > tokens or round(size.density, 2) > inline:
            above.append(name)
    product = sum(size.tokens for name, size in sizes.items() if name != "tests")
    print(f"{'product':12} {'':5} {product:8,}")
    unclear = list(patterns_above(limits, most_two_for))
    for line in unclear:
        print(line)
    if options.check and above:
        print(
            f"size.py: {', '.join(above)}: more than pyproject.toml allows. Make it smaller, or raise the number there"
        )
        print("and say in the commit's message what was bought.")
    return 1 if options.check and (above or unclear) else 0


if __name__ == "__main__":
    sys.exit(main())
