"""SGLang's own list of server arguments, read from its source without importing it (an import takes seconds and needs
torch).

sglang 0.5.23 declares them as annotated fields, `name: A[type, Arg(...)] = default`, in srt/arg_groups/fields/*.py
(older versions: in srt/server_args.py), and a few with `parser.add_argument("--name", ...)`. Both forms are read.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib.util
import os

SWITCH, ONE, MANY, OPTIONAL_SWITCH = "switch", "one", "many", "switch or --no-switch"

#: Set by us from other flags; each with the flag to use instead.
RESERVED = {
    "model_path": "it is --hf-checkpoint",
    "host": "it follows from the placement",
    "port": "a free one is taken",
    "tp_size": "it is --rollout-num-gpus-per-engine",
    "api_key": "one is generated for each engine",
    "admin_api_key": "one key protects all of an engine",
    "config": "it carries the API key to the engine. Fix: leave it out, and give its entries as --sglang-<argument>",
    "device": "it follows from the host",
    "base_gpu_id": "it follows from the placement",
    "nnodes": "it follows from the placement",
    "node_rank": "it follows from the placement",
    "dist_init_addr": "it follows from the placement",
    "weight_version": "weight syncs count it",
    "random_seed": "it is --rollout-seed",
}
#: Names in older versions of SGLang -> in 0.5.23.
_RENAMED = {
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "nsa_decode_backend": "dsa_decode_backend",
    "nsa_prefill_backend": "dsa_prefill_backend",
}
#: Shorter spellings that argparse would take as abbreviations.
_SHORT = {"tp": "tp_size", "dp": "dp_size", "pp": "pp_size"}


@dataclasses.dataclass(frozen=True)
class Argument:
    """One server argument: its field name, what values it takes, and the literal choices and number
    type if declared.
    """

    field: str
    kind: str
    choices: tuple[str, ...] = ()
    number: type | None = None


def check_flags(flags: dict[str, str | bool | list[str]]) -> tuple[list[str], list[str]]:
    """(problems, notes) of `--sglang-<name>` flags, given as underscored name -> value, list of values, or True for a
    switch.

    Without sglang installed nothing can be checked but the reserved names; a note says so.
    """
    if not flags:
        return [], []
    known = known_arguments()
    problems = []
    for name, value in flags.items():
        field = known[name].field if name in known else _SHORT.get(name, name)
        if field in RESERVED:
            problems.append(f"--sglang-{_dashed(name)} cannot be set: {RESERVED[field]}.")
        elif known and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean --sglang-{_dashed(close[0])}?" if close else ""
            problems.append(f"--sglang-{_dashed(name)}: SGLang has no argument --{_dashed(name)}.{hint}")
        elif known:
            problems += _value_problems(name, value, known[name])
    notes = [] if known else ["SGLang is not installed here: --sglang-* flags were not checked against its arguments."]
    return problems, notes


def present_names(flags: dict[str, str | bool | list[str]]) -> tuple[dict[str, str | bool | list[str]], list[str]]:
    """(the flags under the names that the installed SGLang has, a note for each that was renamed)."""
    known = known_arguments()
    renamed = {
        name: _RENAMED[name] for name in flags if name in _RENAMED and name not in known and _RENAMED[name] in known
    }
    notes = [
        f"--sglang-{_dashed(old)} is called --sglang-{_dashed(new)} by the SGLang installed here, and was taken as that"
        for old, new in renamed.items()
    ]
    return {renamed.get(name, name): value for name, value in flags.items()}, notes


def to_argv(flags: dict[str, str | bool | list[str]]) -> list[str]:
    """Flags as SGLang's command line. A switch given as False, or the text "false", is left out."""
    argv: list[str] = []
    for name, value in flags.items():
        if isinstance(value, list):
            argv += [f"--{_dashed(name)}", *map(str, value)]
        elif value is True or (_is_switch(name) and str(value).lower() == "true"):
            argv.append(f"--{_dashed(name)}")
        elif value is not False and not (_is_switch(name) and str(value).lower() == "false"):
            argv.append(f"--{_dashed(name)}={value}")  # with "=", so that a value may begin with a dash
    return argv


def merge_flags(defaults: dict, overrides: dict) -> dict:
    """`defaults` where `overrides` does not name the same argument in any spelling, then `overrides`."""
    known = known_arguments()

    def field(name: str) -> str:
        return known[name].field if name in known else name

    overridden = {field(name) for name in overrides}
    return {name: value for name, value in defaults.items() if field(name) not in overridden} | overrides


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _is_switch(name: str) -> bool:
    known = known_arguments()
    return name in known and known[name].kind in (SWITCH, OPTIONAL_SWITCH)


def _value_problems(name: str, value: str | bool | list[str], argument: Argument) -> list[str]:
    flag = f"--sglang-{_dashed(name)}"
    if argument.kind in (SWITCH, OPTIONAL_SWITCH):
        if value in (True, False) or str(value).lower() in ("true", "false"):
            return []
        return [f"{flag} is a switch and takes no value, but got {value!r}."]
    if isinstance(value, bool):
        return [f"{flag} needs a value."]
    values = value if isinstance(value, list) else [value]
    if argument.kind == ONE and len(values) != 1:
        return [f"{flag} takes one value, but got {len(values)}: {' '.join(values)}."]
    problems = []
    for text in values:
        if argument.choices and str(text) not in argument.choices:
            problems.append(f"{flag} {text}: SGLang knows {', '.join(argument.choices)}.")
        if argument.number is not None:
            try:
                argument.number(text)
            except ValueError:
                problems.append(f"{flag} {text}: not {'an integer' if argument.number is int else 'a number'}.")
    return problems


@functools.cache
def known_arguments() -> dict[str, Argument]:
    """Underscored flag name -> Argument, aliases included; {} when sglang is not installed."""
    try:
        spec = importlib.util.find_spec("sglang")
    except ValueError:  # a half-imported module without a spec
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return {}
    return arguments_of(list(spec.submodule_search_locations)[0])


def arguments_of(package: str) -> dict[str, Argument]:
    """Underscored flag name -> Argument of the SGLang whose sources lie in the folder `package`."""
    srt = os.path.join(package, "srt")
    fields = os.path.join(srt, "arg_groups", "fields")
    paths = [os.path.join(srt, "server_args.py")]
    if os.path.isdir(fields):
        paths += [os.path.join(fields, name) for name in sorted(os.listdir(fields)) if name.endswith(".py")]
    known: dict[str, Argument] = {}
    for path in paths:
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                _collect(ast.parse(file.read()), known)
    return known


def _collect(tree: ast.Module, known: dict[str, Argument]) -> None:
    """Add the arguments declared in one file."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    _collect_field(item.target.id, item.annotation, known)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            names = [
                n.value
                for n in call.args
                if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.startswith("--")
            ]
            keywords = {k.arg: k.value for k in call.keywords if k.arg}
            dest = _text(keywords.get("dest"))
            if names:
                _add(names, dest or names[0][2:].replace("-", "_"), _kind(keywords, None), keywords, known)


def _collect_field(name: str, annotation: ast.expr, known: dict[str, Argument]) -> None:
    """Add one `name: A[type, "help" or Arg(...)]`; other annotations are no command-line arguments."""
    if not (
        isinstance(annotation, ast.Subscript)
        and isinstance(annotation.value, ast.Name)
        and annotation.value.id in ("A", "Annotated")
    ):
        return
    if not isinstance(annotation.slice, ast.Tuple):
        return
    declared, *metadata = annotation.slice.elts
    keywords: dict[str, ast.expr] = {}
    for item in metadata:
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Name) and item.func.id == "Derived":
            return
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Name) and item.func.id == "Arg":
            keywords = {k.arg: k.value for k in item.keywords if k.arg}
    if isinstance(keywords.get("no_cli"), ast.Constant) and keywords["no_cli"].value is True:  # type: ignore[attr-defined]
        return
    aliases = [text for text in map(_text, getattr(keywords.get("aliases"), "elts", [])) if text]
    names = [_text(keywords.get("cli_name")) or f"--{_dashed(name)}", *aliases]
    inner = _strip_optional(declared)
    if isinstance(inner, ast.Subscript) and getattr(inner.value, "id", "") == "Literal":
        keywords.setdefault("choices", inner.slice)
    _add(names, name, _kind(keywords, inner), keywords, known, _number(inner, keywords))


def _add(
    names: list[str], field: str, kind: str, keywords: dict, known: dict[str, Argument], number: type | None = None
) -> None:
    choices = [_text(item) for item in getattr(keywords.get("choices"), "elts", [])]
    argument = Argument(field, kind, tuple(choices) if choices and all(choices) else (), number)  # type: ignore[arg-type]
    for name in names:
        known.setdefault(name[2:].replace("-", "_"), argument)
        if kind == OPTIONAL_SWITCH:
            known.setdefault("no_" + name[2:].replace("-", "_"), argument)


def _kind(keywords: dict[str, ast.expr], inner: ast.expr | None) -> str:
    """How many values the argument takes, by sglang's own rules (arg_utils.add_cli_args_from_dataclass)."""
    action = ast.unparse(keywords["action"]) if "action" in keywords else ""
    if "BooleanOptional" in action:
        return OPTIONAL_SWITCH
    if "store_true" in action or "StoreTrue" in action:
        return SWITCH
    if "nargs" in keywords:
        nargs = _text(keywords["nargs"])
        return MANY if nargs in ("*", "+") else ONE
    if action:
        return MANY  # a class of sglang's own, as for LoRA paths: how many it takes cannot be seen from here
    if (
        isinstance(inner, ast.Subscript)
        and getattr(inner.value, "id", "").lower() == "list"
        and "type_parser" not in keywords
    ):
        return MANY
    if isinstance(inner, ast.Name) and inner.id == "bool":
        return SWITCH
    return ONE


def _number(inner: ast.expr, keywords: dict[str, ast.expr]) -> type | None:
    if "type_parser" in keywords or not isinstance(inner, ast.Name):
        return None
    return {"int": int, "float": float}.get(inner.id)


def _strip_optional(node: ast.expr) -> ast.expr:
    """`Optional[X]` and `X | None` -> X."""
    if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Optional":
        return node.slice
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.BitOr)
        and isinstance(node.right, ast.Constant)
        and node.right.value is None
    ):
        return node.left
    return node


def _text(node: ast.expr | None) -> str | None:
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, (str, int)) else None
