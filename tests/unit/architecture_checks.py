"""Checks source files against architecture.py; each returns readable violations."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def layer_violations(package_dir: Path) -> list[str]:
    """Imports that do not go strictly down, packages without a layer, and imports of what stands outside the package."""
    found = []
    for path in _modules(package_dir):
        module = module_name(path, package_dir)
        area = module.split(".")[0]
        if module and area not in LAYER_OF:
            found.append(f"{module}: '{area}' has no layer. Fix: add it to LAYERS.")
            continue
        for line, target in imports_of(path, package_dir):
            top, _, rest = target.partition(".")
            other = rest.split(".")[0]
            if top in rules.OUTSIDE:
                found.append(f"{module}:{line} imports {top}, which stands outside the package.")
            elif top == package_dir.name and other in LAYER_OF and other != area:
                if not module or LAYER_OF[other] >= LAYER_OF[area]:
                    found.append(f"{module or '__init__'}:{line} imports {other}, which is not below it.")
                elif other in rules.ONLY_FOR_TESTS:
                    found.append(f"{module}:{line} imports {other}, which is for tests only.")
    return found


def fence_violations(package_dir: Path) -> list[str]:
    """Third-party imports outside the modules that they are reserved for."""
    found = []
    for path in _modules(package_dir):
        module = module_name(path, package_dir)
        for line, target in imports_of(path, package_dir):
            top = target.split(".")[0]
            allowed = rules.FENCES.get(top)
            if allowed is not None and not any(module == name or module.startswith(name + ".") for name in allowed):
                found.append(f"{module}:{line} imports {top}; allowed only in {', '.join(sorted(allowed))}.")
    return found


def size_violations(paths: Iterable[Path], root: Path) -> list[str]:
    """Files, functions and parameter lists that are too long."""
    found = []
    for path in paths:
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        limit, lines = rules.MAX_LINES_OF.get(name, rules.MAX_FILE_LINES), len(text.splitlines())
        if lines > limit:
            found.append(f"{name}: {lines} lines, limit {limit}. Fix: split by responsibility.")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found += _function_violations(node, name)
    return found


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


def _modules(package_dir: Path) -> list[Path]:
    return sorted(package_dir.rglob("*.py"))


def _function_violations(node: ast.FunctionDef | ast.AsyncFunctionDef, file_name: str) -> list[str]:
    found = []
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > rules.MAX_FUNCTION_LINES:
        found.append(f"{file_name}:{node.lineno} {node.name}: {lines} lines, limit {rules.MAX_FUNCTION_LINES}. Fix: split by step.")
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    count = len([name for name in names if name not in ("self", "cls")])
    if count > rules.MAX_PARAMETERS:
        found.append(f"{file_name}:{node.lineno} {node.name}: {count} parameters, limit {rules.MAX_PARAMETERS}. Fix: a dataclass.")
    return found


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
