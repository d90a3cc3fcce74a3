"""Whether SGLang's layers on CUDA can be sent eight-bit weights more than once, read from its source without importing
it.

What a layer is sent goes through the loader that its parameter was made with. Some layers exchange their parameters for
others once the first weights are in (0.5.23: w8a8_int8 keeps the transpose), which have none: the next update ends with
"no attribute 'weight_loader'". Block fp8 writes into the parameters that are there.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

#: What is so on an NVIDIA card, and of weights that come with their scales, in sglang's words; what stands in neither
#: is followed both ways.
_ON_CUDA = {
    "_is_cpu": False,
    "_is_hip": False,
    "_is_npu": False,
    "_is_xpu": False,
    "_is_musa": False,
    "_is_fp8_fnuz": False,
    "_use_aiter": False,
    "_use_aiter_bpreshuffle_gfx95": False,
    "_use_hip_int4": False,
    "_is_cpu_amx_available": False,
    "_is_cpu_arm64": False,
    "self.use_mxfp8": False,
    "self.convert_mxfp8_to_block": False,
    "self.is_fp4_expert": False,
    "self.is_checkpoint_fp8_serialized": True,
    "self.quant_config.is_checkpoint_fp8_serialized": True,
}
_START = "process_weights_after_loading"
#: Of each method: file below sglang/srt/layers/quantization, class for projections, class for experts.
_LAYERS = {
    "w8a8_int8": ("w8a8_int8.py", "W8A8Int8LinearMethod", "W8A8Int8MoEMethod"),
    "fp8": ("fp8.py", "Fp8LinearMethod", "Fp8MoEMethod"),
}


def second_update_problem(quant_config: Mapping[str, Any], *, experts: bool, package: str | None = None) -> str | None:
    """Why engines on CUDA would not live through a second update of such weights; None if they would.

    experts: the model has some. package: folder of the SGLang to ask; None: the installed one. Without one, or for a
    method that is not known here, the answer is a problem, too.
    """
    method = str(quant_config.get("quant_method"))
    if method not in _LAYERS:
        return f"quantization {method!r} is not known here: there are {', '.join(_LAYERS)}"
    package = package or _installed()
    if package is None:
        return "SGLang is not installed here, so that its loaders cannot be asked"
    file, linear, mixture = _LAYERS[method]
    path = os.path.join(package, "srt", "layers", "quantization", file)
    facts = _ON_CUDA | {"self.block_quant": bool(quant_config.get("weight_block_size"))}
    for name in (linear, mixture) if experts else (linear,):
        exchanged = exchanged_parameters(path, name, tuple(sorted(facts.items())))
        if exchanged is None:
            return f"{path} has no {name}.{_START}: this SGLang is not known here"
        if exchanged:
            return (
                f"SGLang's {name} exchanges {', '.join(exchanged)} for parameters without a loader once they are"
                " loaded, so that the second weight sync ends its engines"
            )
    return None


@functools.cache
def exchanged_parameters(path: str, class_name: str, facts: tuple[tuple[str, bool], ...]) -> tuple[str, ...] | None:
    """Names of a layer's attributes that are bound to new parameters after loading; None without such a class."""
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            walk = _Walk(node, dict(facts))
            return tuple(sorted(walk.exchanged)) if walk.follow(_START) else None
    return None


class _Walk:
    """The statements of a class's methods that can be reached."""

    def __init__(self, definition: ast.ClassDef, facts: Mapping[str, bool]):
        self._methods = {item.name: item for item in definition.body if isinstance(item, ast.FunctionDef)}
        self._facts = facts
        self._seen: set[str] = set()
        self.exchanged: set[str] = set()

    def follow(self, method: str) -> bool:
        """Walk through a method once; False if the class has none of this name."""
        if method in self._methods and method not in self._seen:
            self._seen.add(method)
            self._walk(self._methods[method].body)
        return method in self._methods

    def _walk(self, statements: Sequence[ast.stmt]) -> bool:
        """Whether the method ends in these statements, whatever is not known."""
        for statement in statements:
            if isinstance(statement, ast.If):
                truth = self._truth(statement.test)
                ends = [
                    self._walk(branch)
                    for branch, is_taken in (
                        (statement.body, truth is not False),
                        (statement.orelse, truth is not True),
                    )
                    if is_taken
                ]
                if all(ends):
                    return True
            elif isinstance(statement, (ast.For, ast.With)):
                self._walk(statement.body)
            elif isinstance(statement, (ast.Return, ast.Raise)):
                return True
            else:
                self._note(statement)
        return False

    def _note(self, statement: ast.stmt) -> None:
        """Bindings of new parameters, and calls of other methods of the class."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if ast.unparse(node.func.value) == "self":
                    self.follow(node.func.attr)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            if ast.unparse(statement.value.func).split(".")[-1] == "Parameter":
                self.exchanged |= {
                    target.attr
                    for target in statement.targets
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "layer"
                }

    def _truth(self, test: ast.expr) -> bool | None:
        """Of a condition; None if it is not known."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._truth(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            decides = isinstance(test.op, ast.Or)  # True decides an `or`, False an `and`
            parts = [self._truth(value) for value in test.values]
            if decides in parts:
                return decides
            return None if None in parts else not decides
        return self._facts.get(ast.unparse(test))


def _installed() -> str | None:
    """Folder of the installed sglang."""
    try:
        spec = importlib.util.find_spec("sglang")
    except ValueError:  # a half-imported module without a spec
        return None
    return next(iter(spec.submodule_search_locations or []), None) if spec is not None else None
