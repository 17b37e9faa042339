"""An interpreter that runs in any image: with its standard library, every shared library that it loads, and the loader.

It is this worker's own interpreter. Started through its own loader, it needs nothing of the image, so that images without
Python, and images with another C library, serve as well.
"""

from __future__ import annotations

import functools
import marshal
import os
import re
import subprocess
import sys
import sysconfig
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path

from shared.sandbox import SandboxUnavailable, folders, inside
from shared.sandbox.bubblewrap import interpreter
from shared.sandbox.containers.engine import Engine
from shared.sandbox.containers.volumes import Entry, entries, volume

HOME, CODE = "/.etude", "/.etude-code"  # where sandboxes see the interpreter, and our own modules
_LIBRARY = f"{sys.platlibdir}/python{sys.version_info.major}.{sys.version_info.minor}"
_LEFT_OUT = re.compile(
    r"(site-packages|dist-packages|ensurepip|test|tests|idlelib|turtledemo|lib2to3|tkinter|distutils|pydoc_data|config-[^/]*|"
    r"unittest|sqlite3|curses|dbm|xmlrpc|wsgiref|venv|msilib)(/|\Z)"
)
# Halves in C whose libraries are large, or that serve tests.
_EXTENSIONS_LEFT_OUT = re.compile(
    r"(_tkinter|_sqlite3|_ssl|_curses|_curses_panel|readline|_dbm|_gdbm|nis|_?xx|_test|_ctypes_test)"
)
# Loads every extension and prints the libraries that the process then has, under the names that the loader looks for. One process
# does it; `ldd` takes one for each file.
_LOADED = """
import ctypes, sys
for path in sys.argv[1:]:
    ctypes.CDLL(path)
class Info(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
def show(info, size, data):
    name = (info.contents.name or b"").decode()
    if name.startswith("/"):
        print(name)
    return 0
ctypes.CDLL(None).dl_iterate_phdr(show, None)
"""
_CACHED = f".{sys.implementation.cache_tag}.pyc"


# An image may set variables for its own programs that would steer the loader; empty, they do nothing.
CLEAN = {"LD_PRELOAD": "", "LD_LIBRARY_PATH": "", "LD_AUDIT": ""}


def script(text: str, *arguments: str) -> list[str]:
    """Return the command line that runs a Python script in a sandbox; `arguments` are its sys.argv[1:]."""
    python = [f"{HOME}/bin/python3", "-I", "-S", "-X", "utf8", "-c", text]
    return [f"{HOME}/libraries/loader", "--library-path", f"{HOME}/libraries", *python, *arguments]


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of shared.sandbox.inside in a sandbox."""
    path = f"import runpy, sys; sys.path.insert(0, '{CODE}'); "
    return script(f"{path}runpy.run_module('{module}', run_name='__main__', alter_sys=True)", *arguments)


@functools.cache
def bundle() -> tuple[Entry, ...]:
    """Return the contents of the bundle. Raises SandboxUnavailable, OSError."""
    library = Path(sysconfig.get_path("stdlib"))
    found = [Entry("bin", 0o755), Entry("bin/python3", 0o755, source=interpreter())]
    found += [Entry(sys.platlibdir, 0o755), Entry(_LIBRARY, 0o755)]
    found += [
        Entry(f"{_LIBRARY}/{entry.path}", 0o755 if entry.source is None else 0o644, entry.source, entry.target)
        for entry in entries(library, _wanted)
    ]
    extensions = [str(entry.source) for entry in found if entry.path.endswith(".so") and entry.source is not None]
    return (*found, *_libraries(extensions))


def _wanted(path: str) -> bool:
    if _LEFT_OUT.match(path) or path.endswith(".a"):
        return False
    if path.endswith(".pyc"):
        return path.endswith(_CACHED)
    return not (path.startswith("lib-dynload/") and _EXTENSIONS_LEFT_OUT.match(path.rpartition("/")[2]))


def _libraries(extensions: list[str]) -> list[Entry]:
    command = [str(interpreter()), "-I", "-S", "-c", _LOADED, *extensions]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {os.path.basename(path): Path(path) for path in done.stdout.splitlines() if path not in extensions}
    loaders = [name for name in found if name.startswith(("ld-", "ld64"))]
    if len(loaders) != 1:
        raise SandboxUnavailable(
            f"{interpreter()}: found {len(loaders)} dynamic loaders ({', '.join(loaders) or done.stderr[-200:]}); allowed: one; "
            "use a dynamically linked Python"
        )
    made = [Entry("libraries", 0o755), Entry("libraries/loader", 0o755, source=found.pop(loaders[0]))]
    return made + [Entry(f"libraries/{name}", 0o755, source=path) for name, path in sorted(found.items())]


@functools.cache
def code() -> tuple[Entry, ...]:
    """Return our own modules, compiled: the loop starts with every sandbox."""
    folder = "shared/sandbox/inside"
    parents = [Entry(path, 0o755) for path in ("shared", "shared/sandbox", folder)]
    sources = sorted(Path(inside.__file__).parent.glob("*.py"))
    modules = {f"{folder}/{path.stem}": path for path in sources}
    modules["shared/sandbox/folders"] = Path(folders.__file__)  # it needs the standard library alone
    return (*parents, *(Entry(f"{name}.pyc", 0o644, source=_compiled(name, path)) for name, path in modules.items()))


def places(engine: Engine, image: str) -> dict[str, str]:
    """Return the volumes that every sandbox needs: place inside -> name. They are apart, because the interpreter is large and stays
    the same from one version of our modules to the next. Raises SandboxUnavailable, OSError."""
    return {HOME: volume(engine, bundle(), image), CODE: volume(engine, code(), image)}


def _compiled(name: str, path: Path) -> bytes:
    """Return a module's bytecode in the form that is not compared with its source (PEP 552).

    Every process writes the same bytes, which workers compare with a pod's. From version 3 on, marshal would write one thing or
    another by how many references an object has at that moment."""
    source = path.read_bytes()
    code = compile(source, f"{CODE}/{name}.py", "exec", dont_inherit=True)
    return MAGIC_NUMBER + (1).to_bytes(4, "little") + source_hash(source) + marshal.dumps(code, 2)
