"""What one SGLang takes from outside, read from its sources: its server arguments, and the fields of its HTTP requests.

A list of a version that is not installed is written by
    pip download --no-deps --python-version 3.12 --only-binary=:all: sglang==0.5.17
    unzip -q sglang-0.5.17*.whl -d FOLDER
    python -m tests.helpers.sglang_interface FOLDER/sglang > tests/unit/sglang_backend/sglang-0.5.17.json
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from slime_like.sglang_backend.server_args import arguments_of

_BACKENDS = "ATTENTION_BACKEND_CHOICES"
_CHOICE_FILES = ("server_args.py", "arg_groups/choices.py")
_VERBS = ("get", "post", "put", "delete", "api_route")


def interface_of(package: Path) -> dict:
    """{"arguments": {name: [field, kind, [choices], number type or None]}, "routes": {path: [fields of its request]}}.

    A route whose request has no class has no fields here.
    """
    arguments = {
        name: [argument.field, argument.kind, list(argument.choices), argument.number and argument.number.__name__]
        for name, argument in sorted(arguments_of(str(package)).items())
    }
    classes = _classes(package / "srt" / "managers" / "io_struct.py")
    # Some arguments name their choices by a list beside them; of those only this one concerns us.
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for path in _CHOICE_FILES
        if (package / "srt" / path).exists()
        for node in ast.parse((package / "srt" / path).read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == _BACKENDS
    }
    arguments["attention_backend"][2] = lists[_BACKENDS]
    return {"arguments": arguments, "routes": _routes(package / "srt" / "entrypoints" / "http_server.py", classes)}


def _classes(path: Path) -> dict[str, list[str]]:
    """Class name -> its fields, inherited ones first."""
    classes: dict[str, list[str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            inherited = [field for base in node.bases for field in classes.get(ast.unparse(base), [])]
            own = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            classes[node.name] = list(dict.fromkeys(inherited + own))
    return classes


def _routes(path: Path, classes: dict[str, list[str]]) -> dict[str, list[str]]:
    routes = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, (ast.AsyncFunctionDef, ast.FunctionDef)):
            continue
        annotations = [word for a in node.args.args if a.annotation for word in _names(a.annotation)]
        fields = next((classes[name] for name in annotations if name in classes), [])
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute):
                first = decorator.args[0] if decorator.args else None
                if decorator.func.attr in _VERBS and isinstance(first, ast.Constant):
                    routes[first.value] = fields
    return dict(sorted(routes.items()))


def _names(annotation: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]


def main() -> None:
    """Print the list of one SGLang, one entry a line."""
    for_humans = {
        part: "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()) + "\n }"
        for part, entries in interface_of(Path(sys.argv[1])).items()
    }
    print("{\n" + ",\n".join(f' "{part}": {text}' for part, text in for_humans.items()) + "\n}")


if __name__ == "__main__":
    main()
