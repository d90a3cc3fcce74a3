"""Checks source files against architecture.py; each returns readable violations."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import architecture as rules

LAYER_OF = {name: level for level, names in enumerate(rules.LAYERS) for name in names}


def module_name(path: Path, package_dir: Path) -> str:
    """`…/slime_like/rollout/filters.py` -> "rollout.filters"; a package's __init__ is the package; the root's is ""."""
    parts = list(path.relative_to(package_dir).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, package_dir: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted target) of every import, also inside functions; `from a import b` gives a.b."""
    is_package = path.name == "__init__.py"
    here = [package_dir.name, *filter(None, module_name(path, package_dir).split("."))]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - is_package if node.level else 0
            base = here[: len(here) - up] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def layer_violations(package_dir: Path) -> list[str]:
    """Imports that do not go strictly down, packages without a layer, and imports of what stands
    outside the package.
    """
    violations = []
    for path in _modules(package_dir):
        module = module_name(path, package_dir)
        area = module.split(".")[0]
        if module and area not in LAYER_OF:
            violations.append(f"{module}: '{area}' has no layer. Fix: add it to LAYERS.")
            continue
        for line, target in imports_of(path, package_dir):
            top, _, rest = target.partition(".")
            other = rest.split(".")[0]
            if top in rules.OUTSIDE:
                violations.append(f"{module}:{line} imports {top}, which stands outside the package.")
            elif top == package_dir.name and other in LAYER_OF and other != area:
                if not module or LAYER_OF[other] >= LAYER_OF[area]:
                    violations.append(f"{module or '__init__'}:{line} imports {other}, which is not below it.")
                elif other in rules.ONLY_FOR_TESTS:
                    violations.append(f"{module}:{line} imports {other}, which is for tests only.")
    return violations


def fence_violations(package_dir: Path) -> list[str]:
    """Third-party imports outside the modules that they are reserved for."""
    violations = []
    for path in _modules(package_dir):
        module = module_name(path, package_dir)
        for line, target in imports_of(path, package_dir):
            top = target.split(".")[0]
            allowed = rules.FENCES.get(top)
            if allowed is not None and not any(module == name or module.startswith(name + ".") for name in allowed):
                violations.append(f"{module}:{line} imports {top}; allowed only in {', '.join(sorted(allowed))}.")
    return violations


def size_violations(paths: Iterable[Path], root: Path) -> list[str]:
    """Files, functions and parameter lists that are too long."""
    violations = []
    for path in paths:
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        limit, lines = rules.MAX_LINES_OF.get(name, rules.MAX_FILE_LINES), len(text.splitlines())
        if lines > limit:
            violations.append(f"{name}: {lines} lines, limit {limit}. Fix: split by responsibility.")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                violations += _function_violations(node, name)
    return violations


def import_cycles(package_dir: Path) -> list[str]:
    """Groups of modules that import each other."""
    paths = {module_name(path, package_dir): path for path in _modules(package_dir)}
    graph = {}
    for module, path in paths.items():
        targets = set()
        for _, target in imports_of(path, package_dir):
            top, _, rest = target.partition(".")
            if top == package_dir.name:
                # `from package.module import name` may name a module or something in it.
                targets.add(rest if rest in paths else rest.rpartition(".")[0])
        graph[module] = (targets & paths.keys()) - {module, ""}
    return [f"import cycle: {' <-> '.join(sorted(group))}" for group in _strongly_connected(graph) if len(group) > 1]


def name_violations(paths: Iterable[Path], root: Path) -> list[str]:
    """Variables, parameters, attributes and functions with a vague name (architecture.VAGUE_NAMES), `_` before it or
    not.
    """
    return [
        f"{path.relative_to(root).as_posix()}:{line} {name}: says nothing of what it is. Fix: name the thing."
        for path in paths
        for line, name in sorted(_names_given(ast.parse(path.read_text(encoding="utf-8"))))
        if name.strip("_") in rules.VAGUE_NAMES
    ]


def class_name_violations(package_dir: Path) -> list[str]:
    """Public classes of different modules that have one name."""
    modules: dict[str, list[str]] = {}
    for path in _modules(package_dir):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(module_name(path, package_dir))
    return [
        f"{name} is a class of {' and '.join(homes)}. Fix: a name for each."
        for name, homes in sorted(modules.items())
        if len(homes) > 1
    ]


def mirror_violations(package_dir: Path, tests_dir: Path, elsewhere: Mapping[str, Sequence[str]]) -> list[str]:
    """Modules with logic that no test file stands for, and entries of `elsewhere` (architecture.TESTED_ELSEWHERE) that
    are not true.

    A module's mirror is tests/unit/<package>/test_<file>.py; a package's own is test_<package>.py beside its folder.
    The files of an entry must import the module, by themselves or through tests/helpers, or name it:
    `slime_like.job.build`, or the file's path.
    """
    modules = {name: path for path in _modules(package_dir) if (name := module_name(path, package_dir))}
    mirrors = {
        name: tests_dir.joinpath("unit", *name.split(".")[:-1], f"test_{name.split('.')[-1]}.py") for name in modules
    }
    problems = []
    for name, path in modules.items():
        mirror = mirrors[name].relative_to(tests_dir).as_posix()
        if not mirrors[name].is_file() and has_logic(path) and not any(_covers(key, name) for key in elsewhere):
            problems.append(
                f"{name} has no tests/{mirror}. Fix: write it, or name the tests that cover it in TESTED_ELSEWHERE."
            )
    for key, files in elsewhere.items():
        covered = [name for name in modules if _covers(key, name)]
        if not covered:
            problems.append(f"TESTED_ELSEWHERE: there is no module {key}.")
        elif all(mirrors[name].is_file() or not has_logic(modules[name]) for name in covered):
            problems.append(f"TESTED_ELSEWHERE: {key} has its mirror, or nothing to test. Fix: take the entry out.")
        if not files:
            problems.append(f"TESTED_ELSEWHERE: {key} names no test.")
        for file in files:
            if not (tests_dir / file).is_file():
                problems.append(f"TESTED_ELSEWHERE: {key}: there is no tests/{file}.")
            elif not any(
                _is_about(path, key, package_dir)
                for path in [tests_dir / file, *_helpers_of(tests_dir / file, tests_dir)]
            ):
                problems.append(f"TESTED_ELSEWHERE: {key}: tests/{file} neither imports nor names it.")
    return problems


def has_logic(path: Path) -> bool:
    """Whether a module holds a function or method that does more than its docstring says."""
    functions = (
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return any(
        not all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in node.body)
        for node in functions
    )


def _covers(key: str, module: str) -> bool:
    """Whether an entry for a module or package is about this module."""
    return module == key or module.startswith(key + ".")


def _helpers_of(test: Path, tests_dir: Path) -> list[Path]:
    """The modules of tests/helpers that a test file imports."""
    names = {target.split(".")[2] for _, target in imports_of(test, test.parent) if target.startswith("tests.helpers.")}
    return [path for name in sorted(names) if (path := tests_dir / "helpers" / f"{name}.py").is_file()]


def _names_given(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that gets a name in this code; names that are only read are not among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, alias.asname) for alias in node.names if alias.asname)


def _is_about(test: Path, module: str, package_dir: Path) -> bool:
    """Whether a test file imports this module (or package), or names it in its text."""
    name = f"{package_dir.name}.{module}"
    if any(_covers(name, target) for _, target in imports_of(test, test.parent)):
        return True
    path = name.replace(".", "/")
    return (
        re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)|{re.escape(path)}(\.py|/)", test.read_text(encoding="utf-8"))
        is not None
    )


def _modules(package_dir: Path) -> list[Path]:
    return sorted(package_dir.rglob("*.py"))


def _function_violations(node: ast.FunctionDef | ast.AsyncFunctionDef, file_name: str) -> list[str]:
    violations = []
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > rules.MAX_FUNCTION_LINES:
        violations.append(
            f"{file_name}:{node.lineno} {node.name}: {lines} lines, limit {rules.MAX_FUNCTION_LINES}. Fix: split by"
            " step."
        )
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    count = len([name for name in names if name not in ("self", "cls")])
    if count > rules.MAX_PARAMETERS:
        violations.append(
            f"{file_name}:{node.lineno} {node.name}: {count} parameters, limit {rules.MAX_PARAMETERS}. Fix: a"
            " dataclass."
        )
    return violations


def _strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups in which every module reaches every other: small graphs, so by plain reachability."""
    reach = {module: _reachable(graph, module) for module in graph}
    groups: list[set[str]] = []
    for module in sorted(graph):
        if not any(module in group for group in groups):
            groups.append({module} | {other for other in reach[module] if module in reach[other]})
    return groups


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += graph[module]
    return seen
