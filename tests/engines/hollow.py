"""Modules that are there to be imported only: their names are hollow classes, and compute nothing right."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _HollowType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class Hollow(metaclass=_HollowType):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __init_subclass__(cls, **options: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """As a decorator it leaves the function as it is."""
        decorates = len(arguments) == 1 and not options and callable(arguments[0])
        return arguments[0] if decorates else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __bool__(self) -> bool:
        return False


class _HollowModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _HollowType(name, (Hollow,), {})
        setattr(self, name, made)
        return made


class HollowFinder:
    """For `sys.meta_path`. `is_hollow`: says so of a module's full name."""

    def __init__(self, is_hollow: Callable[[str], bool]) -> None:
        self._is_hollow = is_hollow

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if self._is_hollow(name) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _HollowModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass
