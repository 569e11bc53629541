"""Finds the modules that bring positions together, in one forward on meta."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.architecture.by_document import Mixer
from finetune.architecture.operations import (
    TOKENS,
    Unsuitable,
    counts_positions,
    mixes_positions,
    placed_tensors,
    token_axes,
)

COUNTED = "counts positions"


class Positions:
    """The modules that mix positions, with each one's inputs and outputs."""

    def __init__(self, model: PreTrainedModel, positions: Tensor, mixers: Sequence[Mixer] = ()) -> None:
        """`mixers` are run document by document here, and cut and join rows for that."""
        self.cutting = {mixer.path for mixer in mixers}
        self.model, self.positions, self.positions_read, self.tables = model, positions, False, False
        self.found: dict[str, set[str]] = {}  # path of the innermost module -> operations
        self.given: dict[str, dict[str, tuple[int, ...]]] = {}
        self.returned: dict[str, dict[str, tuple[int, ...]]] = {}
        self.running: list[str] = []
        for path, module in model.named_modules():
            if path and not type(module).__module__.startswith("torch."):
                module.register_forward_pre_hook(self._begins(path), with_kwargs=True)
                module.register_forward_hook(self._ends(path))

    def _begins(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.running.append(path)
            self._keep(self.given, path, token_axes(args) | token_axes(kwargs))

        return hook

    def _ends(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.running.pop()
            self._keep(self.returned, path, token_axes(output))

        return hook

    def _keep(self, where: dict[str, Any], path: str, axes: dict[str, tuple[int, ...]]) -> None:
        if where.setdefault(path, axes) != axes:  # a module that several layers share, and give different things
            where[path] = {"": ()}

    def look(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.positions_read |= any(tensor is self.positions for _, tensor in placed_tensors(args))
        self.tables |= counts_positions(name, args, result)
        if name == "arange" and result.numel() == TOKENS:
            self.found.setdefault(self._here(), set()).add(COUNTED)
        elif name in ("slice", "cat") and self._here() in self.cutting:
            return
        elif mixes_positions(name, func, args, kwargs, result):
            self.found.setdefault(self._here(), set()).add(name)

    def _here(self) -> str:
        if self.running:
            return self.running[-1]
        return ""

    def outermost(self) -> list[str]:
        """Paths of the modules that mix positions, without those inside another one."""

        def inside(path: str, other: str) -> bool:
            return path != other and (not other or path.startswith(f"{other}."))

        return [path for path in self.found if not any(inside(path, other) for other in self.found)]

    def mixers(self) -> tuple[Mixer, ...]:
        """The modules to be run document by document. Raises Unsuitable where one of them cannot be."""
        paths = self.outermost()
        for path in paths:
            whole = not path or isinstance(self.model.get_submodule(path), PreTrainedModel)
            output = self.returned.get(path, {})
            if whole or 1 not in map(len, output.values()) or any(len(axes) > 1 for axes in output.values()):
                raise Unsuitable(self.problem(path))
        return tuple(Mixer(path, self.given[path], self.returned[path]) for path in paths)

    def first_problem(self) -> str:
        return self.problem(self.outermost()[0])

    def problem(self, path: str) -> str:
        """A sentence about this module's fault."""
        kind = type(self.model.get_submodule(path)).__name__
        operations = sorted(self.found[path] - {COUNTED})
        if not operations:
            return f"counts positions of its own ({kind})"
        return f"brings positions together outside of its attention ({kind}: {operations[0]})"
