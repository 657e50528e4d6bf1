"""Built-in rules, one file per family of ops. Importing this package imports them all, which registers their rules."""

from importlib import import_module
from pkgutil import iter_modules

for _module in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")
