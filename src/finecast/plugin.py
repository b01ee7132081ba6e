"""What a plugin gives finecast: frozen values, found by an entry point.

A plugin is a package with a module that has a ``Plugin``. Its distribution names that in the
entry-point group ``finecast.plugins``::

    [project.entry-points."finecast.plugins"]
    toy = "finecast_toy.plugin:PLUGIN"

    PLUGIN = Plugin(
        name="toy",
        summary="greets a model",
        verbs=(Verb("greet", "Say hello to a model.", "finecast_toy.greet"),),
        engines=(EngineEntry(name="toy", module="finecast_toy.engine", ...),),
    )

Laws: everything here is named as ``module`` or ``module:attribute`` and imported when it is
used, so that a plugin costs nothing until then; its module ``plugin`` imports nothing but this
one. What the core has itself is registered by the same values (``finecast.builtin``). A plugin
that cannot be imported, or adds a verb, an engine or another name that is there already, costs
what it would have added, and one line of the command line and of errors about names that are
missing. A plugin knows finecast by its public modules alone: ``finecast``, ``finecast.api``,
``finecast.errors``, this one, and the room of what it adds, such as ``finecast.engines``, by
the names that the room's package imports, those under ``if TYPE_CHECKING`` among them. The
contract ``seams`` of ``pyproject.toml`` lists them. ``tests/toy_plugin`` is a whole plugin.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from finecast.errors import EngineError, FinecastError
from finecast.terminal import results, safe, write

GROUP: Final = "finecast.plugins"
"""The group of entry points in which plugins are named."""

CORE: Final = "finecast.builtin:CORE"
"""The plugin that is the core itself."""

ONNX: Final = "ONNX files"
IR: Final = "OpenVINO IR"
SAVED_MODELS: Final = "SavedModels"
PROGRAMS: Final = "exported programs"
"""Kinds of files that engines load."""


def load(reference: str) -> Any:
    """What ``module:attribute`` or ``module`` names; imports the module.

    Raises:
        FinecastError: If there is no such module, or no such attribute in it.
    """
    module, _, attribute = reference.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # what the module itself imports is missing
        raise _unknown(reference, f"there is no module {error.name!r}") from error
    if attribute and not hasattr(loaded, attribute):
        raise _unknown(reference, f"the module has no {attribute!r}")
    return getattr(loaded, attribute) if attribute else loaded


def _unknown(reference: str, why: str) -> FinecastError:
    what = f"a plugin names {reference!r}, and {why}"
    return FinecastError(what, fix=f"mend the Plugin of {reference.partition('.')[0]}")


def lazily(names: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__`` that imports its public names from modules on first use.

    A package of a plugin is imported whenever plugins are looked for, so it imports nothing.

    Args:
        names: The module that defines each name, or ``module:attribute``.
    """

    def attribute(name: str) -> Any:
        if name not in names:
            known = ", ".join(sorted(names))
            raise AttributeError(f"there is no public name {name!r}: the names are {known}")
        reference = names[name]
        return load(reference if ":" in reference else f"{reference}:{name}")

    return attribute


def imported_on_use(package: str) -> Callable[[str], Any]:
    """A room's ``__getattr__`` for the names that it states under ``if TYPE_CHECKING``.

    Law: what type checkers see is what there is, and it is imported on first use: a room costs
    nothing, and plugins and other rooms need not know in which of its modules a name is. A
    name of a room that is a module of it, too, is stated by another name.

    Args:
        package: The room's ``__name__``.
    """
    names = dict[str, str]()

    def attribute(name: str) -> Any:
        if not names:
            names.update(_stated(Path(str(sys.modules[package].__file__))))
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return load(names[name])

    return attribute


def _stated(source: Path) -> Iterator[tuple[str, str]]:
    """Names that a module imports for type checkers alone, each as ``module:attribute``."""
    for block in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                if isinstance(node, ast.ImportFrom):
                    for name in node.names:
                        yield name.asname or name.name, f"{node.module}:{name.name}"


def say(text: str) -> None:
    """Write a line of a verb's result to standard output; control characters are escaped."""
    write(results(), safe(text))


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of the command line.

    ``finecast.load(model).read_graph()`` is a model's graph (``finecast.graph``), for which
    the model is not run; ``finecast.inspect`` counts its ops, and runs it. The graph has
    ``nodes`` and ``values``: a weight is a value whose ``constant`` is not None, as in
    ``sum(v.constant.size for v in graph.values if v.constant and v.dtype == "fp32")``. Raise
    ``UsageError(WHAT, where=..., fix=...)`` or ``ModelError``, both of ``finecast.errors``,
    for what users can mend: the command line prints it as one line. Any other exception is a
    fault, with a traceback and exit code 70.

    Attributes:
        name: What users type after ``finecast``.
        summary: Its line in ``finecast --help``.
        module: The module whose function ``run`` it is. Its options are the function's
            parameters, as Typer reads them; its exit code is what the function returns, 0 for
            None. What it has to say goes to ``say``, line by line, and JSON as one text: what
            code prints is taken for notes of a library.
    """

    name: str
    summary: str
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """An engine: software that runs a model on this machine.

    An engine that is installed and reads ONNX files takes part in commands that name none:
    ``doctor --all`` probes it, ``tune`` times fp32 in it, may search in it, and tries its
    result there. A small one::

        class Toy(Engine):
            name = "toy"

            def __init__(self, device):
                self.device = device

            def load(self, model, *, profiling=False):
                return ToySession(model)

        class ToySession(Session):
            def __init__(self, model):  # a pathlib.Path, or the bytes of an ONNX file
                source = read_source(model)
                self.inputs, self.outputs = source.inputs, source.outputs

            def run(self, feeds):  # arrays by name; those of bf16 and fp8 are ml_dtypes'
                arrays = ordered_feeds(feeds, self.inputs)  # names, types, shapes are right
                ...
                return {"logits": array}  # all outputs by name, in the model's order

    All names are ``finecast.engines``'s. ``load`` and ``run`` raise a
    ``finecast.errors.EngineError`` for a model that the library cannot run, whatever the
    library itself raises: another engine is then tried. Any other exception ends the command.
    ``load`` and ``run`` are enough for ``convert`` and ``profile``. ``tune`` predicts by the
    times of kernels: where ``Session.profile`` gives none it tries the lowest plans alone.
    Formats on codes (int8, weights of 8 or 4 bits) need rows of the core
    (``engines/integers.py``, ``engines/usage.py``).

    Attributes:
        name: What users give to ``--engine``; ``Engine.name`` states it, too.
        module: The module with the engine, and with a function ``devices`` that gives the
            names of the devices that it has here, as ``("CPU",)``.
        factory: The name of the class, or of a function, that takes the name of a device as
            the user wrote it and gives a ``finecast.engines.Engine``, or raises an
            ``EngineError`` for a device that it does not have.
        requires: The module to import of the library that it needs.
        install: The command that installs that.
        device: The device by default.
        reads: The kinds of files that it loads, and of models in memory that these hold.
        framework: The framework whose models these are.
        title: What messages call it; empty for its name.
    """

    name: str
    module: str
    factory: str
    requires: str
    install: str
    device: str = "CPU"
    reads: tuple[str, ...] = (ONNX,)
    framework: str = "ONNX"
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendEntry:
    """A frontend: which models it reads and writes.

    Attributes:
        suffixes: Suffixes of the files that it reads, the one that it writes first.
        packages: Packages, of a library or its own, whose objects it opens.
        module: The module with ``read``, which opens a path, and ``take``, for an object.
        requires: The library that it needs.
        install: How to install that.
        files: The kind of the files that it writes: engines that say of themselves that they
            read it (``EngineEntry.reads``) load them.
        lacks: Options and verbs that do not apply to its models, and what to do instead.
        folders: Files that mark a folder as one of its models.
        beside: Names of further files that may be written with a model: ``{name}`` is the
            name of the model's file, ``{stem}`` the same without its suffix.
        writes_folder: Whether it writes a folder, marked like those that it reads.
        opsets: Whether its plans state the operation set that they need.
        captures: Whether its objects are captured by example inputs.
    """

    suffixes: tuple[str, ...]
    packages: tuple[str, ...]
    module: str
    requires: str
    install: str
    files: str = ""
    lacks: Mapping[str, str] = field(default_factory=dict[str, str])
    folders: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    writes_folder: bool = False
    opsets: bool = False
    captures: bool = False

    @property
    def kind(self) -> str:
        """What it writes, in words, such as ``.onnx files``."""
        return "SavedModels" if self.writes_folder else f"{self.suffixes[0]} files"

    @property
    def runners(self) -> tuple[str, ...]:
        """Names of the engines that load its files, those of plugins among them."""
        return tuple(entry.name for entry in engines() if self.files in entry.reads)

    def reads(self, path: Path) -> bool:
        """Whether it reads ``path``: a folder by the files in it, a file by its suffix."""
        if path.is_dir():
            return any((path / name).is_file() for name in self.folders)
        return path.suffix.lower() in self.suffixes

    def opens(self, module: str) -> bool:
        """Whether it opens objects of classes that ``module`` defines."""
        return any(f"{module}.".startswith(f"{package}.") for package in self.packages)

    @property
    def installed(self) -> bool:
        """Whether its library is installed."""
        return importlib.util.find_spec(self.requires) is not None

    def load(self) -> ModuleType:
        """Import its module.

        Raises:
            EngineError: If its library is not installed.
        """
        if not self.installed:
            raise EngineError(f"{self.kind} need {self.requires}", fix=self.install)
        return importlib.import_module(self.module)


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options that a plugin adds to verbs of the core.

    Attributes:
        options: The dataclass, as ``module:Class``, whose fields are the options
            (``finecast.naming.Option``). It says what they ask for
            (``finecast.devices.CastOptions``).
        verbs: The verbs that take them.
        heading: What ``--help`` lists them under.
        several: Options that take all words up to the next option, as one value.
    """

    options: str
    verbs: tuple[str, ...]
    heading: str
    several: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """What a plugin adds. Whatever is left out it does not add.

    Attributes:
        name: Its name, that of its entry point.
        summary: What it is for, in one line; ``finecast doctor --all`` shows it.
        packages: Public modules under ``finecast``, each with the module or package that
            stands for it: ``{"finecast.compat.raf": "finecast_raf"}``.
        names: Names in modules of the core, as ``finecast.torch.compile`` or
            ``finecast.reports.page_of``, each with ``module:attribute``. The first are for
            users; the others the core asks for where they are here.
        verbs: Verbs of the command line.
        options: Options of the core's verbs.
        engines: Engines, in order of preference.
        frontends: Frontends. They come before the core's for what both read.
        rule_sets: Casting rules by the name of the set, each a
            ``finecast.rules.Guest``.
        executors: Places where evaluations run, by what users give to ``--executor``: each a
            function that takes that option and a ``Progress`` and gives the workers.
    """

    name: str
    summary: str
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    verbs: tuple[Verb, ...] = ()
    options: tuple[OptionGroup, ...] = ()
    engines: tuple[EngineEntry, ...] = ()
    frontends: tuple[FrontendEntry, ...] = ()
    rule_sets: Mapping[str, str] = field(default_factory=dict[str, str])
    executors: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Registered:
    """The plugins that are here, and what is known of them.

    Attributes:
        plugins: What was loaded: the core first, then plugins by name.
        distributions: ``NAME VERSION`` of the distribution of each plugin, by its name; empty
            where it has none.
        failures: Why a plugin could not be imported, by its name.
        absent: Names of plugins that are known, and whose packages are not here.
    """

    plugins: tuple[Plugin, ...]
    distributions: Mapping[str, str]
    failures: Mapping[str, str]
    absent: tuple[str, ...] = ()


@cache
def registered() -> Registered:
    """All plugins of this environment.

    An entry point whose package is not there is passed over: finecast's own wheel names all
    of its plugins, and a build may leave some out.
    """
    from importlib.metadata import entry_points

    core: Plugin = load(CORE)
    loaded, distributions, failed = [core], dict[str, str](), dict[str, str]()
    absent: list[str] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        if importlib.util.find_spec(entry.module.partition(".")[0]) is None:
            absent.append(entry.name)
            continue
        try:
            plugin = entry.load()
        except Exception as error:  # whatever a plugin's code raises
            failed[entry.name] = f"{type(error).__name__}: {error}"
            continue
        if not isinstance(plugin, Plugin):
            failed[entry.name] = f"{entry.value} is of type {type(plugin).__name__}, no Plugin"
            continue
        taken = _taken(plugin, loaded)
        if taken:
            failed[entry.name] = f"{taken} is there already"
            continue
        loaded.append(plugin)
        of = entry.dist
        distributions[plugin.name] = "" if of is None else f"{of.name} {of.version}"
    return Registered(tuple(loaded), distributions, failed, tuple(absent))


def _taken(plugin: Plugin, others: Sequence[Plugin]) -> str:
    """What a plugin would add under a name that another one has; empty for nothing."""
    for what, names_of in _NAMED.items():
        names = {name for other in others for name in names_of(other)}
        for name in names_of(plugin):
            if name in names:
                return f"{what} {name!r}"
    return ""


_NAMED: Final[Mapping[str, Callable[[Plugin], Iterable[str]]]] = {
    "a plugin": lambda plugin: [plugin.name],
    "the verb": lambda plugin: [verb.name for verb in plugin.verbs],
    "the engine": lambda plugin: [engine.name for engine in plugin.engines],
    "the set of rules": lambda plugin: plugin.rule_sets,
    "the executor": lambda plugin: plugin.executors,
}


def plugins() -> Sequence[Plugin]:
    """The core and all plugins that are here."""
    return registered().plugins


def failures() -> list[str]:
    """A line for each plugin that could not be imported."""
    return [
        f"the plugin {n!r} is not loaded: {why}" for n, why in registered().failures.items()
    ]


def absent_plugins() -> str:
    """What to add to an error about a name that a plugin may have; empty if all are here."""
    absent = registered().absent
    return f"; plugins that are not here: {', '.join(absent)}" if absent else ""


def verbs() -> dict[str, Verb]:
    """All verbs by name, those of the core first."""
    return {verb.name: verb for plugin in plugins() for verb in plugin.verbs}


def option_groups(verb: str) -> list[Any]:
    """The dataclasses of options that plugins add to a verb of the core."""
    groups = (group for plugin in plugins() for group in plugin.options)
    return [load(group.options) for group in groups if verb in group.verbs]


def engines() -> Iterator[EngineEntry]:
    """All engines, those of the core first: in order of preference."""
    return (engine for plugin in plugins() for engine in plugin.engines)


def title_of(spec: str) -> str:
    """What messages call the engine in ``NAME`` or ``NAME:DEVICE``: ``OpenVINO on GPU``."""
    name, _, device = spec.partition(":")
    entry = next((one for one in engines() if one.name == name.strip().lower()), None)
    if entry is None:
        return spec
    title, device = entry.title or entry.name, device.strip() or entry.device
    return title if device == "CPU" else f"{title} on {device}"


def executors() -> dict[str, str]:
    """What gives the workers of each place where evaluations run, by its name."""
    return {name: ref for plugin in plugins() for name, ref in plugin.executors.items()}


def public_name(name: str) -> Any:
    """What a plugin gives for a public name of a module of the core; its module of that name.

    Raises:
        AttributeError: If no plugin has the name, or its module needs what is not installed.
    """
    for plugin in plugins():
        if name in plugin.names:
            return load(plugin.names[name])
    module, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except FinecastError as error:
        raise AttributeError(f"{name}: {error}") from error
    except ModuleNotFoundError as error:
        if error.name != name:
            raise AttributeError(f"{name}: {error}") from error
    what = f"module {module!r} has no attribute {attribute!r}"
    raise AttributeError("; ".join((what, *failures())) + absent_plugins())


class _Alias(Loader):
    """Imports a module under another name than its own.

    Law: both names are one module object, so that a class has one identity.
    """

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself; its own spec is kept for ``exec_module``."""
        module = importlib.import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which Python's import has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class _PublicModules(MetaPathFinder):
    """Finds ``finecast.NAME`` of a plugin, where the core has no such module.

    Attributes:
        busy: Whether plugins are being loaded: what they import is none of their own.
    """

    busy = False

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """The spec of a public module of a plugin; None for any other name."""
        del path, target
        if self.busy or not fullname.startswith("finecast."):
            return None
        self.busy = True
        try:
            packages = {k: v for plugin in plugins() for k, v in plugin.packages.items()}
        finally:
            self.busy = False
        if fullname not in packages:
            return None
        return ModuleSpec(fullname, _Alias(), loader_state=packages[fullname])


class _Submodules(MetaPathFinder):
    """Finds a module inside of one that was imported under another name than its own.

    It comes before Python's finder, which would load a copy.
    """

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """The spec of the module under its own name; None for any other name."""
        del path, target
        parent, _, name = fullname.rpartition(".")
        package = sys.modules.get(parent) if parent.startswith("finecast.") else None
        if package is None or package.__name__ == parent:
            return None
        return ModuleSpec(fullname, _Alias(), loader_state=f"{package.__name__}.{name}")


def install_public_modules() -> None:
    """Let Python import plugins' modules under ``finecast``; later calls do nothing."""
    if not any(isinstance(finder, _PublicModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Submodules())
        sys.meta_path.append(_PublicModules())
