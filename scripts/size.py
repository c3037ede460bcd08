"""Count tokens, files and inline constructs of the core and of each annex, beside the limits in pyproject.toml.

    python scripts/size.py            the table
    python scripts/size.py --check    status 1 where a number lies above its limit

Tokens are Python's, without comments, docstrings and layout, so that no formatting changes them. An inline construct
is a comprehension, a generator expression, a conditional expression, a lambda or `:=`; they are counted for ten lines
of functions. A file belongs to the first part of [tool.kvsweep.size] that names it or a folder above it, else to core.
"""

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("kernels", "compression", "harness", "analysis", "src/kvsweep")
INLINE = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.Lambda, ast.NamedExpr)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="status 1 where a number lies above its limit")
    options = parser.parse_args()
    parts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvsweep"]["size"]
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
    if options.check and above:
        print(
            f"size.py: {', '.join(above)}: more than pyproject.toml allows. Make it smaller, or raise the number there"
        )
        print("and say in the commit's message what was bought.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
