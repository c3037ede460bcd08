"""Change one operator, constant or condition of a module, run the tests near it, and list the mutants that survive.

    python scripts/mutants.py analysis/load.py src/kvsweep/run_files/row_types.py --seed 0 --count 60

The tests near a module are test_MODULE.py and files that import the module, or else those of its folder; first what
`make test` runs of them, then what `make slow` runs. Each mutant is tried in a clone of HEAD. The last line is JSON.
Method: mutation analysis, DeMillo, Lipton and Sayward, Computer 11(4), 1978.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ELSEWHERE = "not release and not slurm and not browser"
TIERS = {"test": f"not slow and {ELSEWHERE}", "slow": f"slow and {ELSEWHERE}"}
MOST_FILES = 4  # those that name the module most often; a survivor costs all of them twice
OTHER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
OTHER |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And}
OTHER |= {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}


def places(tree: ast.AST) -> list[tuple[ast.AST, str, object]]:
    """Each change as (node, field, new value)."""
    found: list[tuple[ast.AST, str, object]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
            found.append((node, "ops", [OTHER[type(node.ops[0])](), *node.ops[1:]]))
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OTHER:
            found.append((node, "op", OTHER[type(node.op)]()))
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            found.append((node, "test", ast.UnaryOp(ast.Not(), node.test)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            found.append((node, "value", not node.value if isinstance(node.value, bool) else node.value + 1))
    return found


def tests_near(module: Path) -> list[str]:
    name = ".".join(module.with_suffix("").parts[-2:])
    parent, _, last = name.rpartition(".")
    imports = re.compile(rf"{re.escape(name)}\b|{re.escape(parent)} import .*\b{last}\b")
    uses = {path: len(imports.findall(path.read_text())) for path in ROOT.glob("tests/**/test_*.py")}
    near = sorted(filter(uses.get, uses), key=lambda path: (path.stem != f"test_{last}", -uses[path], path))
    return [str(path.relative_to(ROOT)) for path in near[:MOST_FILES]] or [str("tests" / module.parent)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60, help="mutants of all modules together")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=[*TIERS], help="whose tests run")
    wanted = parser.parse_args()
    copy = Path(tempfile.mkdtemp()) / "kvsweep"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
    killed = dict.fromkeys(wanted.tiers, 0)
    for number in range(wanted.count):
        module = wanted.modules[number % len(wanted.modules)]
        text = (copy / module).read_text()
        tree = ast.parse(text)
        node, field, new = random.Random(f"{wanted.seed} {number}").choice(places(tree))
        before = ast.unparse(node)
        setattr(node, field, new)
        (copy / module).write_text(ast.unparse(ast.fix_missing_locations(tree)))
        near = tests_near(module)
        tier = next((one for one in wanted.tiers if fails(copy, near, TIERS[one])), "survives")
        (copy / module).write_text(text)
        killed.update({tier: killed.get(tier, 0) + 1})
        print(f"{tier}: {module}:{node.lineno}: {before} -> {ast.unparse(node)}".replace("\n", " ")[:200], flush=True)  # type: ignore[attr-defined]
    shutil.rmtree(copy.parent)
    print(json.dumps({"seed": wanted.seed, "count": wanted.count, **killed}))


def fails(copy: Path, tests: list[str], rule: str) -> bool:
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", rule, *tests]
    # Processes that a test starts import the copy too, not the installed folder.
    environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}"}
    try:
        finished = subprocess.run(words, cwd=copy, capture_output=True, timeout=900, env=environment)
        return finished.returncode not in (0, 5)
    except subprocess.TimeoutExpired:  # the mutant never ends
        return True


if __name__ == "__main__":
    main()
