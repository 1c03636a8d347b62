"""All benchmark methods by name: every module of this folder that has a tuple `METHODS`."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from mqmk.learner.bench import methods
from mqmk.learner.bench.methods.parts.protocol import MethodInfo
from mqmk.learner.errors import LearnerError


@cache
def list_methods() -> dict[str, MethodInfo]:
    """Name -> method, references and statistics before prompts."""
    names = [module.name for module in iter_modules(methods.__path__) if not module.ispkg]
    modules = [import_module(f"{methods.__name__}.{name}") for name in names]
    found = [info for module in modules for info in getattr(module, "METHODS", ())]
    families = ("reference", "statistics", "prompts", "pool")
    return {info.name: info for info in sorted(found, key=lambda info: families.index(info.family))}


def choose_methods(names: str, leaky: bool = False) -> tuple[MethodInfo, ...]:
    """`all` or comma-separated names; methods with the batch bug only where they were asked for."""
    known = list_methods()
    wanted = [*known] if names == "all" else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in known]:
        raise LearnerError(f"no method is called {', '.join(unknown)}; choose among {', '.join(known)}")
    if not leaky and names != "all" and (refused := [name for name in wanted if known[name].is_leaky]):
        raise LearnerError(f"{', '.join(refused)} has the batch bug on purpose; add --leaky to run it")
    chosen = [known[name] for name in wanted if not known[name].is_leaky]
    return (*chosen, *(info for info in known.values() if leaky and info.is_leaky))
